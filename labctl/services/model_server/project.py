"""The contract with the project that trained the model: a `predict.py` beside its train.py.

    def load(checkpoints: Path) -> Predictor

`checkpoints` is the run's checkpoint directory, or the one checkpoint that was chosen. What it
returns has

    classes: Sequence[str]           what the model tells apart
    predict(images) -> rows          a list of PIL images -> for each a probability per class, in
                                     the order of `classes`

and may have

    checkpoint: str                  the name of what was loaded, for /healthz
    reference: Sequence[int]         how often each class was predicted on the validation set, in
                                     the order of `classes`: what drift is measured against

`predict` is called from one thread, with 1 to max_batch images of any size and mode.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL.Image import Image

from . import checkpoint
from .refusals import ModelError, RefusedError

MODULE = "predict"
CONTRACT = "see docs/serve.md: load(checkpoints) returns an object with classes and predict(images)"


class Predictor(Protocol):
    """What `load` returns."""

    @property
    def classes(self) -> Sequence[str]: ...

    def predict(self, images: list[Image]) -> Sequence[Sequence[float]]: ...


@dataclass(frozen=True)
class Model:
    """A loaded model. `reference` is () where the project does not measure it."""

    predictor: Predictor
    classes: tuple[str, ...]
    checkpoint: str
    reference: tuple[int, ...]

    def rows(self, images: list[Image]) -> list[list[float]]:
        """A row of probabilities for each image; RefusedError where the model gives nonsense."""
        said = self.predictor.predict(images)
        rows = [[float(value) for value in row] for row in said]
        if len(rows) != len(images) or any(len(row) != len(self.classes) for row in rows):
            text = "predict() must give each image one probability for each class"
            raise RefusedError(500, "model_failed", text)
        if not all(math.isfinite(value) for row in rows for value in row):
            raise RefusedError(500, "not_a_number", "the model's answer is not a number")
        return rows


def load(path: Path, module: str = MODULE) -> Model:
    """The project's model, from a checkpoint that is nothing but data.

    ModelError where the checkpoint is refused or the project does not keep to the contract. What
    the project's own code raises comes through as it is.
    """
    files = checkpoint.check(path)
    try:
        project = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModelError(f"the project has no {module}.py; {CONTRACT}") from None
    made = getattr(project, "load", None)
    if not callable(made):
        raise ModelError(f"{module}.py has no load(); {CONTRACT}")
    return _model(made(path), files)


def _model(predictor: Any, files: tuple[str, ...]) -> Model:
    classes = tuple(str(one) for one in getattr(predictor, "classes", ()))
    if not classes or not callable(getattr(predictor, "predict", None)):
        raise ModelError(f"what load() returned has no classes or no predict(); {CONTRACT}")
    reference = tuple(int(one) for one in getattr(predictor, "reference", None) or ())
    if reference and (len(reference) != len(classes) or min(reference) < 0 or not any(reference)):
        raise ModelError("reference must hold a count for each class")
    name = str(getattr(predictor, "checkpoint", "")) or files[0]
    return Model(predictor, classes, name, reference)
