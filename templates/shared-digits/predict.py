"""The interface for `labctl serve`: images in, a probability per class out.

`load` is called once when the server starts, `predict` for every batch of
pictures. What else belongs to serving (HTTP, batches, limits) is labctl's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy
from PIL import Image

import checkpoints
import data
import model


class Predictor:
    """A loaded model. `reference` counts its predictions on the validation set, by class."""

    def __init__(self, loaded: model.Learner, checkpoint: str) -> None:
        self.model, self.classes, self.checkpoint = loaded, loaded.classes, checkpoint
        predicted = loaded.probabilities(data.load("val").inputs).argmax(axis=1)
        counts = numpy.bincount(predicted, minlength=len(self.classes))
        self.reference: list[int] = counts.tolist()

    def predict(self, pictures: Sequence[Image.Image]) -> list[list[float]]:
        """Return, for each picture, a probability for each class, in the order of `classes`."""
        images = numpy.stack([data.from_picture(picture) for picture in pictures])
        rows: list[list[float]] = self.model.probabilities(images).tolist()
        return rows


def load(path: Path) -> Predictor:
    """Load the best complete checkpoint at or below `path`; raises CheckpointError without one."""
    checkpoint = checkpoints.best(path)
    return Predictor(model.load(checkpoint), checkpoint.path.resolve().name)
