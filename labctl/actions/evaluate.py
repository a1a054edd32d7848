"""The pulled model, evaluated on this machine by the lab's own evaluate.py."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from labctl.actions import Step, runs
from labctl.actions.ground import Ground
from labctl.errors import LabError, NotFoundError
from labctl.model import Value


class Evaluation(Value, frozen=True):
    """Accuracies are shares from 0 to 1; `same` when they agree to the last counted item."""

    run: str
    checkpoint: str
    accuracy_local: float
    accuracy_server: float | None
    total: int
    same: bool


def evaluate(ground: Ground, run_id: str) -> Evaluation:
    """Run evaluate.py on what `pull` brought; LabError where torch or the script is missing.

    The script's last line must be a JSON object with accuracy and checkpoint; the server's figure
    is logs/metrics.json of the run.
    """
    run = runs.latest(ground, run_id)
    pulled = ground.config.root / "runs" / run.id
    if not (pulled / "checkpoints").is_dir():
        raise NotFoundError(f"run {run.id} is not here", hint=f"labctl pull {run.id}")
    if not (ground.config.root / "evaluate.py").is_file():
        raise NotFoundError(
            "this lab has no evaluate.py",
            why="eval runs `python evaluate.py CHECKPOINTS` in the lab's directory",
            hint="see the sample project: labctl init digits",
        )
    if importlib.util.find_spec("torch") is None:
        raise LabError(
            "PyTorch is not installed beside labctl",
            why=f"evaluate.py runs with {sys.executable}",
            hint="pip install 'labctl[train]'",
        )
    ground.reporter.emit(Step(name="evaluating"))
    here = _run(ground.config.root, pulled)
    ground.reporter.emit(Step(name="evaluating", done=True))
    there = _figures(pulled / "logs" / "metrics.json")
    accuracy = there.get("accuracy")
    return Evaluation(
        run=run.id,
        checkpoint=str(here.get("checkpoint", "")),
        accuracy_local=float(here["accuracy"]),
        accuracy_server=None if accuracy is None else float(accuracy),
        total=int(here.get("total", 0)),
        same=accuracy is not None and abs(float(accuracy) - float(here["accuracy"])) < 1e-9,
    )


def _run(root: Path, pulled: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "evaluate.py", str(pulled / "checkpoints")],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    try:
        body = json.loads(lines[-1])
        float(body["accuracy"])
    except (IndexError, ValueError, KeyError, TypeError):
        said = (done.stderr or done.stdout).strip()[-1500:]
        raise LabError(f"evaluate.py ended with {done.returncode}", why=said) from None
    result: dict[str, Any] = body
    return result


def _figures(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}
