"""What labctl does with pulled results of other libraries: eval, report, submit, serve."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from assembled import assemble, train

from labctl.config import ensure_lab_id
from labctl.model import Run
from labctl.services.model_server.checkpoint import check
from labctl.state import State
from labctl.submissions.receive import write_assignment
from labctl.submissions.receiver import Receiver

pytestmark = [pytest.mark.train, pytest.mark.long]
RUN, OTHER = "r1", "r0"
# What needs which package, and how it is trained for a moment.
TRAININGS = {
    "sklearn": ("tabular", "--model", "linear", "--rounds", "2"),
    "xgboost": ("tabular", "--model", "xgboost", "--rounds", "2"),
    "lightgbm": ("tabular", "--model", "lightgbm", "--rounds", "2"),
    "tensorflow": ("tensorflow", "--epochs", "1", "--width", "16"),
    "jax": ("jax", "--epochs", "1", "--width", "16"),
}
PREDICT = "import sys, pathlib, predict; print(predict.load(pathlib.Path(sys.argv[1])).classes)"


@pytest.fixture(params=list(TRAININGS))
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A lab with one run that ended and was pulled, and another one with another seed."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"needs the package {request.param}")
    template, *arguments = TRAININGS[request.param]
    root = assemble(template, tmp_path / "project")
    (root / "lab.yaml.j2").unlink()
    (root / "lab.yaml").write_text("lab: project\nrun: python train.py\n")
    (tmp_path / "home").mkdir()
    for number, name in enumerate((OTHER, RUN), 1):
        train(root, *arguments, "--seed", str(number), run=tmp_path / name)
        shutil.copytree(tmp_path / name, root / "runs" / name)
        record = Run(
            id=name,
            lab_id=ensure_lab_id(root),
            server_id="s",
            state="exited",
            exit_code=0,
            created_at=number,
        )
        (root / "runs" / name / "run.json").write_bytes(msgspec.json.encode(record))
        with State(tmp_path / "home" / ".local" / "state" / "labctl" / "labctl.db") as state:
            state.save_run(record)
    return root


def labctl(lab: Path, *words: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key[:7] != "LABCTL_"}
    done = subprocess.run(
        [sys.executable, "-m", "labctl", *words],
        cwd=lab,
        env=kept | {"HOME": str(lab.parent / "home")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_results_are_evaluated_reported_submitted_and_loaded(lab: Path, tmp_path: Path) -> None:
    result = json.loads(labctl(lab, "eval", "--json"))["evaluation"]
    assert result["same"], "here as in the run"
    labctl(lab, "report")
    page = (lab / "runs" / RUN / "report.html").read_text()
    assert "Worst mistakes" in page
    assert result["checkpoint"] in page
    compared = labctl(lab, "compare", OTHER, RUN)
    assert "Only A is right on" in compared or "on the same items" in compared, compared
    receiver = Receiver(tmp_path / "drop")
    receiver.init()
    about = {"course": "ml", "due": "2099-01-01 12:00 UTC", "host_key": "ssh-ed25519 AAAA"}
    text = write_assignment(receiver, "hw1", "ssh://sam@127.0.0.1:22", about)
    (lab / "assignment.yaml").write_text(text)
    assert result["checkpoint"] in labctl(lab, "submit", "--dry-run")
    checkpoints = lab / "runs" / RUN / "checkpoints"
    assert check(checkpoints)
    done = subprocess.run(
        [sys.executable, "-B", "-c", PREDICT, str(checkpoints)],
        cwd=lab,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
