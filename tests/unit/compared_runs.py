"""Pulled and evaluated runs of a lab, to compare: the second is half as wide as the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from event_files import scalar
from report_facts import BEGAN, evaluation

from labctl.config import ensure_lab_id
from labctl.model import Run
from labctl.runs.evaluation import Evaluation, Predictions
from labctl.state import State

TRUTH = [0, 1] * 70
ORDER = "0123456789abcdef" * 4


def make_evaluation(truth: list[int], said: list[int], **changes: Any) -> Evaluation:
    """An evaluation with a prediction for each item."""
    rows = [[0, 0], [0, 0]]
    for one, other in zip(truth, said, strict=True):
        rows[one][other] += 1
    right = sum(one == other for one, other in zip(truth, said, strict=True))
    found = evaluation(
        confusion=tuple(map(tuple, rows)),
        accuracy=right / len(truth),
        items=len(truth),
        worst=(),
        predictions=Predictions(order_sha256=ORDER, truth=tuple(truth), predicted=tuple(said)),
    )
    return msgspec.structs.replace(found, **changes)


def write_runs(root: Path, database: Path, names: tuple[str, ...]) -> Path:
    """Write pulled runs with these names into a lab; return the directory `runs`."""
    own = ensure_lab_id(root)
    for number, name in enumerate(names):
        run = Run(
            id=name,
            lab_id=own,
            server_id="s1",
            state="exited",
            command=("python", "train.py", "--epochs", "3", "--width", str(64 >> number)),
            started_at=BEGAN,
            ended_at=BEGAN + 60 - 14 * number,
            summary="done",
            exit_code=0,
            has_checkpoints=True,
            created_at=BEGAN + number,
        )
        with State(database) as state:
            state.save_run(run)
            code = {"commit": "e" * 40, "dirty": False, "command": list(run.command)}
            state.record("code", lab_id=own, server_id="s1", run_id=name, detail=code)
        logs = root / "runs" / name / "logs"
        logs.mkdir(parents=True)
        events = b"".join(scalar("val/loss", step, (1 + number) / step) for step in (10, 20, 30))
        (logs / "events.out.tfevents.1.host.1.0").write_bytes(events)
        said = [1 - one if place < 2 + 10 * number else one for place, one in enumerate(TRUTH)]
        content = msgspec.json.encode(make_evaluation(TRUTH, said))
        (root / "runs" / name / "evaluation.json").write_bytes(content)
    return root / "runs"
