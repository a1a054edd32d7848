"""`labctl serve --model` as it is typed: what is computed and refused before anything is rented."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from labctl.lab import Lab
from labctl.model import Endpoint, Offer, Server, ServerFacts

CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def model(home: Path) -> Path:
    """A model of 16 GB, as far as its file's size says; the file has holes."""
    folder = home / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(16_060_522_496)
    return folder


def ask_for_gpu(home: Path, gpu: str) -> None:
    path = home / "digits" / "lab.yaml"
    path.write_text(f"lab: digits\nrun: [python, train.py]\nserver: {{gpu: {gpu}}}\n")


def test_the_plan_comes_before_the_server(labctl: Any, home: Path, model: Path) -> None:
    ask_for_gpu(home, "L4")
    said = labctl("serve", "--model", str(model))
    assert said.code == 4
    assert "next: labctl up" in said.err
    assert "engine    vllm: the server has a GPU" in said.out
    assert "weights 15.0 GiB + KV cache 3.6 GiB" in said.out
    assert "context   29,520 tokens, of 131,072 that the model was made for" in said.out


def test_a_context_too_long_names_both_ways(labctl: Any, home: Path, model: Path) -> None:
    ask_for_gpu(home, "L4")
    said = labctl("serve", "--model", str(model), "--context", "40000")
    assert said.code == 2
    assert "a context of 40,000 tokens does not fit on L4 24GB" in said.err
    assert "it fits at 29,520, or quantized to int8" in " ".join(said.err.split())
    assert f"labctl serve --model {model} --quantize int8 --context 40000" in said.err
    assert said.out == ""


def test_an_incomplete_file_is_refused_before_anything_is_built(labctl: Any, home: Path) -> None:
    file = home / "digits" / "m.gguf"
    # A header without entries, and one of two tensors.
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 0))
    said = labctl("serve", "--model", "m.gguf")
    assert said.code == 2
    assert "its header has no embedding_length" in said.err
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 40))
    said = labctl("serve", "--model", "m.gguf")
    assert said.code == 2
    assert "m.gguf is incomplete" in said.err
    assert "download it again, then:" in said.err
    said = labctl("estimate", "m.gguf")
    assert said.code == 2
    assert "next: labctl serve --model m.gguf" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ask", "2+2?"), "--ask needs --model"),
        (("--engine", "vllm"), "--engine needs --model"),
        (("--load-test", "1m"), "--load-test needs --model"),
        (
            ("--model", "a/b", "--image", "x", "--port", "8"),
            "--model cannot be combined with --image",
        ),
        (("--model", "a/b", "night"), "--model cannot be combined with RUN"),
        (("--model", "a/b", "--push"), "--model cannot be combined with --push"),
        (("--model", "a/b", "--stop"), "--model cannot be combined with --stop"),
        (("--model", "a/b", "--concurrency", "8"), "--concurrency and --out need --load-test"),
        (("--model", "a/b", "--load-test", "soon"), "--load-test:"),
        (("--model", "a/b", "--load-test", "2d"), "--load-test takes from 1s to 24h"),
        (("--model", "a/b", "--detach", "--ask", "x"), "--detach cannot be combined with --ask"),
        (("--model", "a/b", "--quantize", "q4"), "--quantize: 'q4' is not one of"),
        (("--model", ""), "the name of the model is empty"),
        (("--model", "LLAMA", "--local-port", "99999"), "is not a whole number from 0 to 65535"),
        (("--model", "LLAMA", "--load-time", "-5"), "is not a whole number from 1 to 86400"),
        (("--model", "LLAMA", "--quantize", "gguf:Q4_K_M"), "this directory has no GGUF file"),
        (("--model", "../b/c"), "neither a directory nor the name of a model"),
        (("--model", "LLAMA", "--engine", "vllm"), "vllm needs a GPU"),
        (("--model", "LLAMA", "--engine", "llama.cpp"), "llama.cpp does not load safetensors"),
        (("--model", "LLAMA", "--quantize", "awq"), "this model is not published in awq"),
        (("--model", "LLAMA", "--quantize", "bnb-4bit"), "bnb-4bit needs a GPU"),
    ],
)
def test_an_invalid_combination_is_a_usage_error(
    labctl: Any, home: Path, model: Path, words: tuple[str, ...], message: str
) -> None:
    ask_for_gpu(home, "none")
    said = labctl("serve", *(str(model) if word == "LLAMA" else word for word in words))
    assert said.code == 2
    assert message in " ".join(said.err.split())
    assert "next: " in said.err or "serve --help" in said.err


def test_missing_weights_are_noticed_before_anything_is_rented(
    labctl: Any, home: Path, model: Path
) -> None:
    ask_for_gpu(home, "none")
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(5_000_000_000)
    said = " ".join(labctl("serve", "--model", str(model)).out.split())
    assert "the files have 4.7 GiB, but config.json describes a model of 15.0 GiB" in said


def test_the_main_memory_of_a_machine_without_a_gpu_is_known(
    labctl: Any, home: Path, model: Path
) -> None:
    ask_for_gpu(home, "none")
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    server = Server(
        id="box-1", provider="local", lab="digits", lab_id=lab.id, alias="digits",
        endpoint=Endpoint(host="127.0.0.1"), offer=Offer(provider="local", type="container"),
        created_at=time.time(), state="running",
    )  # fmt: skip
    lab.context.state.save_server(server)
    (lab.context.paths.ssh_dir / server.id).mkdir(parents=True)
    lab.context.save_facts(server, ServerFacts(os="Debian", memory_bytes=16 * 1024**3))
    said = labctl("serve", "--model", str(model))
    assert said.code == 2
    assert "the model does not fit on main memory (16.0 GiB)" in said.err
