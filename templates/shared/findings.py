"""Summarize a model's predictions as labctl's evaluation.json.

The confusion matrix, the share that always predicting the most frequent class
would get right, the most confident mistakes, and the prediction for each item.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

MOST_MISTAKES = 24
# The smallest probability that the loss counts with: log(0) is infinite.
LEAST = 1e-12


@dataclass(frozen=True)
class Split:
    """Items to learn or to be asked about.

    `inputs` has a row for each item, `labels` the number of its class in `classes`, `names` its
    name, which no other item has. `describe` returns what a list of mistakes shows of an item:
    its name or values, and perhaps its picture as a data URI.
    """

    inputs: numpy.ndarray[Any, Any]
    labels: numpy.ndarray[Any, Any]
    classes: tuple[str, ...]
    names: tuple[str, ...]
    describe: Callable[[int], dict[str, str]]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256(numpy.ascontiguousarray(self.inputs).tobytes())
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Score:
    """The result of a model on a split."""

    accuracy: float  # correct / total
    correct: int
    total: int
    loss: float  # mean cross-entropy


def score(probabilities: numpy.ndarray[Any, Any], split: Split) -> Score:
    """Compare probabilities (items, classes) with the labels."""
    total = len(split)
    correct = int((probabilities.argmax(axis=1) == split.labels).sum())
    likelihood = probabilities[numpy.arange(total), split.labels].astype("float64")
    # Not numpy.maximum: NaN must stay NaN.
    loss = -float(numpy.log(numpy.where(likelihood < LEAST, LEAST, likelihood)).mean())
    return Score(correct / total, correct, total, loss)


def findings(
    probabilities: numpy.ndarray[Any, Any], split: Split, train: Split
) -> dict[str, object]:
    """Build the part of evaluation.json that is about the predictions."""
    count = len(split.classes)
    predicted = probabilities.argmax(axis=1)
    cells = numpy.bincount(split.labels * count + predicted, minlength=count * count)
    usual = numpy.bincount(train.labels, minlength=count).argmax()
    found = score(probabilities, split)
    return {
        "version": 1,
        "data_sha256": split.sha256,
        "classes": split.classes,
        # A row for each true class, a column for each predicted class.
        "confusion": cells.reshape(count, count).tolist(),
        "accuracy": found.accuracy,
        "items": found.total,
        "loss": found.loss,
        "baseline_accuracy": float((split.labels == usual).mean()),
        "at": round(time.time(), 3),
        "worst": worst(probabilities, split),
        "predictions": predictions(predicted, split),
    }


def predictions(predicted: numpy.ndarray[Any, Any], split: Split) -> dict[str, object]:
    """List the true and the predicted class of each item, with a hash of the items' order.

    labctl compare needs them to decide whether two runs differ by more than chance.
    """
    order = "".join(f"{name}\n" for name in split.names).encode()
    return {
        "order_sha256": hashlib.sha256(order).hexdigest(),
        "truth": split.labels.tolist(),
        "said": predicted.tolist(),
    }


def worst(probabilities: numpy.ndarray[Any, Any], split: Split) -> list[dict[str, object]]:
    """List the most confident mistakes."""
    predicted, certainty = probabilities.argmax(axis=1), probabilities.max(axis=1)
    wrong = (predicted != split.labels).nonzero()[0]
    wrong = wrong[numpy.argsort(-certainty[wrong], kind="stable")][:MOST_MISTAKES]
    return [
        split.describe(number)
        | {
            "truth": split.classes[split.labels[number]],
            "said": split.classes[predicted[number]],
            "probability": float(certainty[number]),
        }
        for number in wrong.tolist()
    ]
