"""The template tabular: scikit-learn always, XGBoost and LightGBM where they are installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from assembled import assemble, finish, read_newest, start, stop_after, train

from labctl.insight.scalars import read_scalars
from labctl.runs.evaluation import read_evaluation

pytestmark = pytest.mark.train
TREES = ("xgboost", "lightgbm")
HEAD = "width,length,kind\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assemble("tabular", tmp_path_factory.mktemp("tabular") / "project")


@pytest.fixture(scope="module")
def run(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short training of the linear model."""
    run = tmp_path_factory.mktemp("run")
    (run / "output").write_text(train(project, "--rounds", "3", run=run))
    return run


def needs(model: str) -> None:
    if importlib.util.find_spec(model) is None:
        pytest.skip(f"the template tabular needs {model}: pip install {model}")


def test_a_run_leaves_what_labctl_reads(project: Path, run: Path) -> None:
    metrics = json.loads((run / "logs" / "metrics.json").read_text())
    assert metrics["accuracy"] == metrics["correct"] / metrics["total"] > 0.55
    assert (metrics["split"], metrics["run"]) == ("test", "run-1")
    progress = json.loads((run / "logs" / "progress.json").read_text())
    assert (progress["step"], progress["total_steps"]) == (3, 3)
    evaluation = read_evaluation(run / "logs" / "evaluation.json")
    assert evaluation.classes == ("early", "late", "on time")
    assert (evaluation.accuracy, evaluation.items) == (metrics["accuracy"], metrics["total"])
    assert evaluation.baseline_accuracy is not None
    assert 0.3 < evaluation.baseline_accuracy < evaluation.accuracy
    assert "distance_km" in evaluation.worst[0].item
    assert evaluation.predictions is not None
    assert len(evaluation.predictions.predicted) == evaluation.items
    curves = read_scalars(run / "logs")
    losses = curves.get("val/loss")
    assert losses is not None
    assert losses.steps == (1, 2, 3)
    output = finish(start(project, "evaluate.py", str(run), "--json", run=run))
    assert json.loads(output)["accuracy"] == metrics["accuracy"]


def test_a_checkpoint_holds_no_pickle_and_is_verified(
    project: Path, run: Path, tmp_path: Path
) -> None:
    names = sorted(path.name for path in (run / "checkpoints" / "step-00000003").iterdir())
    assert names == ["manifest.json", "model.safetensors", "state.json"]
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    for weights in (damaged / "checkpoints").glob("*/model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])
    output = finish(start(project, "evaluate.py", str(damaged), run=damaged), 1)
    assert "evaluate: no whole checkpoint" in output


@pytest.mark.skipif(importlib.util.find_spec("lightgbm") is not None, reason="LightGBM is here")
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    project: Path, tmp_path: Path
) -> None:
    output = finish(start(project, "train.py", "--model", "lightgbm", run=tmp_path), 1)
    assert output == "train: No module named 'lightgbm': pip install -r requirements.txt\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a line of names"),
        (HEAD, "a line of names"),
        (HEAD + "1,two,a\n", "line 2, length: 'two' is not a number"),
        (HEAD + "1,2,a,b\n", "line 2: 4 cells, not 3"),
        (HEAD + "1,2,a\n" * 9, "same value in each row"),
        (HEAD + "1,2,a\n3,4,b\n", "too few"),
    ],
)
def test_a_table_that_cannot_be_read_says_where(
    project: Path, tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "table.csv").write_text(text)
    program = (
        "import data, pathlib\n"
        "try:\n"
        "    [data.load(part, pathlib.Path('table.csv')) for part in data.PARTS]\n"
        "except data.DataError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert reason in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("model", ["linear", *TREES])
def test_a_stopped_training_goes_on_with_the_same_model(
    project: Path, tmp_path: Path, model: str
) -> None:
    if model in TREES:
        needs(model)
    arguments = ("--model", model, "--rounds", "6", "--lr", "0.3")
    output = train(project, *arguments, run=tmp_path / "whole")
    assert "round 6/6" in output
    output = stop_after(project, 2, *arguments, run=tmp_path / "stopped")
    assert ", with a checkpoint" in output
    assert "resuming from" in train(project, *arguments, run=tmp_path / "stopped")
    assert read_newest(tmp_path / "stopped") == read_newest(tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize("model", TREES)
def test_trees_learn_what_a_linear_model_cannot(project: Path, tmp_path: Path, model: str) -> None:
    needs(model)
    train(project, run=tmp_path / "linear")
    train(project, "--model", model, run=tmp_path / "trees")
    linear, trees = (
        json.loads((tmp_path / name / "logs" / "metrics.json").read_text())["accuracy"]
        for name in ("linear", "trees")
    )
    assert trees > linear + 0.1


@pytest.mark.long
@pytest.mark.parametrize("model", ["linear", *TREES])
def test_a_table_of_ones_own_with_two_classes_and_gaps(
    project: Path, tmp_path: Path, model: str
) -> None:
    if model in TREES:
        needs(model)
    rows = [
        f"{n % 17 + n / 1000},{n % 5 if n % 7 else ''},{'big' if n % 17 > 8 else 'small'}"
        for n in range(600)
    ]
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "mine.csv").write_text(HEAD + "\n".join(rows) + "\n")
    output = train(project, "--model", model, "--lr", "0.5", run=tmp_path)
    assert "mine.csv" in output
    metrics = json.loads((tmp_path / "logs" / "metrics.json").read_text())
    assert metrics["accuracy"] > 0.9
    other = ("--model", "linear" if model in TREES else "xgboost")
    assert "was made with other model" in finish(
        start(project, "train.py", *other, run=tmp_path), 1
    )
