"""`labctl estimate` as it is typed and read."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from labctl.cli.estimate_tables import print_costs
from labctl.estimate.compute import Workload
from labctl.insight.offer_costs import CostEstimate

EXAMPLE = shlex.split(
    "--params 8B --precision bf16 --train adam --batch 8 --seq 2048 --hidden 4096 --layers 32 "
    "--tokens 512M --tokens-per-second 3000"
)
KV_HEADS = shlex.split(
    "--params 70B --precision fp16 --serve --seq 4096 --hidden 8192 --layers 80 --heads 64 "
    "--kv-heads 8"
)
MEMORY_KEYS = {
    "weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "kv_cache_bytes",
    "overhead_bytes", "total_bytes", "simple_rule_bytes",
}  # fmt: skip


def asked(labctl: Any, *words: str) -> Any:
    said = labctl("estimate", *words, "--json")
    assert said.code == 0, said.err
    return json.loads(said.out)


def test_json_has_its_four_answers(labctl: Any) -> None:
    body = asked(labctl, *EXAMPLE)
    assert body["version"] == 1
    assert set(body["memory"]) == MEMORY_KEYS
    assert set(body["time"]) == {"hours"}
    assert body["time"]["hours"] == pytest.approx(47.4, abs=0.05)
    assert {"gpu", "fits", "memory_bytes"} <= set(body["fits"][0])
    assert body["costs"] == []
    assert body["memory"]["simple_rule_bytes"] == 64e9


def test_a_price_of_ones_own_makes_a_row(labctl: Any) -> None:
    (cost,) = asked(labctl, *EXAMPLE, "--price", "15")["costs"]
    assert cost["usd"] == pytest.approx(711, abs=1)
    assert "$711.11 at $15.00/h" in labctl("estimate", *EXAMPLE, "--price", "15").out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        # The V100 32GB fits too, and needs 26 hours without support for bf16.
        ("", "Time: 1 h 20 min on A100 40GB, the smallest GPU that fits and supports bf16."),
        ("--precision fp32", "on A100 40GB, the smallest GPU that fits."),
        ("--gpu H100", "Time: 25 min on H100 80GB, the smallest H100 that fits."),
        ("--gpu T4", "on T4 16GB, if it had enough memory."),
        ("--gpu none", "on A100 40GB, the smallest GPU that fits and supports bf16."),
    ],
)
def test_without_prices_the_time_is_that_of_a_gpu_that_suits(
    labctl: Any, options: str, words: str
) -> None:
    size = "--params 1B --batch 8 --seq 1024 --hidden 2048 --layers 16 --tokens 100M"
    said = labctl("estimate", "--train", "adam", *size.split(), *options.split())
    assert words in " ".join(said.out.split())
    assert said.out.count("Time:") == 1


def test_a_time_on_a_cpu_is_written_once(labctl: Any) -> None:
    size = "--params 10M --batch 8 --seq 64 --hidden 64 --layers 2 --tokens 100k"
    said = labctl("estimate", "--train", "adam", *size.split())
    assert "No GPU needed: about 60 s on a laptop's CPU" in said.out
    assert "Time:" not in said.out


def test_the_whole_answer_in_words(labctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    said = labctl("estimate", *EXAMPLE)
    assert (said.code, said.err) == (0, "")
    for words in (
        "8B parameters, bf16, training with adam, batch of 8 x 2,048 tokens",
        "The largest part: optimizer.",
        "The simple rule ignores activations (4.3 GB by its own rule",
        "Fits on none of these GPUs.",
        "Time: 47 h 24 min, by your throughput.",
        "The cost is unknown: local has no GPU",
        "--provider aws",
        "--zero 3 --data-parallel 2",
    ):
        assert words in said.out.replace("\n", " "), words


def test_without_credentials_it_does_not_suggest_the_provider_that_was_typed(
    labctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    out = labctl("estimate", *EXAMPLE, "--provider", "aws").out.replace("\n", " ")
    assert "The cost is unknown: no AWS credentials were found" in out
    assert "use --price 1.50 for your own" in out
    assert "--provider aws" not in out


def test_what_is_free_is_called_free(labctl: Any) -> None:
    size = ("--params", "1M", "--train", "adam", "--batch", "8", "--seq", "16", "--hidden", "32")
    out = labctl("estimate", *size, "--layers", "2", "--tokens", "10k").out
    (row,) = (line.split() for line in out.splitlines() if line.startswith("container "))
    assert row[-1] == "free"


@pytest.mark.parametrize("width", [80, 140])
def test_no_line_is_wider_than_the_terminal(
    labctl: Any, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for words in (
        EXAMPLE,
        ["--params", "175B", "--train", "adam", "--tokens", "300B"],
        [*KV_HEADS, "--requests-per-day", "10k", "--reply", "300", "--price", "30"],
        ["--kind", "trees", "--rows", "100k", "--columns", "50"],
    ):
        said = labctl("estimate", *words)
        assert said.code == 0
        lines = click.unstyle(said.out).splitlines()
        assert max(len(line.rstrip()) for line in lines) <= width


def test_both_kv_caches_are_shown(labctl: Any) -> None:
    words = [*KV_HEADS, "--bandwidth", "3TB"]
    out = labctl("estimate", *words).out
    assert "8 heads; with all 64 heads 10.7 GB" in out
    assert "Reading all weights takes 46.7 ms per token at the given bandwidth" in out
    body = asked(labctl, *words)
    assert body["details"]["kv_cache_all_heads_bytes"] == 8 * body["memory"]["kv_cache_bytes"]


def test_requests_a_day(labctl: Any) -> None:
    words = shlex.split(
        "--params 70B --precision fp16 --serve --requests-per-day 10000 --seconds-per-request 7 "
        "--price 30"
    )
    out = labctl("estimate", *words).out.replace("\n", " ")
    assert "19.4 GPU-hours a day" in out
    assert "$17,500.00 a month" in out
    assert asked(labctl, *words)["time"]["hours"] == pytest.approx(19.4, abs=0.05)


def test_no_gpu_needed_for_trees(labctl: Any) -> None:
    said = labctl("estimate", "--kind", "trees", "--rows", "100k", "--columns", "50")
    assert "No GPU needed: trees" in said.out
    assert "container (free)" in said.out


def test_it_works_outside_of_any_lab(labctl: Any, home: Path) -> None:
    (home / "My Models_1").mkdir()
    here = ("-C", str(home / "My Models_1"))
    said = labctl(*here, "estimate", "--params", "8B", "--precision", "int4")
    assert said.code == 0
    assert "4.0 GB" in said.out
    assert not list((home / "My Models_1").iterdir())


def test_what_limits_a_step_and_what_layers_keep_is_shown(labctl: Any) -> None:
    shape = EXAMPLE[: EXAMPLE.index("--tokens")]
    said = labctl("estimate", *shape, "--reclaim-every", "6h", "--checkpoint-time", "5m")
    words = " ".join(said.out.split())
    assert (said.code, said.err) == (0, "")
    assert "Compute-bound: 1,853 FLOP per byte, the H100 80GB balances at 295." in words
    # sqrt(2 x 300 s x 21,600 s) is 3,600 s.
    assert "Save a checkpoint every 1 h (Young's formula): writing one takes 300 s" in words
    assert "32 x feed-forward 40.8 GB 0 B" in words
    assert "at the peak 76.2 GB 9.7 GB" in words
    assert "MI300X 192GB no 102% labctl cannot rent this" in words


def test_no_interval_is_advised_where_servers_end_before_a_checkpoint_is_written(
    labctl: Any,
) -> None:
    size = ("--params", "1B", "--train", "adam", "--reclaim-every", "6h")
    said = labctl("estimate", *size, "--checkpoint-time", "4h")
    words = " ".join(said.out.split())
    assert "Save a checkpoint every" not in words
    assert "a server is reclaimed every 6 h on average" in words
    assert "the training makes hardly any progress." in words


def test_the_proposed_number_of_heads_divides_the_width(labctl: Any) -> None:
    size = ("--params", "1B", "--seq", "128", "--layers", "2", "--heads", "7")
    said = labctl("estimate", *size, "--hidden", "100")
    assert said.code == 2
    assert "--heads 1" in said.err
    assert "heads of width 100" in said.err
    assert "--heads 8" in labctl("estimate", *size, "--hidden", "1032").err


def test_a_mixture_of_experts_on_several_replicas(labctl: Any) -> None:
    size = "--params 47B --active-params 13B --serve --gpu H200 --price 4 --replicas 3"
    said = labctl("estimate", *size.split(), "--requests-per-day", "40k", "--reply", "300")
    words = " ".join(said.out.split())
    assert "47B parameters (13B for a token), bf16, serving, 3 replicas" in words
    assert "Memory-bound: 1 FLOP per byte, the H200 141GB balances at 206." in words
    assert "3 replicas are busy for 25% of the time." in words
    assert "Always on: $8,640.00 a month." in words
    few = labctl("estimate", *size.split()[:-1], "1", "--requests-per-day", "1M", "--reply", "300")
    assert "1 replica is too few: use --replicas 19." in " ".join(few.out.split())


def test_gpu_hours_in_words(labctl: Any) -> None:
    size = "--params 7B --train adamw --gpu A100 --gpu-hours 184320 --price 2 --batch 1024"
    split = "--data-parallel 1024"
    said = labctl("estimate", *size.split(), *split.split(), "--tokens", "2T")
    words = " ".join(said.out.split())
    assert "184,320 GPU-hours for this work are 41% of the peak of A100" in words
    assert "Time: 7 d 12 h (180.0 hours), by your GPU-hours." in words
    assert "In 184,320 GPU-hours, A100 80GB trains 1.97T tokens at 40% of its peak." in " ".join(
        labctl("estimate", *size.split(), *split.split()).out.split()
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "there is no model to estimate"),
        (("--params", "8X"), "'8X' is not a number"),
        (
            ("--params", "8B", "--train", "adam", "--serve"),
            "--train cannot be combined with --serve",
        ),
        (("--params", "8B", "--train", "adam", "--precision", "int4"), "cannot be trained"),
        (("train.py:build_model",), "has no file train.py"),
        (("train.py",), "does not name a function"),
        (("--params", "8B", "--utilization", "40"), "is not between 0 and 1"),
        (("--params", "8B", "--tokens-per-second", "nan"), "is not a finite number"),
        (("--params", "8B", "--price", "cheap"), "not a price"),
        (("--params", "8B", "--input", "3xbig"), "not a shape"),
        (("--params", "8B", "--active-params", "9B"), "larger than --params"),
        (("--params", "8B", "--train", "adam", "--replicas", "2"), "cannot be combined"),
        (("--params", "8B", "--gpu-hours", "2"), "needs a training"),
        (("--params", "8B", "--train", "adam", "--checkpoint-time", "5m"), "--reclaim-every"),
        (("--params", "8B", "--reclaim-every", "5h"), "needs a training"),
        (("--params", "8B", "--replicas", "0"), "--replicas"),
    ],
)
def test_what_makes_no_sense_is_refused(labctl: Any, words: tuple[str, ...], said: str) -> None:
    answer = labctl("estimate", *words)
    assert answer.code in (2, 4)
    assert said in answer.err
    assert answer.out == ""


@pytest.mark.parametrize(
    ("code", "target"),
    [
        ("def build_model(width=64): ...\n", "model.py:build_model"),
        ("def make_net(*, width=64): ...\n", "model.py:make_net"),
        ("def build_model(width): ...\ndef get_model(*, width): ...\n", "FILE.py:FUNCTION"),
        ("class Net: ...\n", "FILE.py:FUNCTION"),
        ("not Python", "FILE.py:FUNCTION"),
    ],
)
@pytest.mark.parametrize(
    "words", [[], ["model.py"], ["other.py:build_model"], ["--params", "8B", "--items", "60k"]]
)
def test_the_suggested_function_is_one_that_the_lab_has(
    labctl: Any, home: Path, code: str, target: str, words: list[str]
) -> None:
    (home / "digits" / "broken.py").write_text("def build_model(:\n")
    (home / "digits" / "model.py").write_text(code)
    answer = labctl("estimate", *words)
    assert answer.code in (2, 4)
    assert f"labctl estimate {target}" in answer.err
    assert "train.py" not in answer.err


def test_a_named_function_and_a_size_are_one_too_many(labctl: Any, home: Path) -> None:
    (home / "digits" / "train.py").write_text("")
    answer = labctl("estimate", "train.py:build_model", "--params", "8B")
    assert answer.code == 2
    assert "leave out one" in answer.err


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: labctl[train]"
)
def test_a_model_from_code_in_words(labctl: Any, home: Path) -> None:
    (home / "digits" / "train.py").write_text(
        "import torch\ndef build_model(): return torch.nn.Linear(1000, 10)\n"
    )
    said = labctl("estimate", "train.py:build_model", "--batch", "64", "--items", "1000")
    assert said.code == 0
    assert "10k parameters, fp32, training with adamw, batch of 64 items" in said.out
    assert "Input of one item: 1000 float32 (from its first layer)" in said.out
    assert "No GPU needed: < 1 s on a laptop's CPU" in said.out
    assert said.out.count("on a laptop's CPU") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "hint"),
    [
        ("Tagger", "write a function without parameters that returns the model"),
        ("two_inputs", "return (model, (first input, second input)) from the function"),
    ],
)
def test_a_model_that_lacks_an_argument_says_how_to_write_the_function(
    labctl: Any, home: Path, function: str, hint: str
) -> None:
    (home / "digits" / "model.py").write_text(
        "import torch\n"
        "class Tagger(torch.nn.Module):\n"
        "    def __init__(self, words):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(words, 2)\n"
        "    def forward(self, words, offsets): return self.layer(words)\n"
        "def two_inputs(): return Tagger(8)\n"
    )
    said = labctl("estimate", f"model.py:{function}", "--batch", "4")
    assert said.code == 1
    assert f"next: {hint}" in " ".join(said.err.split())


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: labctl[train]"
)
def test_an_exception_of_the_code_names_the_users_file_and_line(
    labctl: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line of labctl's program or of PyTorch hides it, and the layer's own message is there."""
    monkeypatch.setenv("COLUMNS", "80")
    lab = home / "digits"
    (lab / "nets").mkdir()
    (lab / "nets" / "small.py").write_text(
        "import torch\n"
        "class Small(torch.nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(width, 2)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x.flatten())\n"
    )
    (lab / "model.py").write_text(
        "from nets.small import Small\n"
        "def build_model():\n"
        "    return Small(8)\n"
        "def build_wrong():\n"
        "    return Small()\n"
    )
    said = labctl("estimate", "model.py:build_model", "--batch", "4")
    assert said.code == 1
    assert "labctl: the forward or backward pass of model.py:build_model failed\n" in said.err
    assert (
        '    File "nets/small.py", line 7, in forward\n'
        "      return self.layer(x.flatten())\n"
        "  RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    ) in said.err
    assert "<string>" not in said.err
    assert "torch/nn" not in said.err

    said = labctl("estimate", "model.py:build_wrong", "--batch", "4")
    assert '    File "model.py", line 5, in build_wrong\n      return Small()\n' in said.err
    assert "without parameters" not in said.err, "build_wrong has none"
    assert "next: labctl estimate --params 8B\n" in said.err


def test_the_name_of_a_missing_package_is_in_the_command_that_installs_it(
    labctl: Any, home: Path
) -> None:
    (home / "digits" / "model.py").write_text("import no_such_package.layers\n")
    said = labctl("estimate", "model.py:build_model", "--batch", "4")
    assert "labctl: model.py:build_model cannot be imported" in said.err
    assert 'File "model.py", line 1, in <module>' in said.err
    assert " -m pip install no_such_package\n" in said.err


def test_a_slow_link_is_named_as_what_limits_the_training(labctl: Any, home: Path) -> None:
    words = "--params 8B --train adamw --batch 64 --seq 2048 --hidden 4096 --layers 32 --price 20"
    call = ("estimate", *words.split(), "--data-parallel", "8", "--tokens", "100M")
    slow = " ".join(labctl(*call, "--link", "25gbit").out.split())
    assert "Each GPU sends 28.0 GB of gradients per step: 8.96 s over 25gbit." in slow
    assert "the link limits the training" in slow
    fast = " ".join(labctl(*call, "--link", "nvlink").out.split())
    assert "the link limits the training" not in fast
    assert "over nvlink. The step computes" in fast
    smaller = " ".join(labctl(*call, "--link", "25gbit", "--compress", "powersgd").out.split())
    assert "of gradients, compressed by powersgd, per step" in smaller
    assert labctl(*call, "--compress", "powersgd").code == 2


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_tables_fit_a_narrow_terminal_and_cut_no_word(
    labctl: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    text = click.unstyle(labctl("estimate", *EXAMPLE, "--gpu", "T4").out)
    assert "…" not in text
    for words in ("for each trained parameter", "no bf16 support: as slow as fp32", "same result,"):
        assert words in " ".join(text.split()), words
    offers = [
        CostEstimate(
            provider="aws", type="p6-b200.48xlarge", zone="us-east-1c", spot=spot, gpu="B200",
            gpu_count=8, gpu_memory_bytes=180 * 10**9, servers=1, price_usd_per_hour=113.93,
            fits=True, hours=12.97, usd=1476.91,
        )
        for spot in (True, False)
    ]  # fmt: skip
    estimate: Any = SimpleNamespace(costs=offers, amount=Workload())
    print_costs(estimate)
    lines = click.unstyle(capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split()[0] == "TYPE"
    assert {"MARKET", "COST"} <= {*lines[0].split()}
    assert ("PRICE" in lines[0]) == (width == 80)
    assert lines[2].endswith("  $1,476.91")
