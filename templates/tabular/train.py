"""Train a model on a table. Stop it at any time, and start it again to go on.

    python train.py                     # a linear model on the deliveries
    python train.py --model xgboost     # trees
    python train.py --data sales.csv    # your own table

It needs no GPU. Started again in the same place, it resumes from its last whole
checkpoint. SIGTERM and Ctrl-C end it after the round (exit code 143 and 130).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checkpoints
import data
import evaluate
import model
from checkpoints import Checkpoint, CheckpointError
from data import DataError
from findings import score
from model import MODELS, Settings
from run import DivergedError, Journal, Places, StopRequest, check_finite, find_places


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, help="a CSV file; the class is in its last column (deliveries)")
    add("--model", default="linear", choices=sorted(MODELS), help="what is trained")
    add("--rounds", type=int, default=20, help="passes over the rows, or steps of five trees")
    add("--lr", type=float, default=0.1, help="learning rate")
    add("--depth", type=int, default=4, help="of trees: 2^depth leaves at most")
    add("--seed", type=int, default=int(os.environ.get("SEED", 1)), help="same seed, same run")
    add("--keep", type=int, default=3, help="newest checkpoints to keep, beside the best")
    return parser.parse_args()


class Training:
    """One run: the table, the model, its progress, and the training loop."""

    def __init__(self, options: argparse.Namespace, here: Places, stop: StopRequest) -> None:
        self.options, self.here, self.stop = options, here, stop
        self.settings = Settings(
            options.model, options.rounds, options.lr, options.depth, options.seed
        )
        self.source = options.data or data.find(here)
        self.train, self.val = (data.load(part, self.source) for part in ("train", "val"))
        # A checkpoint must match these.
        self.fixed = {
            "classes": list(self.train.classes),
            "columns": list(data.columns_of(self.source)),
            "rows": self.train.sha256,
        }
        here.checkpoints.mkdir(parents=True, exist_ok=True)
        checkpoints.clean(here.checkpoints)
        checkpoints.copy_from(here.start, here.checkpoints)
        self.round, self.seconds = 0, 0.0
        checkpoint = checkpoints.latest(here.checkpoints)
        state = self._read_state(checkpoint) if checkpoint else {}
        self.model: Any = MODELS[options.model](self.settings, len(self.train.classes))
        if checkpoint:
            self._resume(checkpoint, state)
        self.journal = Journal(here.logs, self.round)

    def _read_state(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Read what the training stored; raises CheckpointError if it was another training."""
        state = checkpoint.read_state()
        for name, value in (self.fixed | {"model": self.settings.model}).items():
            before = state["settings"]["model"] if name == "model" else state[name]
            if before != value:
                raise CheckpointError(
                    f"{checkpoint.path} was made with other {name}; "
                    "train into another directory, or delete the checkpoints"
                )
        return state

    def _resume(self, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
        self.model.restore(checkpoint.read_bytes(self.model.file))
        self.round, self.seconds = state["round"], state["seconds"]
        print(f"resuming from {checkpoint.path}", flush=True)

    def run(self) -> int:
        """Train to the end and evaluate, or until a stop is requested. Returns the exit code."""
        print(
            f"run {self.here.run_id}: {self.settings.model}, {len(self.train):,} rows of "
            f"{self.source or 'deliveries'}, {self.train.inputs.shape[1]} columns",
            flush=True,
        )
        try:
            while self.round < self.settings.rounds:
                self._train_round()
                if self.stop.exit_code and self.round < self.settings.rounds:
                    print(f"stopped after round {self.round}, with a checkpoint", flush=True)
                    return self.stop.exit_code
            self._report()
        finally:
            self.journal.close()
        return 0

    def _train_round(self) -> None:
        started = time.monotonic()
        self.model.train_round(self.train.inputs, self.train.labels, self.round + 1)
        seconds = time.monotonic() - started
        self.round, self.seconds = self.round + 1, self.seconds + seconds
        train, val = (
            score(self.model.probabilities(part.inputs), part) for part in (self.train, self.val)
        )
        check_finite(train.loss)
        speed = len(self.train) / max(seconds, 1e-9)
        curves = {
            "train/loss": train.loss,
            "train/accuracy": train.accuracy,
            "val/loss": val.loss,
            "val/accuracy": val.accuracy,
            "speed/rows_per_second": speed,
        }
        self.journal.scalars(self.round, curves)
        # Events first: a run that resumes here then has every point up to it.
        self.journal.flush()
        self._save({"val_accuracy": val.accuracy, "val_loss": val.loss})
        self._progress(train.loss, train.accuracy)
        print(
            f"round {self.round}/{self.settings.rounds}  loss {train.loss:.4f}  "
            f"acc {train.accuracy:.4f}  val {val.accuracy:.4f}  {speed:.0f} rows/s",
            flush=True,
        )

    def _save(self, metrics: dict[str, float]) -> None:
        state = {"round": self.round, "seconds": self.seconds, "run": self.here.run_id}
        settings = {"settings": asdict(self.settings)}
        files = {self.model.file: self.model.to_bytes()}
        where = self.here.checkpoints
        checkpoints.write(where, self.round, metrics, files, state | settings | self.fixed)
        checkpoints.prune(where, self.options.keep)

    def _progress(self, loss: float, accuracy: float) -> None:
        is_last = self.round == self.settings.rounds
        steps = {"step": self.round, "total_steps": self.settings.rounds}
        self.journal.progress(steps | {"loss": loss, "accuracy": accuracy}, is_last=is_last)

    def _report(self) -> None:
        """Evaluate the best checkpoint on rows that were not used to train or choose it."""
        best = checkpoints.best(self.here.checkpoints)
        result, found = evaluate.examine(best, self.source, "test")
        times = {"seconds": round(self.seconds, 3), "run": self.here.run_id}
        self.journal.results(asdict(result) | times, found | {"where": self.here.where})
        print(
            f"test accuracy {result.accuracy:.4f} ({result.correct} of {result.total}) "
            f"with {result.checkpoint}, {self.seconds:.1f} s of training",
            flush=True,
        )


def build_model(name: str = "linear") -> tuple[Any, tuple[Any, Any]]:
    """Return a model with `fit`, and its rows, for `labctl estimate train.py:build_model`."""
    train = data.load("train", data.find(find_places()))
    return model.build_estimator(train, Settings(model=name))


def build_xgboost_model() -> tuple[Any, tuple[Any, Any]]:
    return build_model("xgboost")


def build_lightgbm_model() -> tuple[Any, tuple[Any, Any]]:
    return build_model("lightgbm")


def main() -> None:
    stop = StopRequest()
    options = parse_options()
    try:
        sys.exit(Training(options, find_places(), stop).run())
    except (CheckpointError, DataError, DivergedError, MemoryError) as error:
        raise SystemExit(f"train: {error}") from None
    except ModuleNotFoundError as error:
        raise SystemExit(f"train: {error}: pip install -r requirements.txt") from None


if __name__ == "__main__":
    main()
