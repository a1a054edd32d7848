"""The sample project on a real GPU: a whole training, kills, checkpoints, memory that runs out."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
from gpu_card import NoteFigure
from template_project import TEMPLATE, finish, start_anew

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("card")]
GIB = 1024**3
# Takes all of the GPU's memory but some GiB, and holds it until killed.
OCCUPYING = """
import sys, time, torch
torch.cuda.init()
torch.zeros(1, device="cuda")
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - int(float(sys.argv[1]) * 2**30), dtype=torch.uint8, device="cuda")
print("held", flush=True)
time.sleep(600)
"""
PREDICTING = """
import json, sys
from pathlib import Path
from PIL import Image
import predict
loaded = predict.load(Path(sys.argv[1]))
pictures = [Image.open(path) for path in sorted(Path(sys.argv[2]).rglob("*.png"))[::9]]
print(json.dumps({"device": str(loaded.device), "rows": loaded.predict(pictures),
                  "reference": loaded.reference}))
"""


def train(run: Path, data: Path, *arguments: str, exit_code: int = 0) -> str:
    return finish(start_anew("train.py", *arguments, run=run, data=data), exit_code)


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def load_model(checkpoint: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(checkpoint / "model.safetensors"))


def differ(first: Path, second: Path) -> float:
    """The largest difference between the weights of two checkpoints."""
    one, other = load_model(first), load_model(second)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def evaluate(run: Path, data: Path, device: str) -> dict[str, Any]:
    arguments = (str(run / "checkpoints"), "--device", device, "--json")
    output = finish(start_anew("evaluate.py", *arguments, run=run, data=data))
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> tuple[Path, str]:
    """A training with the defaults of the sample project, and its output."""
    run = tmp_path_factory.mktemp("trained")
    return run, train(run, digits)


def test_the_whole_training(trained: tuple[Path, str], figure: NoteFigure) -> None:
    run, output = trained
    metrics = json.loads((run / "logs" / "metrics.json").read_text())
    assert re.search(r"on cuda, (bfloat16|float16), batches of 32", output)
    assert metrics["accuracy"] > 0.95
    assert json.loads((run / "logs" / "evaluation.json").read_text())["where"] == "server"
    figure("training, first line", output.splitlines()[0])
    figure("training, last lines", output.splitlines()[-2:])


def test_a_checkpoint_of_the_gpu_is_read_on_a_cpu(trained: tuple[Path, str], digits: Path) -> None:
    """Evaluation says the same wherever it runs."""
    run, _ = trained
    there, here = (evaluate(run, digits, device) for device in ("cuda", "cpu"))
    assert (there["correct"], there["checkpoint"]) == (here["correct"], here["checkpoint"])
    assert there["loss"] == pytest.approx(here["loss"], abs=1e-4)


def test_predictions_are_those_of_a_cpu(
    trained: tuple[Path, str], digits: Path, monkeypatch: pytest.MonkeyPatch, figure: NoteFigure
) -> None:
    run, _ = trained
    script = run / "predicting.py"
    script.write_text(PREDICTING)
    monkeypatch.setenv("PYTHONPATH", str(TEMPLATE), prepend=":")
    monkeypatch.setenv("LABCTL_DATA_DIR", str(digits.parent))
    replies = []
    for visible in ("0", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        words = [sys.executable, "-B", str(script), str(run), str(digits / "test")]
        done = subprocess.run(words, cwd=run, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        replies.append(json.loads(done.stdout))
    there, here = replies
    assert (there["device"], here["device"]) == ("cuda", "cpu")
    rows = [numpy.array(reply["rows"]) for reply in replies]
    difference = float(abs(rows[0] - rows[1]).max())
    figure("predict, largest difference to a CPU", difference)
    assert difference < 0.02
    assert sum(there["reference"]) == sum(here["reference"])


@pytest.mark.parametrize(("precision", "name"), [("fp16", "float16"), ("off", "float32")])
def test_other_precisions(tmp_path: Path, digits: Path, precision: str, name: str) -> None:
    """Resumed too, since fp16 keeps the scale of the loss in its checkpoint."""
    arguments = ("--amp", precision, "--seed", "1")
    assert f"cuda, {name}," in train(tmp_path, digits, *arguments, "--epochs", "2")
    scaler = json.loads((newest(tmp_path) / "state.json").read_text())["scaler"]
    assert bool(scaler) == (precision == "fp16")
    output = train(tmp_path, digits, *arguments, "--epochs", "5")
    assert f"resuming from {newest(tmp_path).parent}/step-00000080" in output
    assert json.loads((tmp_path / "logs" / "metrics.json").read_text())["accuracy"] > 0.8


def wait_for_step(run: Path, process: subprocess.Popen[str], step: int) -> None:
    """Wait until a checkpoint of at least this step is there."""
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        found = sorted((run / "checkpoints").glob("step-*"))
        if found and int(found[-1].name[5:]) >= step:
            return
        time.sleep(0.01)
    process.kill()
    pytest.fail(f"no checkpoint of step {step}: {process.communicate()[0]}")


@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_a_killed_training_ends_with_the_numbers_of_one_that_was_not(
    tmp_path: Path, digits: Path, kill: signal.Signals, figure: NoteFigure
) -> None:
    arguments = ("--epochs", "4", "--checkpoint-every", "5", "--keep", "1000", "--seed", "3")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(whole, digits, *arguments)
    process = start_anew("train.py", *arguments, run=killed, data=digits)
    wait_for_step(killed, process, 60)
    process.send_signal(kill)
    output = finish(process, 143 if kill == signal.SIGTERM else -kill)
    saved = newest(killed)
    if kill == signal.SIGTERM:
        assert f"stopped after step {int(saved.name[5:])};" in output
    resumed = train(killed, digits, *arguments)
    assert f"resuming from {saved}" in resumed
    assert newest(killed).name == newest(whole).name == "step-00000160"
    difference = differ(newest(killed), newest(whole))
    figure(f"killed by {kill.name} at {saved.name}, difference of the weights", difference)
    assert difference == 0


def test_a_run_moves_between_gpu_and_cpu(tmp_path: Path, digits: Path) -> None:
    for epochs, device in ((1, "cuda"), (2, "cpu"), (3, "cuda")):
        output = train(tmp_path, digits, "--epochs", str(epochs), "--device", device)
        assert f"parameters, {device}," in output
        assert ("resuming from" in output) == (epochs > 1)
    assert newest(tmp_path).name == "step-00000120"


@pytest.fixture
def two_gib_are_left() -> Any:
    words = [sys.executable, "-c", OCCUPYING, "2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            yield
        finally:
            holder.kill()


@pytest.mark.usefixtures("two_gib_are_left")
def test_the_batch_size_is_what_memory_allows(
    tmp_path: Path, digits: Path, figure: NoteFigure
) -> None:
    """The largest would be 64, for 16 steps an epoch: it does not fit, and the run ends all the
    same. A resumed run keeps the size."""
    arguments = ("--image-size", "512", "--epochs", "2", "--batch-size", "auto")
    process = start_anew("train.py", *arguments, run=tmp_path, data=digits)
    wait_for_step(tmp_path, process, 1)
    process.kill()
    output = finish(process, -signal.SIGKILL)
    match = re.search(r"batches of (\d+)$", output, re.MULTILINE)
    assert match is not None, output
    figure("--batch-size auto, 512 pixels, 2 GiB free", int(match[1]))
    assert 1 <= int(match[1]) < 64
    resumed = train(tmp_path, digits, *arguments)
    assert "resuming from" in resumed
    assert f"batches of {match[1]}\n" in resumed
    assert "test accuracy" in resumed
