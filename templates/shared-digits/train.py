"""Train the classifier. Stop it at any time, and start it again to continue.

    python train.py
    python train.py --epochs 40 --precision bfloat16

Started again in the same place, it resumes from its last whole checkpoint with
the very numbers it would have had. SIGTERM and Ctrl-C make a checkpoint first
(exit code 143 and 130).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy

import checkpoints
import data
import evaluate
from checkpoints import Checkpoint, CheckpointError
from data import DataError
from findings import score
from model import PRECISIONS, Learner, Settings
from run import DivergedError, Journal, Places, StopRequest, check_finite, find_places


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--epochs", type=int, default=15, help="passes over the training images")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--batch-size", type=int, default=32, help="images per step")
    add("--width", type=int, default=32, help="channels of the first layer")
    add("--precision", default="float32", choices=PRECISIONS, help="of what is computed")
    add("--seed", type=int, default=int(os.environ.get("SEED", 1)), help="same seed, same run")
    add("--checkpoint-every", type=int, default=100, help="steps; also after every epoch")
    add("--keep", type=int, default=3, help="newest checkpoints to keep, beside the best")
    add("--log-every", type=int, default=10, help="steps between points in TensorBoard")
    return parser.parse_args()


@dataclass
class Position:
    """The progress of a run. Within an epoch, `step` tells the batch that is next."""

    step: int = 0
    seconds: float = 0.0  # training time, earlier starts included


class Training:
    """One run: the data, the learner, its progress, and the training loop."""

    def __init__(self, options: argparse.Namespace, here: Places, stop: StopRequest) -> None:
        self.options, self.here, self.stop = options, here, stop
        self.train, self.val = data.load("train"), data.load("val")
        self.epoch_steps = math.ceil(len(self.train) / options.batch_size)
        self.total_steps = self.epoch_steps * options.epochs
        settings = Settings(
            lr=options.lr,
            steps=self.total_steps,
            width=options.width,
            precision=options.precision,
            seed=options.seed,
        )
        self.learner = Learner(settings, self.train.classes)
        # A checkpoint must match these.
        self.fixed = {
            "settings": asdict(settings),
            "batch_size": options.batch_size,
            "classes": list(self.train.classes),
            "images": self.train.sha256,
        }
        here.checkpoints.mkdir(parents=True, exist_ok=True)
        checkpoints.clean(here.checkpoints)
        checkpoints.copy_from(here.start, here.checkpoints)
        self.at = Position()
        if checkpoint := checkpoints.latest(here.checkpoints):
            self._resume(checkpoint)
        self.journal = Journal(here.logs, self.at.step)
        self.figures: dict[str, float] = {}

    def _resume(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.read_state()
        for name, value in self.fixed.items():
            if state[name] != value:
                raise CheckpointError(
                    f"{checkpoint.path} was made with other {name} ({state[name]}, now {value}); "
                    "train into another directory, or delete the checkpoints"
                )
        self.learner.restore(checkpoint)
        self.at = Position(**state["position"])
        print(f"resuming from {checkpoint.path}", flush=True)

    def run(self) -> int:
        """Train to the end and evaluate, or until a stop is requested. Returns the exit code."""
        print(
            f"run {self.here.run_id}: {len(self.train):,} images, "
            f"{self.learner.count_parameters():,} parameters",
            f"on {self.learner.device}, {self.options.precision}, "
            f"batches of {self.options.batch_size}",
            sep="\n",
            flush=True,
        )
        try:
            while self.at.step < self.total_steps:
                self._train_epoch()
                if self.stop.exit_code and self.at.step < self.total_steps:
                    print(f"stopped after step {self.at.step}, with a checkpoint", flush=True)
                    return self.stop.exit_code
            self._report()
        finally:
            self.journal.close()
        return 0

    def _train_epoch(self) -> None:
        """Train to the end of the epoch and validate, or until a stop is requested."""
        epoch, first = divmod(self.at.step, self.epoch_steps)
        window: list[tuple[float, float]] = []
        started = time.monotonic()
        for batch in self._batches(epoch, first):
            loss, accuracy = self.learner.step(
                self.train.inputs[batch], self.train.labels[batch], self.at.step
            )
            self.at.step += 1
            window.append((loss, accuracy))
            seconds = time.monotonic() - started
            is_last = self.at.step % self.epoch_steps == 0
            if self.at.step % self.options.log_every == 0 or is_last:
                self._log(window, seconds)
                self.at.seconds += seconds
                window, started = [], time.monotonic()
            if is_last:
                # Validation first: the epoch's checkpoint has its figures.
                break
            if self.stop.exit_code or self.at.step % self.options.checkpoint_every == 0:
                self._save({})
            if self.stop.exit_code:
                return
        self._validate()

    def _batches(self, epoch: int, first: int) -> Iterator[numpy.ndarray]:
        """Yield the numbers of the images of each batch, from the batch `first` on.

        The order is a function of seed and epoch alone: a resumed run sees exactly the images that
        the interrupted one had not come to.
        """
        random = numpy.random.RandomState(self.options.seed * 1_000_003 + epoch)
        order, size = random.permutation(len(self.train)), self.options.batch_size
        for start in range(first * size, len(order), size):
            yield order[start : start + size]

    def _log(self, window: list[tuple[float, float]], seconds: float) -> None:
        loss, accuracy = (sum(values) / len(window) for values in zip(*window, strict=True))
        check_finite(loss)
        speed = len(window) * self.options.batch_size / max(seconds, 1e-9)
        self.figures = {"loss": loss, "accuracy": accuracy, "images_per_second": speed}
        rate = self.learner.rate(self.at.step - 1)
        curves = {"train/loss": loss, "train/accuracy": accuracy, "train/learning_rate": rate}
        self.journal.scalars(self.at.step, curves | {"speed/images_per_second": speed})
        self._progress()

    def _progress(self, *, is_last: bool = False) -> None:
        place = {
            "step": self.at.step,
            "total_steps": self.total_steps,
            "epoch": -(-self.at.step // self.epoch_steps),
            "epochs": self.options.epochs,
        }
        self.journal.progress(place | self.figures, is_last=is_last)

    def _validate(self) -> None:
        result = score(self.learner.probabilities(self.val.inputs), self.val)
        check_finite(result.loss)
        figures = {"val/accuracy": result.accuracy, "val/loss": result.loss}
        self.journal.scalars(self.at.step, figures)
        self._save({"val_accuracy": result.accuracy, "val_loss": result.loss})
        print(
            f"epoch {self.at.step // self.epoch_steps}/{self.options.epochs}  "
            f"step {self.at.step}/{self.total_steps}  "
            f"loss {self.figures['loss']:.4f}  acc {self.figures['accuracy']:.4f}  "
            f"val {result.accuracy:.4f}  {self.figures['images_per_second']:.0f} img/s",
            flush=True,
        )

    def _save(self, metrics: dict[str, float]) -> None:
        # Events first: a run that resumes here then has every point up to it.
        self.journal.flush()
        state = {"position": asdict(self.at), "run": self.here.run_id} | self.fixed
        where = self.here.checkpoints
        checkpoints.write(where, self.at.step, metrics, self.learner.files(), state)
        checkpoints.prune(where, self.options.keep)

    def _report(self) -> None:
        """Evaluate the best checkpoint on images that were not used to train or choose it."""
        best = checkpoints.best(self.here.checkpoints)
        result, found = evaluate.examine(best, None, "test")
        self._progress(is_last=True)
        times = {"seconds": round(self.at.seconds, 3), "run": self.here.run_id}
        self.journal.results(asdict(result) | times, found | {"where": self.here.where})
        print(
            f"test accuracy {result.accuracy:.4f} ({result.correct} of {result.total}) "
            f"with {result.checkpoint}, {self.at.seconds:.1f} s of training",
            flush=True,
        )


def build_model() -> tuple[Any, numpy.ndarray]:
    """Return the network and an example, for `labctl estimate train.py:build_model`."""
    example = numpy.zeros((1, data.SIZE, data.SIZE, 1), "float32")
    return Learner(Settings(), data.CLASSES).network, example


def main() -> None:
    stop = StopRequest()
    options = parse_options()
    try:
        sys.exit(Training(options, find_places(), stop).run())
    except (CheckpointError, DataError, DivergedError, MemoryError) as error:
        raise SystemExit(f"train: {error}") from None


if __name__ == "__main__":
    main()
