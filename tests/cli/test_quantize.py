"""`labctl quantize` as it is typed: the table of both models, and programs that report nonsense."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from labctl.insight.quantization.measurements import parse_result
from labctl.lab import Lab
from labctl.model import Run


@pytest.fixture
def pulled(home: Path) -> Path:
    """The directory of a lab with a pulled run."""
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    run = Run(id="night", lab_id=lab.id, server_id="box-0", state="exited", created_at=time.time())
    lab.context.state.save_run(run)
    checkpoints = home / "digits" / "runs" / "night" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    return home / "digits"


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300,
    "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 512,
}  # fmt: skip


PREDICTIONS = {"order_sha256": "0" * 64, "truth": [0, 1], "said": [1, 1]}


def row(name: str, size: int, correct: int, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "size_bytes": size, "latency_ms": 0.5, "correct": correct, "total": 1000,
        **more,
    }  # fmt: skip


def write_script(lab: Path, line: str, code: int = 0) -> None:
    text = f"import sys\nassert sys.argv[2:] == ['--to', 'int8'], sys.argv\nprint({line!r})\n"
    (lab / "quantize.py").write_text(f"{text}sys.exit({code})\n")


def test_both_stand_side_by_side_with_their_intervals(labctl: Any, pulled: Path) -> None:
    rows = [row("float32", 400_000, 962), row("int8 (PTQ)", 100_000, 958)]
    write_script(pulled, json.dumps({"model": "step-00000400", "rows": rows}))
    said = labctl("quantize", "--to", "int8")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[0] == "step-00000400"
    assert lines[1].split() == ["WEIGHTS", "SIZE", "LATENCY", "ACCURACY", "95%", "INTERVAL"]
    assert "96.20% (962 of 1,000)" in lines[2]
    assert "94.83% to 97.22%" in lines[2]
    assert "95.80% (958 of 1,000)" in lines[3]
    assert "4.0 times smaller; accuracy -0.40 points, within the interval" in said.err
    report = json.loads(labctl("quantize", "night", "--to", "int8", "--json").out)
    assert report["quantized"]["rows"][1]["correct"] == 958


def test_predictions_of_each_item_are_tested_in_pairs(labctl: Any, pulled: Path) -> None:
    def predict(correct: int) -> dict[str, Any]:
        said = [1] * correct + [0] * (1000 - correct)
        return {"order_sha256": "0" * 64, "truth": [1] * 1000, "said": said}

    rows = [
        row("float32", 400_000, 962, predictions=predict(962)),
        row("int8 (PTQ)", 100_000, 950, predictions=predict(950)),
    ]
    write_script(pulled, json.dumps({"model": "step-00000400", "rows": rows}))
    said = labctl("quantize", "--to", "int8")
    assert said.code == 0, said.err
    message = " ".join(said.err.split())
    assert "4.0 times smaller; accuracy -1.20 points Only float32 is right on 12 items" in message
    assert "only int8 (PTQ) on 0. McNemar's test (exact): p < 0.001. float32 is better" in message
    report = json.loads(labctl("quantize", "--to", "int8", "--json").out)
    assert report["pairs"][0]["is_significant"] is True
    assert "said" not in json.dumps(report), "a table of results, not of each item"


def test_a_script_that_fails_is_quoted(labctl: Any, pulled: Path) -> None:
    write_script(pulled, "no result", code=3)
    said = labctl("quantize", "--to", "int8")
    assert said.code == 1
    assert "quantize.py failed with exit code 3" in said.err
    assert "fix quantize.py, then:" in said.err
    assert "pip install" not in said.err, "no package is missing"
    write_script(pulled, "no result")
    assert "quantize.py printed no comparison" in labctl("quantize", "--to", "int8").err


@pytest.mark.parametrize(("package", "install"), [("torchao", "quantize]"), ("pandas", "pandas")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    labctl: Any, pulled: Path, package: str, install: str
) -> None:
    line = f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')"
    (pulled / "quantize.py").write_text(line)
    said = labctl("quantize", "--to", "int8")
    assert said.code == 1
    assert f"quantize.py needs {package}, which labctl's Python environment lacks" in said.err
    assert re.search(rf"install\S* .*{re.escape(install)}", said.err), said.err


def test_what_is_missing_is_named(labctl: Any, pulled: Path) -> None:
    assert "the lab has no quantize.py" in labctl("quantize", "--to", "int8").err
    write_script(pulled, "{}")
    checkpoints = pulled / "runs" / "night" / "checkpoints"
    (checkpoints / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n.")
    said = labctl("quantize", "--to", "int8")
    assert said.code == 3
    assert "loading a pickle runs any code" in said.err
    (checkpoints / "model.safetensors").unlink()
    checkpoints.rmdir()
    assert "next: labctl pull night" in labctl("quantize", "--to", "int8").err
    (pulled / "sample.txt").write_text("text")
    said = labctl("quantize", "--to", "int8", "--text", "sample.txt")
    assert said.code == 2
    assert "--text needs a language model" in said.err


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "[" * 100_000,
        {"model": "m", "rows": []},
        {"model": "m", "rows": [row("a", 1, 1)]},
        {"model": "m", "rows": [row("a", 1, 1), row("b", 0, 1)]},
        {"model": "m", "rows": [row("a", 1, 1), row("b", 1, 1001)]},
        {"model": "m", "rows": [row("a", 1, 1), row("b", 1, 0, total=0)]},
        {"model": "m", "rows": [row("a", 1, 1), row("b" * 100, 1, 1)]},
        {"model": "m", "rows": [row("a", 1, 1), row("b", 1, 1, latency_ms=-1)]},
        {"model": "m", "rows": [row("a", 1, 1), row("b", 1, 1, predictions=PREDICTIONS)]},
        {"model": "m", "rows": [row("a", 1, 1), row("b", 1, 2, total=2, predictions=PREDICTIONS)]},
    ],
)
def test_a_damaged_result_is_refused(body: Any) -> None:
    with pytest.raises(ValueError):
        parse_result(body if isinstance(body, str) else json.dumps(body))


def test_a_model_of_the_hub_is_named_with_its_download(labctl: Any, pulled: Path) -> None:
    said = labctl("quantize", "Qwen/Qwen2.5-0.5B", "--to", "int8")
    assert said.code == 2
    assert "Qwen/Qwen2.5-0.5B is neither a run nor a directory with config.json" in said.err
    assert "hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B" in said.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "is not a text in UTF-8"),
        (b"hello", "is too short"),
        (b"", "is too short"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_at_once(
    labctl: Any, pulled: Path, content: bytes, message: str
) -> None:
    model = pulled / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    (model / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    (pulled / "sample.txt").write_bytes(content)
    said = labctl("quantize", "model", "--to", "int8", "--text", "sample.txt")
    assert said.code == 2
    assert message in said.err
    assert "next: " in said.err


def test_a_failure_is_its_last_lines_without_the_noise_of_libraries(
    labctl: Any, pulled: Path
) -> None:
    lines = [f"warning {number}" for number in range(50)]
    text = f"import sys\nprint({chr(10).join(lines)!r}, file=sys.stderr)\n"
    (pulled / "quantize.py").write_text(f"{text}raise SystemExit('the weights are not finite')\n")
    said = labctl("quantize", "--to", "int8")
    assert "the weights are not finite" in said.err
    assert "warning 1\n" not in said.err
    assert "pip install" not in said.err
    (pulled / "quantize.py").write_text("import torchao_of_tomorrow\n")
    hint = labctl("quantize", "--to", "int8").err.partition("next:")[2]
    assert "pip install torchao_of_tomorrow" in hint
