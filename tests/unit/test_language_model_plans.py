"""What `serve --model` decides before anything is rented: source, engine, context, commands."""

from __future__ import annotations

import io
import json
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.errors import LabError, NotFoundError, PolicyError, UsageError
from labctl.services.language_models import source as sources
from labctl.services.language_models.engines import choose_engine
from labctl.services.language_models.gguf_header import BLOCKS, read_shape
from labctl.services.language_models.launch import LaunchChoice, build_command
from labctl.services.language_models.serving_plan import ServingMemory, ServingPlan, plan_serving
from labctl.services.language_models.source import LanguageModelSource, find_source

GIB = 1024**3
LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
L4 = ServingMemory(23034 * 1024**2, "NVIDIA L4", 1)
PROCESSOR = ServingMemory(32 * GIB, "main memory")


def write_model(folder: Path, **more: Any) -> Path:
    """A directory as `save_pretrained` leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA_3_8B, **more}))
    (folder / "model.safetensors").write_bytes(bytes(100))
    return folder


def hub_model(**more: Any) -> LanguageModelSource:
    shape = sources.parse_shape(json.dumps({**LLAMA_3_8B, **more}).encode())
    return LanguageModelSource(name="meta-llama/Llama-3.1-8B", kind="hub", shape=shape)


def plan(
    model: LanguageModelSource, memory: ServingMemory, form: str = "none", **more: Any
) -> ServingPlan:
    chosen = choose_engine(
        "auto", form, is_gguf=model.is_gguf, published=model.shape.quantized,
        has_gpu=memory.gpus > 0,
    )  # fmt: skip
    return plan_serving(model, chosen.engine, chosen.reason, form, memory, **more)


def test_the_context_that_fits_is_chosen() -> None:
    made = plan(hub_model(), L4)
    assert (made.engine, made.gpus) == ("vllm", 1)
    assert made.context % 16 == 0
    assert made.total_bytes <= L4.bytes * 0.9 < made.total_bytes + 16 * made.kv_bytes_per_token
    assert made.kv_cache_bytes == made.context * made.kv_bytes_per_token
    assert plan(hub_model(), L4, context=4096).sequences == made.context // 4096
    assert plan(hub_model(), PROCESSOR).engine == "transformers"
    # Two GPUs of one kind share heads that can be divided.
    assert plan(hub_model(), ServingMemory(L4.bytes, L4.name, 2)).context > 2 * made.context
    assert plan(hub_model(), ServingMemory(L4.bytes, L4.name, 3)).gpus == 1


def test_one_too_long_is_refused_with_what_fits() -> None:
    fitting = plan(hub_model(), L4).context
    with pytest.raises(UsageError, match="a context of 100,000 tokens does not fit") as refused:
        plan(hub_model(), L4, context=100_000)
    assert f"it fits at {fitting:,}" in refused.value.why
    assert "or quantized to bnb-4bit" in refused.value.why  # int8 leaves too little room
    with pytest.raises(UsageError) as refused:
        plan(hub_model(), L4, context=40_000)
    assert "or quantized to int8" in refused.value.why
    assert refused.value.hint.splitlines() == [
        f"labctl serve --model meta-llama/Llama-3.1-8B --context {fitting}",
        "labctl serve --model meta-llama/Llama-3.1-8B --quantize int8 --context 40000",
    ]
    with pytest.raises(UsageError, match="longer than this model's"):
        plan(hub_model(), L4, context=131_073)


def test_a_model_that_does_not_fit_at_all_names_a_way() -> None:
    with pytest.raises(UsageError, match="the model does not fit on NVIDIA T4") as refused:
        plan(hub_model(), ServingMemory(15 * GIB, "NVIDIA T4", 1))
    assert "quantized to int8" in refused.value.why
    with pytest.raises(UsageError) as refused:
        plan(hub_model(num_hidden_layers=320), ServingMemory(15 * GIB, "NVIDIA T4", 1))
    assert refused.value.hint.startswith("labctl offers --min-gpu-memory ")
    with pytest.raises(UsageError) as refused:
        plan(hub_model(), ServingMemory(14 * GIB, "main memory"))
    assert "--quantize gguf:Q8_0" in refused.value.hint


def test_several_clients_need_as_many_caches() -> None:
    model = LanguageModelSource(
        name="x.gguf", kind="gguf", shape=hub_model().shape, path="/x", file="x.gguf",
        file_bytes=5 * GIB,
    )  # fmt: skip
    one, eight = plan(model, PROCESSOR), plan(model, PROCESSOR, sequences=8)
    assert one.engine == "llama.cpp"
    assert eight.context < one.context == 131072
    assert eight.total_bytes <= PROCESSOR.bytes * 0.9
    assert eight.kv_cache_bytes == 8 * eight.context * eight.kv_bytes_per_token


def test_on_a_shared_machine_a_model_does_not_take_all_memory() -> None:
    shared = ServingMemory(64 * GIB, "main memory", is_shared=True)
    made = plan(hub_model(), shared)
    assert (made.context, made.notes) == (8192, ())
    assert plan(hub_model(), shared, context=65_536).context == 65_536
    with pytest.raises(UsageError, match="does not fit on main memory"):
        plan(hub_model(), ServingMemory(16 * GIB, "main memory", is_shared=True))


def test_without_a_known_memory_the_context_is_moderate() -> None:
    made = plan(hub_model(), ServingMemory(0, ""))
    assert (made.context, made.sequences) == (8192, 0)
    assert "labctl does not know the memory" in made.notes[0]
    other = plan(hub_model(model_type="newest"), ServingMemory(0, ""))
    assert "labctl does not know newest" in other.notes[0]


@pytest.mark.parametrize(
    ("wanted", "form", "gguf", "published", "gpu", "engine"),
    [
        ("auto", "none", False, "", True, "vllm"),
        ("auto", "none", False, "", False, "transformers"),
        ("auto", "none", True, "gguf", True, "llama.cpp"),
        ("auto", "gguf:Q4_K_M", False, "", False, "llama.cpp"),
        ("auto", "awq", False, "awq", True, "vllm"),
        ("auto", "int8", False, "", True, "transformers"),
        ("auto", "bnb-4bit", False, "", True, "vllm"),
        ("transformers", "none", False, "", True, "transformers"),
        ("ollama", "gguf:Q4_K_M", False, "", False, "ollama"),
    ],
)
def test_the_engine_follows_from_format_and_hardware(
    wanted: str, form: str, gguf: bool, published: str, gpu: bool, engine: str
) -> None:
    chosen = choose_engine(wanted, form, is_gguf=gguf, published=published, has_gpu=gpu)
    assert chosen.engine.name == engine
    assert chosen.reason


@pytest.mark.parametrize(
    ("wanted", "form", "gguf", "published", "gpu"),
    [
        ("vllm", "none", False, "", False),
        ("vllm", "gguf:Q4_K_M", False, "", True),
        ("vllm", "none", True, "gguf", True),
        ("llama.cpp", "none", False, "", False),
        ("llama.cpp", "awq", False, "awq", True),
        ("transformers", "awq", False, "awq", True),
        ("transformers", "int8", False, "", False),
        ("auto", "bnb-4bit", False, "", False),
        ("auto", "awq", False, "", True),
        ("auto", "gptq", False, "awq", True),
        ("ollama", "none", False, "", True),
    ],
)
def test_what_no_engine_can_do_is_refused(
    wanted: str, form: str, gguf: bool, published: str, gpu: bool
) -> None:
    with pytest.raises(UsageError) as refused:
        choose_engine(wanted, form, is_gguf=gguf, published=published, has_gpu=gpu)
    assert refused.value.why
    assert refused.value.hint.startswith("labctl ")


def test_commands_of_the_engines() -> None:
    def build(
        model: LanguageModelSource, memory: ServingMemory, form: str = "none"
    ) -> tuple[str, ...]:
        chosen = choose_engine(
            "auto", form, is_gguf=model.is_gguf, published="", has_gpu=memory.gpus > 0
        )
        made = plan(model, memory, form)
        guarded = build_command(LaunchChoice(source=model, engine=chosen.engine, plan=made))
        assert guarded[:2] == ("python3", "-c")
        assert "0.0.0.0" not in "".join(guarded[5:]), "only the guard listens there"
        assert guarded[4] in "".join(guarded[5:]), "the engine's port"
        return guarded[5:]

    vllm = build(hub_model(), L4, "bnb-4bit")
    assert vllm[:3] == ("vllm", "serve", "meta-llama/Llama-3.1-8B")
    assert {"--max-model-len", "--seed", "bitsandbytes"} <= set(vllm)
    several = build(hub_model(), ServingMemory(L4.bytes, L4.name, 4))
    assert several[several.index("--tensor-parallel-size") + 1] == "4"
    slow = build(hub_model(), PROCESSOR)
    assert slow[:2] == ("transformers", "serve")
    assert {"cpu", "--no-trust-remote-code"} <= set(slow)
    gguf = hub_model()
    local = LanguageModelSource(
        name="m", kind="gguf", shape=gguf.shape, path="/m", file="m.gguf", file_bytes=9
    )
    program = build(local, PROCESSOR)
    assert json.loads(program[-1])["file"] == "/lab/model/m.gguf"


def test_of_several_gguf_files_one_must_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="has 2 GGUF files") as caught:
        find_source(str(tmp_path), "none", "")
    assert "a.gguf" in caught.value.hint


def test_a_directory_needs_weights_that_run_no_code(tmp_path: Path) -> None:
    model = find_source(str(write_model(tmp_path / "m")), "none", "")
    assert (model.kind, model.file_bytes, model.shape.layers) == ("directory", 100, 32)
    assert plan(model, PROCESSOR).weights_bytes == 100
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(PolicyError, match="no weights as safetensors") as refused:
        find_source(str(tmp_path / "m"), "none", "")
    assert "pickles" in refused.value.why
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(NotFoundError, match=r"has no config\.json"):
        find_source(str(tmp_path / "m"), "none", "")
    write_model(tmp_path / "bad", num_hidden_layers=10**30)
    with pytest.raises(UsageError, match="cannot compute the memory"):
        find_source(str(tmp_path / "bad"), "none", "")


@pytest.mark.parametrize("name", ["../etc/passwd", "a/b/c", "a b/c", "x", "a/b?c", "/a/b", "-a/b"])
def test_a_name_that_is_no_model_asks_nobody(name: str) -> None:
    with pytest.raises(UsageError, match="neither a directory nor the name of a model"):
        find_source(name, "none", "")


class Hub:
    """The bodies by path, and the authorization of each request."""

    def __init__(self) -> None:
        self.bodies: dict[str, tuple[int, bytes]] = {}
        self.tokens: list[str] = []


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the files that a test puts there; the real one cannot be reached from a test."""
    known = Hub()

    class Files(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known.tokens.append(self.headers.get("Authorization", ""))
            status, body = known.bodies.get(self.path, (404, b""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield known
        server.shutdown()
        thread.join()


def test_the_hub_is_asked_for_the_config_alone(hub: Hub) -> None:
    hub.bodies["/meta/llama/resolve/main/config.json"] = (200, json.dumps(LLAMA_3_8B).encode())
    model = find_source("meta/llama", "none", "hf_secret")
    assert (model.kind, model.shape.layers) == ("hub", 32)
    assert hub.tokens == ["Bearer hf_secret"]
    with pytest.raises(NotFoundError, match="was not found"):
        find_source("meta/other", "none", "")
    assert hub.tokens == ["Bearer hf_secret", ""]


def test_a_gated_model_names_the_secret(hub: Hub) -> None:
    hub.bodies["/meta/gated/resolve/main/config.json"] = (401, b"")
    with pytest.raises(PolicyError) as refused:
        find_source("meta/gated", "none", "")
    assert refused.value.hint == "labctl secret set HF_TOKEN"
    assert "secrets: [HF_TOKEN]" in refused.value.why
    with pytest.raises(PolicyError, match="does not give meta/gated") as refused:
        find_source("meta/gated", "none", "hf_secret")
    assert "hf_secret" not in str(vars(refused.value))


@pytest.mark.parametrize(
    "endpoint", ["http://hub.example", "http://127.0.0.1.example", "ftp://127.0.0.1"]
)
def test_the_token_is_not_sent_without_encryption(
    monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(UsageError) as refused:
        find_source("meta/llama", "none", "hf_secret")
    assert refused.value.hint == "unset HF_ENDPOINT"


def test_gguf_files_are_found_beside_the_model(hub: Hub) -> None:
    hub.bodies["/qwen/q/resolve/main/config.json"] = (200, json.dumps(LLAMA_3_8B).encode())
    names = ["q-Q4_K_M.gguf", "../../x-Q4_K_M.gguf", "q-q8_0.gguf", "README.md", "x;rm-Q2_K.gguf"]
    listing = {"siblings": [{"rfilename": name} for name in names]}
    hub.bodies["/api/models/qwen/q-GGUF"] = (200, json.dumps(listing).encode())
    for name in ("qwen/q", "qwen/q-GGUF"):
        model = find_source(name, "gguf:Q4_K_M", "")
        assert (model.repository, model.file) == ("qwen/q-GGUF", "q-Q4_K_M.gguf")
    assert find_source("qwen/q", "gguf:Q8_0", "").file == "q-q8_0.gguf"
    with pytest.raises(NotFoundError, match="was not found"):
        find_source("qwen/q", "gguf:Q2_K", "")
    hub.bodies["/api/models/qwen/q-GGUF"] = (200, b"[" * 10_000)
    with pytest.raises(NotFoundError):
        find_source("qwen/q", "gguf:Q2_K", "")


# 256 values in Q4_K are a block of 144 bytes, 64 in Q8_0 two of 34; 64 in float32 have 256 bytes.
TENSORS = (("q4", 256, 12, 0), ("q8", 64, 8, 160), ("f32", 64, 0, 256))
TENSOR_BYTES = 256 + 256


class Pairs:
    """The header of a GGUF file, written as its specification says."""

    def __init__(self) -> None:
        self.count, self.body = 0, b""

    def text(self, value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def add(self, key: str, value: int | str | tuple[int, ...] | list[str]) -> Pairs:
        self.count += 1
        self.body += self.text(key)
        if isinstance(value, str):
            self.body += struct.pack("<I", 8) + self.text(value)
        elif isinstance(value, tuple):
            self.body += struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)
        elif isinstance(value, list):
            self.body += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(self.text, value))
        else:
            self.body += struct.pack("<II", 4, value)
        return self

    def build(self, tensors: Sequence[tuple[str, int, int, int]] = ()) -> bytes:
        """Return the header; a tensor is its name, its number of values, its type, its offset."""
        infos = b"".join(
            self.text(name) + struct.pack("<IQIQ", 1, values, kind, offset)
            for name, values, kind, offset in tensors
        )
        return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), self.count) + self.body + infos


def gguf_header(**more: int | tuple[int, ...]) -> bytes:
    numbers = {
        "context_length": 512, "embedding_length": 64, "block_count": 2, "feed_forward_length": 128,
        "attention.head_count": 4, "attention.head_count_kv": 2, **more,
    }  # fmt: skip
    pairs = Pairs().add("general.architecture", "llama")
    for name, value in numbers.items():
        pairs.add(f"llama.{name}", value)
    return pairs.add("tokenizer.ggml.tokens", ["a", "b", "c"]).build(TENSORS)


def gguf_file() -> bytes:
    header = gguf_header()
    return header + bytes(-len(header) % 32 + TENSOR_BYTES)


def test_the_header_of_a_gguf_file_has_the_shape(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_file())
    model = find_source(str(path), "none", "")
    shape = model.shape
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (2, 4, 2, 16)
    assert (shape.vocabulary, shape.longest_context) == (3, 512)
    assert (model.file, model.path) == ("tiny.gguf", str(tmp_path))
    assert find_source(str(tmp_path), "none", "").file == "tiny.gguf"
    assert plan(model, PROCESSOR).context == 512
    path.write_bytes(b"GGML")
    with pytest.raises(UsageError, match="is not a language model in the format GGUF"):
        find_source(str(path), "none", "")


def test_a_download_that_was_interrupted_is_refused(tmp_path: Path) -> None:
    path, whole = tmp_path / "tiny.gguf", gguf_file()
    size = len(whole)
    path.write_bytes(whole[:-1])
    with pytest.raises(UsageError, match="is incomplete") as caught:
        find_source(str(path), "none", "")
    assert caught.value.why == f"the file has {size - 1:,} bytes, and its header says {size:,}"
    for cut in range(4, size, 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(UsageError, match="is incomplete"):
            find_source(str(path), "none", "")


def test_the_sizes_of_tensors_are_those_of_ggml() -> None:
    gguf = pytest.importorskip("gguf")
    known = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert BLOCKS.items() <= known.items()


def test_of_different_layers_the_largest_counts() -> None:
    header = gguf_header(**{"attention.head_count_kv": (1, 4), "feed_forward_length": (96, 128)})
    shape = read_shape(io.BytesIO(header + bytes(-len(header) % 32 + TENSOR_BYTES)))
    assert (shape.kv_heads, shape.width) == (4, 128)


def test_a_vocabulary_without_weights_is_no_model() -> None:
    header = gguf_header()
    with pytest.raises(ValueError, match="it has no weights"):
        read_shape(io.BytesIO(header[:8] + bytes(8) + header[16:]))


def test_one_part_of_a_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    path.write_bytes(Pairs().add("split.count", 3).build())
    with pytest.raises(UsageError) as caught:
        find_source(str(path), "none", "")
    assert "it is one of 3 parts" in caught.value.why


@pytest.mark.parametrize(
    "more", [{"block_count": 0}, {"embedding_length": 2**32 - 1}, {"context_length": 0}]
)
def test_a_header_without_sense_is_refused(more: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="its header has"):
        read_shape(io.BytesIO(gguf_header(**more)))


@given(st.integers(0, 600), st.binary(max_size=12))
def test_a_damaged_header_is_a_reason_and_no_crash(at: int, damage: bytes) -> None:
    whole = gguf_file()
    text = whole[:at] + damage + whole[at + len(damage) :]
    for damaged in (text, whole[:at]):
        with suppress(ValueError):
            assert read_shape(io.BytesIO(damaged)).layers > 0


def test_a_list_of_impossible_length_is_not_read() -> None:
    text = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    for kind, count in ((8, 2**63), (4, 2**63), (9, 1)):
        with pytest.raises(ValueError):
            read_shape(io.BytesIO(text + struct.pack("<IIQ", 9, kind, count)))


def test_errors_are_those_of_labctl(tmp_path: Path, hub: Hub) -> None:
    hub.bodies["/a/b/resolve/main/config.json"] = (500, b"")
    with pytest.raises(LabError, match="could not be read") as failed:
        find_source("a/b", "none", "")
    assert failed.value.hint.startswith("labctl serve --model DIRECTORY")
