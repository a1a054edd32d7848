"""What a run exchanges with labctl: paths, signals, curves and figures.

On a server labctl sets the variables that are read here. On a laptop, where
nothing is set, everything lies beside the code.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PROGRESS_EVERY_S = 1.0


class DivergedError(Exception):
    """The loss became NaN or infinite."""


@dataclass(frozen=True)
class Places:
    """Where a run reads and writes."""

    checkpoints: Path
    logs: Path
    # An earlier run's checkpoints, which a new run continues from.
    start: Path
    data: Path  # holds what lab.yaml lists as `data:`
    run_id: str  # labctl's name for this run; "local" without labctl

    @property
    def where(self) -> str:
        """The name of this machine in evaluation.json: "here" or "server"."""
        return "here" if self.run_id == "local" else "server"


def find_places(environ: Mapping[str, str] = os.environ) -> Places:
    run = Path(environ.get("LABCTL_RUN_DIR", "."))
    data = Path(environ.get("LABCTL_DATA_DIR", run))
    return Places(
        checkpoints=Path(environ.get("LABCTL_CHECKPOINT_DIR", run / "checkpoints")),
        logs=Path(environ.get("LABCTL_LOG_DIR", run / "logs")),
        start=data / "start",
        data=data,
        run_id=environ.get("LABCTL_RUN_ID", "local"),
    )


class StopRequest:
    """Notes SIGTERM (`docker stop` and `labctl cancel` send it) and Ctrl-C for the loop to see."""

    def __init__(self) -> None:
        self.exit_code = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # What a shell reports for a process ended by this signal.
        self.exit_code = 128 + number
        # A second Ctrl-C does not wait.
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Journal:
    """Writes a run's logs: event files for TensorBoard, and JSON files.

    `step` is the last completed step: 0, or a checkpoint's.
    """

    def __init__(self, logs: Path, step: int) -> None:
        from tensorboardX import SummaryWriter

        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.progress_at = -math.inf
        # An interrupted run may have logged steps after its last checkpoint,
        # which are repeated now: purge_step removes them from TensorBoard.
        self.writer = SummaryWriter(str(logs), purge_step=step + 1, flush_secs=10)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def progress(self, values: Mapping[str, float], *, is_last: bool = False) -> None:
        """Write what `labctl status` and `top` show, at most once a second."""
        if is_last or time.monotonic() - self.progress_at >= PROGRESS_EVERY_S:
            write_json(self.logs / "progress.json", values)
            self.progress_at = time.monotonic()

    def results(self, metrics: Mapping[str, object], evaluation: Mapping[str, object]) -> None:
        """Write the run's final metrics, and the evaluation for labctl's report."""
        write_json(self.logs / "evaluation.json", evaluation)
        write_json(self.logs / "metrics.json", metrics)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Replace a file atomically, so that a reader sees either the old or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(values) + "\n")
    partial.replace(path)


def check_finite(loss: float) -> None:
    """Raise DivergedError for NaN: further training would waste the server, without any use."""
    if not math.isfinite(loss):
        raise DivergedError(f"the loss became {loss}; try a smaller --lr")
