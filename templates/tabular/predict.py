"""The interface for `labctl serve`: rows in, a probability per class out.

    curl -H 'Content-Type: application/json' \\
        -d '{"rows": [[12.5, 8, 3.2, 40, 2, 1]]}' http://127.0.0.1:8000/predict

`load` is called once when the server starts, `predict` for every batch of rows.
What else belongs to serving (HTTP, batches, limits) is labctl's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy

import checkpoints
import data
import model
from data import DataError
from run import find_places


class Predictor:
    """A loaded model. `columns` are the names of the values in a row."""

    def __init__(self, loaded: model.Loaded, checkpoint: str) -> None:
        self.model, self.checkpoint = loaded, checkpoint
        self.classes, self.columns = loaded.classes, loaded.columns
        self.reference = self._count_predictions()

    def predict(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return, for each row, a probability for each class, in the order of `classes`."""
        inputs = numpy.array(rows, "float32")
        probabilities: list[list[float]] = self.model.probabilities(inputs).tolist()
        return probabilities

    def _count_predictions(self) -> list[int] | None:
        """Count predictions by class on the validation set, against which drift is measured."""
        try:
            split = data.load("val", data.find(find_places()))
        except DataError:
            return None
        if split.inputs.shape[1] != len(self.columns):
            return None
        predicted = self.model.probabilities(split.inputs).argmax(axis=1)
        counts: list[int] = numpy.bincount(predicted, minlength=len(self.classes)).tolist()
        return counts


def load(path: Path) -> Predictor:
    """Load the best complete checkpoint at or below `path`; raises CheckpointError without one."""
    checkpoint = checkpoints.best(path)
    return Predictor(model.load(checkpoint), checkpoint.path.resolve().name)
