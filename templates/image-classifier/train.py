"""Train the classifier. Stop it at any time, and start it again to continue.

    python train.py     # the digits, made first if they are not there
    python train.py --epochs 20 --batch-size auto --image-size 64
    torchrun --standalone --nproc-per-node=gpu train.py     # all GPUs

Started again in the same place, it resumes from its last whole checkpoint with
the very numbers it would have had. SIGTERM and Ctrl-C make a checkpoint first
(exit code 143 and 130).
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import batch_size
import checkpoints
import evaluate
import places
import quantize
import ranks
from checkpoints import Checkpoint, CheckpointError
from dataset import Batch, EpochOrder, ImageFolder, loader, locate, shape_of
from evaluate import Score
from gpu_memory import read_gpu_memory
from journal import DivergedError, Journal, SilentJournal, Window, check_finite
from learner import Learner, learning_rate, mixed_precision
from model import Classifier, Shape, to_json
from options import parse_options
from places import Places
from prepare_data import SPLITS, DatasetError
from ranks import Ranks

CHECKPOINT_FILES = ("model", "optimizer", "random")  # .safetensors
# These decide the course of a run.
SETTINGS = ("epochs", "lr", "accumulate", "seed", "qat")


@dataclass
class Position:
    """The progress of a run."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # whole epochs done
    seen: int = 0  # images seen of the epoch under way
    seconds: float = 0.0  # training time, earlier starts included


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


class Stopped(Exception):
    """A stop was requested during work that can be repeated."""


class Training:
    """One run: the data, the learner, its progress, and the training loop."""

    def __init__(
        self,
        options: argparse.Namespace,
        here: Places,
        stop: StopRequest,
        group: Ranks = Ranks(),  # noqa: B008 - frozen
    ) -> None:
        self.options, self.here, self.stop, self.ranks = options, here, stop, group
        self.device = evaluate.pick_device(group.device(options.device))
        with group.first_goes_first():
            self.data: Path = options.data or locate(here)
            here.checkpoints.mkdir(parents=True, exist_ok=True)
            if group.is_first:
                checkpoints.clean(here.checkpoints)
                checkpoints.copy_from(here.start, here.checkpoints)
        shape = shape_of(self.data, options.image_size)
        self.images, self.val_images, _ = (ImageFolder(self.data / part, shape) for part in SPLITS)
        checkpoint = checkpoints.latest(here.checkpoints)
        state = checkpoints.load_state(checkpoint) if checkpoint else {}

        self.learner, self.batch_size = self._build(shape, state)
        # A checkpoint must match the former and should match the latter; it
        # stores both.
        self.fixed = {"shape": to_json(shape), "images": len(self.images)}
        self.settings = {name: getattr(options, name) for name in SETTINGS}
        self.settings["batch_size"] = self.batch_size
        self.at = self._resume(checkpoint, state) if checkpoint else Position()

        self.order = EpochOrder(len(self.images), options.seed, self.batch_size, group)
        self.workers = default_workers(self.device) if options.workers is None else options.workers
        part = group.part_of(self.batch_size)
        self.batches = loader(self.images, part, self.device, self.workers, self.order)
        steps_per_epoch = math.ceil(len(self.images) / (self.batch_size * options.accumulate))
        self.total_steps = steps_per_epoch * options.epochs
        self.journal = (Journal if group.is_first else SilentJournal)(here.logs, self.at.step)
        self.window = Window()
        self.figures: dict[str, float] = {}  # the window's newest
        self.started = time.monotonic() - self.at.seconds
        self.qat_from = options.epochs - max(1, options.epochs // 3)
        self.is_rounding = False

    def _start_rounding(self) -> None:
        """Train with rounded weights from here on (QAT). Keep those that PTQ would round."""
        if self.is_rounding:
            return
        self.is_rounding = True
        before = self.here.logs / quantize.BEFORE
        if self.ranks.is_first and not before.exists():
            quantize.save_weights(self.learner.model, before)
        quantize.train_rounded(self.learner.model, self.options.qat)
        self._say(f"epoch {self.at.epoch + 1}: weights are rounded to {self.options.qat} (QAT)")

    def _build(self, shape: Shape, state: dict[str, Any]) -> tuple[Learner, int]:
        """Create a learner with new weights, and its batch size: given, restored, or measured."""
        torch.manual_seed(self.options.seed)
        # The fastest convolution algorithms on GPUs sum in an order that varies
        # between runs.
        torch.backends.cudnn.deterministic = True
        model = Classifier(shape)
        precision = mixed_precision(self.options.amp, self.device)
        size = self.options.batch_size or state.get("settings", {}).get("batch_size")
        if size is None:
            images, count = len(self.images), self.ranks.count
            size = batch_size.choose(model, shape, images, self.device, precision, count)
            # The smallest of what the ranks have memory for.
            size = -self.ranks.largest(-size)
        return Learner(model, self.device, precision, self.ranks), size

    def _resume(self, checkpoint: Checkpoint, state: dict[str, Any]) -> Position:
        for name, value in self.fixed.items():
            if state[name] != value:
                raise CheckpointError(
                    f"{checkpoint.path} was made with other {name} ({state[name]}, now {value}); "
                    "train into another directory, or delete the checkpoints"
                )
        for name, value in self.settings.items():
            former = state["settings"].get(name)
            if former != value:
                self._say(f"note: {name} was {former} and is {value} from here on")
        self.learner.restore(
            {name: checkpoints.load_tensors(checkpoint, name) for name in CHECKPOINT_FILES}
        )
        if state["scaler"]:  # empty unless the run so far was in fp16
            self.learner.scaler.load_state_dict(state["scaler"])
        self._say(f"resuming from {checkpoint.path}")
        return Position(**state["position"])

    def run(self) -> int:
        """Train to the end and evaluate, or until a stop is requested. Returns the exit code."""
        self._say_what()
        setup = {"setup/batch_size": self.batch_size, "setup/workers": self.workers}
        self.journal.scalars(self.at.step, setup)
        try:
            while self.at.epoch < self.options.epochs:
                if self.options.qat and self.at.epoch >= self.qat_from:
                    self._start_rounding()
                if not self._train_epoch():
                    self._say(f"stopped after step {self.at.step}, with a checkpoint")
                    return self.exit_code
            if self.ranks.is_first:
                self._report()
        finally:
            self.journal.close()
        return 0

    def _train_epoch(self) -> bool:
        """Train to the end of the epoch, validate, save a checkpoint. False: stop requested."""
        self.order.start(self.at.epoch, self.at.seen)
        self.window = Window()
        for group, wait_s in timed(groups(self.batches, self.options.accumulate)):
            rate = learning_rate(self.at.step + 1, self.total_steps, self.options.lr)
            self.ranks.seed_step(self.options.seed, self.at.step)
            result = self.learner.step(group, rate, self.options.clip)
            self.at.step += 1
            self.at.seen += result.images
            self.window.add(result, wait_s)
            self._log(rate)
            if self.at.seen == len(self.images):
                # Validation first: the epoch's checkpoint has its figures.
                break
            stopping = self._should_stop()
            if stopping or self.at.step % self.options.checkpoint_every == 0:
                self._save({})
            if stopping:
                return False
        try:
            self._validate()
        except Stopped:
            # There may be too little time to validate: the resumed run does.
            self._save({})
            return False
        return not self._should_stop() or self.at.epoch == self.options.epochs

    def _should_stop(self) -> bool:
        """Ask once, since a signal may come at any moment. All ranks get the same answer."""
        self.exit_code = self.ranks.largest(self.stop.exit_code)
        return self.exit_code != 0

    def _say(self, line: str) -> None:
        if self.ranks.is_first:
            print(line, flush=True)

    def _log(self, rate: float) -> None:
        at_interval = self.at.step % self.options.log_every == 0
        if not (at_interval or self.journal.progress_due() or self.at.seen == len(self.images)):
            return
        self.figures = self.window.figures()
        if self.journal.progress_due():
            self._progress()
        if at_interval:
            self.journal.scalars(
                self.at.step,
                {
                    "train/loss": self.figures["loss"],
                    "train/accuracy": self.figures["accuracy"],
                    "train/learning_rate": rate,
                    "train/gradient_norm": self.figures["gradient_norm"],
                    "speed/images_per_second": self.figures["images_per_second"],
                    "speed/data_wait_share": self.figures["data_wait_share"],
                }
                | read_gpu_memory(self.device),
            )
            self.window = Window()

    def _progress(self) -> None:
        shown = ("loss", "accuracy", "images_per_second")
        self.journal.progress(
            {
                "step": self.at.step,
                "total_steps": self.total_steps,
                "epoch": self.at.epoch + (self.at.seen > 0),
                "epochs": self.options.epochs,
            }
            | {name: self.figures[name] for name in shown if name in self.figures}
        )

    def _validate(self) -> None:
        score = self._score()
        check_finite(score.loss)
        self.at.epoch, self.at.seen = self.at.epoch + 1, 0
        figures = {"val/accuracy": score.accuracy, "val/loss": score.loss}
        self.journal.scalars(self.at.step, figures)
        self._save({"val_accuracy": score.accuracy, "val_loss": score.loss})
        trained = speed = ""
        if self.figures:  # none after a resume just before validating
            trained = f"loss {self.figures['loss']:.4f}  acc {self.figures['accuracy']:.4f}  "
            speed = f"  {self.figures['images_per_second']:.0f} img/s"
        self._say(
            f"epoch {self.at.epoch}/{self.options.epochs}  step {self.at.step}/{self.total_steps}  "
            f"{trained}val {score.accuracy:.4f}{speed}"
        )

    def _score(self) -> Score:
        """Classify this rank's part of the images for validation, and add the ranks up."""
        part = self.val_images.share(self.ranks)
        correct, loss = 0, 0.0
        try:
            if len(part):
                own = evaluate.score(
                    self.learner.model, part, self.device, between=self._unless_stopped
                )
                correct, loss = own.correct, own.loss * own.total
        except Stopped:
            pass
        if self._should_stop():
            raise Stopped
        sums = self.ranks.add(torch.tensor([correct, loss], dtype=torch.float64))
        total = len(self.val_images)
        return Score(float(sums[0]) / total, int(sums[0]), total, float(sums[1]) / total)

    def _unless_stopped(self) -> None:
        if self.stop.exit_code:
            raise Stopped

    def _save(self, metrics: dict[str, float]) -> None:
        self.at.seconds = time.monotonic() - self.started
        with self.ranks.first_goes_first():
            if self.ranks.is_first:
                self._write(metrics)

    def _write(self, metrics: dict[str, float]) -> None:
        # Events first: a run that resumes at this step then has every scalar up
        # to it.
        self.journal.flush()
        train = {
            f"train_{name}": self.figures[name] for name in ("loss", "accuracy") if self.figures
        }
        state = {
            "position": asdict(self.at),
            "settings": self.settings,
            "scaler": self.learner.scaler.state_dict(),
            "run": self.here.run_id,
        }
        checkpoints.write(
            self.here.checkpoints,
            self.at.step,
            self.at.epoch + (self.at.seen > 0),
            train | metrics,
            self.learner.tensors(),
            state | self.fixed,
        )
        checkpoints.prune(self.here.checkpoints, self.options.keep)

    def _report(self) -> None:
        """Evaluate the best checkpoint on images that were not used to train or choose it."""
        best = checkpoints.best(self.here.checkpoints)
        result, findings = evaluate.examine(best, self.data, "test", self.device)
        self._progress()
        self.journal.evaluation(findings | {"where": self.here.where})
        self.journal.metrics(
            asdict(result) | {"seconds": round(self.at.seconds, 3), "run": self.here.run_id}
        )
        print(
            f"test accuracy {result.accuracy:.4f} ({result.correct} of {result.total}) "
            f"with {result.checkpoint}, {self.at.seconds:.1f} s of training",
            flush=True,
        )
        if self.options.qat:
            images = ImageFolder(self.data / "test", self.images.shape)
            rows = quantize.compare_training(
                self.learner.model, self.here.logs, self.options.qat, images, self.device
            )
            for row in rows:
                print(
                    f"{row.name:<12} {row.size_bytes:>9,} bytes  test accuracy {row.accuracy:.4f} "
                    f"(95%: {row.low:.4f} to {row.high:.4f})",
                    flush=True,
                )

    def _say_what(self) -> None:
        parameters = sum(parameter.numel() for parameter in self.learner.model.parameters())
        number = str(self.learner.precision or torch.float32).removeprefix("torch.")
        added = f" x {self.options.accumulate}" if self.options.accumulate > 1 else ""
        processes = f", {self.ranks.count} processes" if self.ranks.count > 1 else ""
        self._say(
            f"run {self.here.run_id}: {len(self.images):,} images of {self.data}, "
            f"{parameters:,} parameters"
        )
        self._say(f"on {self.device}, {number}, batches of {self.batch_size}{added}{processes}")


def groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield the batches in groups of `size`, one optimizer step each; the last may be smaller."""
    iterator = iter(batches)
    while group := list(itertools.islice(iterator, size)):
        yield group


def timed(items: Iterator[list[Batch]]) -> Iterator[tuple[list[Batch], float]]:
    """Yield each item with the seconds spent waiting for it."""
    asked = time.monotonic()
    for item in items:
        yield item, time.monotonic() - asked
        asked = time.monotonic()


def default_workers(device: torch.device) -> int:
    """Choose the number of processes that load images; on a CPU they would slow the training."""
    return min(8, os.cpu_count() or 1) if device.type == "cuda" else 0


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Convert as a round trip through JSON would: tuples become lists."""
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in values.items()
    }


def build_model() -> tuple[Classifier, torch.Tensor]:
    """Return a network for digits and an example, for `labctl estimate train.py:build_model`."""
    shape = Shape(classes=tuple("0123456789"), channels=1, image_size=16)
    return Classifier(shape), torch.zeros(1, 1, 16, 16, dtype=torch.uint8)


def main() -> None:
    stop = StopRequest()
    options = parse_options((__doc__ or "").partition("\n")[0])
    here = places.from_environment(os.environ)
    group = ranks.join()
    try:
        code = Training(options, here, stop, group).run()
        ranks.leave(group)
        sys.exit(code)
    except (CheckpointError, DatasetError, DivergedError, MemoryError) as error:
        raise SystemExit(f"train: {error}") from None


if __name__ == "__main__":
    main()
