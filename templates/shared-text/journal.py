"""Write a run's logs: curves for TensorBoard, and JSON files for labctl."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from torch.utils.tensorboard import SummaryWriter

from checkpoints import RUN

LOGS = Path(os.environ.get("LABCTL_LOG_DIR", RUN / "logs"))
RUN_ID = os.environ.get("LABCTL_RUN_ID", "local")
WHERE = "here" if RUN_ID == "local" else "server"
PROGRESS_EVERY_S = 1.0


class DivergedError(Exception):
    """The loss became NaN or infinite."""


class StopRequest:
    """Notes SIGTERM (`labctl cancel` sends it) and Ctrl-C for the loop to see."""

    def __init__(self) -> None:
        self.exit_code = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # What a shell reports for a process that this signal ended.
        self.exit_code = 128 + number
        # A second Ctrl-C does not wait.
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Journal:
    """Writes to the run's log directory. `step` is the last completed one."""

    def __init__(self, step: int) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        # An interrupted run may have logged steps after its last checkpoint,
        # which are repeated now: purge_step removes them.
        self.writer = SummaryWriter(str(LOGS), purge_step=step + 1, flush_secs=10)
        self.progress_at = -math.inf

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def progress(self, step: int, total_steps: int, **figures: float) -> None:
        """Write what `labctl status` and `top` show, at most once a second."""
        if step == total_steps or time.monotonic() - self.progress_at >= PROGRESS_EVERY_S:
            write_json(
                LOGS / "progress.json", {"step": step, "total_steps": total_steps, **figures}
            )
            self.progress_at = time.monotonic()


def check_finite(loss: float) -> float:
    """Return the loss; raise DivergedError for NaN: more steps would waste the server."""
    if not math.isfinite(loss):
        raise DivergedError(f"the loss became {loss}; try a smaller --lr")
    return loss


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Replace a file, so that a reader sees either the old or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(values) + "\n")
    partial.replace(path)
