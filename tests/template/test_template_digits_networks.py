"""The templates tensorflow and jax, where their libraries are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from assembled import assemble, finish, read_newest, start, stop_after, train

from labctl.insight.scalars import read_scalars
from labctl.runs.evaluation import read_evaluation

pytestmark = [pytest.mark.train, pytest.mark.long]
SHORT = ("--epochs", "2", "--batch-size", "64", "--width", "16", "--checkpoint-every", "5")
SHORT += ("--lr", "0.01")  # so that so few steps learn
STEPS = 40
PREDICT = """
import sys
from pathlib import Path
from PIL import Image
import predict
predictor = predict.load(Path(sys.argv[1]))
rows = predictor.predict([Image.new(mode, (31, 7)) for mode in ("L", "RGB", "RGBA", "P")])
assert all(abs(sum(row) - 1) < 1e-3 and len(row) == 10 for row in rows), rows
assert sum(predictor.reference) == 270
print(predictor.checkpoint, predictor.classes)
"""


@pytest.fixture(params=["tensorflow", "jax"], scope="module")
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"the template {request.param} needs its package: requirements-cpu.txt")
    return assemble(request.param, tmp_path_factory.mktemp(request.param) / "project")


@pytest.fixture(scope="module")
def whole(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SHORT run that nothing interrupted."""
    run = tmp_path_factory.mktemp("whole")
    (run / "output").write_text(train(project, *SHORT, run=run))
    return run


def test_a_run_leaves_what_labctl_reads(project: Path, whole: Path) -> None:
    metrics = json.loads((whole / "logs" / "metrics.json").read_text())
    assert metrics["accuracy"] > 0.5
    progress = json.loads((whole / "logs" / "progress.json").read_text())
    assert (progress["step"], progress["total_steps"]) == (STEPS, STEPS)
    evaluation = read_evaluation(whole / "logs" / "evaluation.json")
    assert (evaluation.accuracy, evaluation.items) == (metrics["accuracy"], 270)
    assert evaluation.predictions is not None
    assert len(evaluation.predictions.predicted) == evaluation.items
    assert evaluation.worst[0].picture.startswith("data:image/png;base64,")
    losses = read_scalars(whole / "logs").get("train/loss")
    assert losses is not None
    assert losses.values[-1] < losses.values[0]
    output = finish(start(project, "evaluate.py", str(whole), "--json", run=whole))
    assert json.loads(output)["accuracy"] == metrics["accuracy"]


def test_a_stopped_training_goes_on_with_the_same_numbers(
    project: Path, whole: Path, tmp_path: Path
) -> None:
    assert ", with a checkpoint" in stop_after(project, 5, *SHORT, run=tmp_path)
    assert "resuming from" in train(project, *SHORT, run=tmp_path)
    assert read_newest(tmp_path) == read_newest(whole)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_learns_too(project: Path, tmp_path: Path, precision: str) -> None:
    train(project, *SHORT, "--precision", precision, run=tmp_path)
    assert json.loads((tmp_path / "logs" / "metrics.json").read_text())["accuracy"] > 0.4
    other = start(project, "train.py", *SHORT, run=tmp_path)
    assert "was made with other settings" in finish(other, 1)


def test_labctl_estimates_the_memory_of_its_network(project: Path, tmp_path: Path) -> None:
    words = ("estimate", "train.py:build_model", "--batch", "32", "--time-limit", "15m")
    done = subprocess.run(
        [sys.executable, "-m", "labctl", *words],
        cwd=project,
        env={key: value for key, value in os.environ.items() if key[:7] != "LABCTL_"}
        | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^19\.[67]k parameters, fp32, training with adamw", done.stdout), done.stdout
    assert re.search(r"what JAX keeps|the outputs of all layers", done.stdout)
    assert re.search(r"8 x 8 x 1 float32 \(from build_model\); (Flax|Keras) \d", done.stdout)


def test_it_predicts_pictures_as_labctl_serve_asks(project: Path, whole: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-B", "-c", PREDICT, str(whole / "checkpoints")],
        env={"PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "step-000000" in done.stdout
