"""Evaluate a checkpoint: how well does it predict the next byte of a text?

    python evaluate.py                  # the best in ./checkpoints
    python evaluate.py runs/RUN         # the best one there

The loss is in nats per byte; the perplexity, its exponential, is the number of
bytes between which the network hesitates. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import checkpoints
import text
from checkpoints import Checkpoint, CheckpointError
from journal import WHERE, write_json
from model import GPT, Shape, measure_loss

PIECES = 64  # evaluated at once


@dataclass(frozen=True)
class Score:
    """The result of a network on a text."""

    loss: float  # nats per byte
    correct: int  # bytes that had the highest score
    total: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.total

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 100.0))


def pick_device(wish: str) -> torch.device:
    """`wish` is auto (a GPU if there is one) or a device such as cpu or cuda:1."""
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wish)


def load_model(checkpoint: Checkpoint, device: torch.device) -> GPT:
    model = GPT(Shape(**checkpoint.state["shape"]))
    model.load_state_dict(load_file(checkpoint.path / "model.safetensors"))
    return model.to(device).eval()


@torch.inference_mode()
def score(model: GPT, part: Tensor) -> Score:
    """Predict each byte of a text once, in full precision, from the bytes before it."""
    model.eval()
    device = model.tokens.weight.device
    loss, correct, total = 0.0, 0, 0
    for pieces in text.cut(part, model.shape.context).split(PIECES):
        targets = pieces[:, 1:].to(device)
        scores = model(pieces[:, :-1].to(device))
        loss += float(measure_loss(scores.double(), targets, "sum"))
        correct += int((scores.argmax(2) == targets).sum())
        total += targets.numel()
    return Score(loss / total, correct, total)


def examine(
    checkpoint: Checkpoint, directory: Path | None, split: str, device: torch.device
) -> dict[str, Any]:
    """Evaluate a checkpoint; return the body of labctl's evaluation.json.

    Raises CheckpointError if the loss is NaN or infinite.
    """
    model = load_model(checkpoint, device)
    parts = text.split(text.load(directory)[0], model.shape.context)
    result = score(model, parts[split])
    if not math.isfinite(result.loss):
        raise CheckpointError(f"{checkpoint.path}: its loss on {split} is {result.loss}")
    # What a network that learned nothing else would say.
    usual = parts["train"].long().bincount().argmax()
    return {
        "version": 1,
        "checkpoint": checkpoint.path.resolve().name,
        "checkpoint_sha256": checkpoint.files["model.safetensors"]["sha256"],
        "data_sha256": hashlib.sha256(parts[split].numpy().tobytes()).hexdigest(),
        "split": split,
        # A confusion matrix of 256 bytes would say little.
        "classes": [],
        "confusion": [],
        "accuracy": result.accuracy,
        "items": result.total,
        "baseline_accuracy": float((parts[split] == usual).float().mean()),
        "loss": result.loss,
        "device": str(device),
        "at": round(time.time(), 3),
    }


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Return what the last line says: accuracy, checkpoint and total are labctl's names."""
    names = ("accuracy", "loss", "checkpoint", "split")
    more = {"total": result["items"], "perplexity": math.exp(result["loss"])}
    return {name: result[name] for name in names} | more


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("path", type=Path, nargs="?", default=checkpoints.DIRECTORY, help="or anything above it")
    add("--text", type=Path, help="a directory with *.txt files")
    add("--split", default="test", choices=text.SPLITS)
    add("--device", default="auto", help="auto, cpu, cuda, ...")
    # labctl sets this variable.
    out = os.environ.get("LABCTL_EVALUATION")
    add("--out", type=Path, default=out, help="write the whole evaluation there")
    options = parser.parse_args()
    try:
        checkpoint = checkpoints.best(options.path)
        device = pick_device(options.device)
        result = examine(checkpoint, options.text, options.split, device)
    except (CheckpointError, text.TextError) as error:
        raise SystemExit(f"evaluate: {error}") from None
    if options.out:
        write_json(options.out, {**result, "where": WHERE})
    print(json.dumps(summarize(result)))


if __name__ == "__main__":
    main()
