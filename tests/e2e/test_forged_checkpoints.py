"""A checkpoint with two faces: PyTorch would run its program, and every door of labctl refuses it.

The program leaves a file in the test's own directory, and does nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from forged_bed import FORGED
from submission_bed import FILES, handed_in, make_receiver, packed

from labctl.config import ensure_lab_id
from labctl.errors import TransferError
from labctl.model import Run
from labctl.state import State

pytestmark = [pytest.mark.train, pytest.mark.parametrize("kind", FORGED)]

RUN = "r1"
COMMAND_S = 300.0
SERVED = "import torch\n\ndef load(checkpoints):\n    return torch.load(checkpoints / 'model.pt')\n"


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def lab(tmp_path: Path, marker: Path, kind: str) -> Path:
    """A lab whose one run was pulled; its checkpoint is the forged one, its code loads it."""
    home, root = tmp_path / "home", tmp_path / "digits"
    checkpoints = root / "runs" / RUN / "checkpoints"
    checkpoints.mkdir(parents=True)
    home.mkdir()
    (checkpoints / "model.pt").write_bytes(FORGED[kind](marker))
    (root / "lab.yaml").write_text("lab: digits\n")
    (root / "evaluate.py").write_text(
        "import sys, torch\n"
        "torch.load(sys.argv[1] + '/model.pt', weights_only=False)\n"
        'print(\'{"accuracy": 1.0, "checkpoint": "model.pt"}\')\n'
    )
    (root / "predict.py").write_text(SERVED)
    record = Run(id=RUN, lab_id=ensure_lab_id(root), server_id="s", state="exited", exit_code=0)
    (root / "runs" / RUN / "run.json").write_bytes(msgspec.json.encode(record))
    with State(home / ".local" / "state" / "labctl" / "labctl.db") as state:
        state.save_run(record)
    return root


def run(lab: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    home = lab.parent / "home"
    return subprocess.run(
        [sys.executable, *words],
        cwd=lab,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )


@pytest.mark.long
def test_pytorch_itself_would_run_it(lab: Path, marker: Path) -> None:
    """Otherwise the tests below would show nothing."""
    done = run(lab, "evaluate.py", f"runs/{RUN}/checkpoints")
    assert done.returncode == 0, done.stderr
    assert marker.exists()


def test_eval_refuses_it(lab: Path, marker: Path) -> None:
    done = run(lab, "-m", "labctl", "eval", f"runs/{RUN}")
    assert done.returncode == 3, done.stderr
    assert "model.pt is refused: readers of this archive may not agree" in done.stderr
    assert not marker.exists()


def test_serve_refuses_it_before_the_project_loads(lab: Path, marker: Path) -> None:
    checkpoints = lab / "runs" / RUN / "checkpoints"
    done = run(lab, "-m", "labctl.services.model_server", LABCTL_SERVE_CHECKPOINTS=str(checkpoints))
    assert done.returncode == 3, done.stderr
    assert "refused: 'model.pt' must not be loaded" in done.stderr
    assert not marker.exists()


def test_submit_keeps_it_here(lab: Path, marker: Path, tmp_path: Path) -> None:
    receiver, _ = make_receiver(tmp_path, due="2099-01-01 12:00 UTC")
    (lab / "assignment.yaml").write_bytes(receiver.assignment_file("hw3").read_bytes())
    done = run(lab, "-m", "labctl", "submit", "--dry-run", "--checkpoint", "model.pt")
    assert done.returncode == 3, done.stderr
    assert "model/model.pt: readers of this archive may not agree" in done.stderr
    assert not marker.exists()


def test_a_receiver_refuses_it(tmp_path: Path, marker: Path, kind: str) -> None:
    receiver, _ = make_receiver(tmp_path)
    with pytest.raises(TransferError, match="the bundle is refused") as refused:
        handed_in(receiver, packed({**FILES, "model/model.pt": FORGED[kind](marker)}))
    assert "model/model.pt: readers of this archive may not agree" in refused.value.why
    assert receiver.students("hw3") == []
    assert not marker.exists()
