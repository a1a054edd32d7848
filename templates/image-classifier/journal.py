"""Write a run's logs: event files for TensorBoard, and JSON files."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

from learner import StepResult
from places import write_json

PROGRESS_EVERY_S = 1.0


class DivergedError(Exception):
    """The loss became NaN or infinite."""


class Window:
    """Sums over the steps since the last log entry."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.wait_s = 0.0  # time spent waiting for the next images
        self.images = 0
        self.results: list[StepResult] = []

    def add(self, result: StepResult, wait_s: float) -> None:
        self.results.append(result)
        self.images += result.images
        self.wait_s += wait_s

    def figures(self) -> dict[str, float]:
        """Compute the means over the window; waits for the GPU. Raises DivergedError."""
        images = torch.tensor([result.images for result in self.results], dtype=torch.float64)
        loss = torch.stack([result.loss for result in self.results]).double().cpu()
        correct = torch.stack([result.correct for result in self.results]).sum().item()
        mean_loss = float((loss * images).sum() / self.images)
        check_finite(mean_loss)
        # Read the clock after the values: by then the GPU has finished the
        # work.
        seconds = max(time.monotonic() - self.started, 1e-9)
        return {
            "loss": mean_loss,
            "accuracy": correct / self.images,
            "gradient_norm": float(self.results[-1].gradient_norm),
            "images_per_second": self.images / seconds,
            "data_wait_share": min(1.0, self.wait_s / seconds),
        }


class Journal:
    """Writes to a run's log directory. `step` is the last completed step: 0, or a checkpoint's."""

    def __init__(self, logs: Path, step: int) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.progress_at = -math.inf
        # An interrupted run may have logged steps after its last checkpoint,
        # which are repeated
        # now: purge_step removes them from TensorBoard.
        self.writer = SummaryWriter(str(logs), purge_step=step + 1, flush_secs=10)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def progress_due(self) -> bool:
        return time.monotonic() - self.progress_at >= PROGRESS_EVERY_S

    def progress(self, values: Mapping[str, float]) -> None:
        """Write the progress that `labctl status` and `top` show."""
        write_json(self.logs / "progress.json", values)
        self.progress_at = time.monotonic()

    def metrics(self, values: Mapping[str, object]) -> None:
        """Write the run's final metrics."""
        write_json(self.logs / "metrics.json", values)

    def evaluation(self, values: Mapping[str, object]) -> None:
        """Write the best checkpoint's evaluation for labctl's report."""
        write_json(self.logs / "evaluation.json", values)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class SilentJournal(Journal):
    """Writes nothing: the first of several ranks writes for all."""

    def __init__(self, logs: Path, step: int) -> None:
        self.progress_at = -math.inf

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def progress(self, values: Mapping[str, float]) -> None:
        self.progress_at = time.monotonic()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def check_finite(loss: float) -> None:
    """Raise DivergedError for NaN: further training would waste the server, without any use."""
    if not math.isfinite(loss):
        raise DivergedError(f"the loss became {loss}; try a smaller --lr")
