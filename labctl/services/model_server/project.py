"""The contract with the project that trained the model: a `predict.py` beside its train.py.

    def load(checkpoints: Path) -> Predictor

`checkpoints` is the run's checkpoint directory, or the chosen checkpoint. The Predictor has

    classes: Sequence[str]           the names of the classes
    predict(images) -> rows          a list of PIL images -> for each a probability per class, in
                                     the order of `classes`

or, for a model of tables, `predict(rows)` with a list of rows, and

    columns: Sequence[str]           the names of the values of a row, float or NaN

and may have

    checkpoint: str                  the name of the loaded checkpoint, for /healthz
    reference: Sequence[int]         how often each class was predicted on the validation set, in
                                     the order of `classes`; drift is measured against it

`predict` is called from one thread, with 1 to max_batch images of any size and mode, or rows.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from . import checkpoint
from .refusals import ModelError, RefusedError

MODULE = "predict"
CONTRACT = "load(checkpoints) returns an object with classes and predict(images)"


class Predictor(Protocol):
    """What `load` returns."""

    @property
    def classes(self) -> Sequence[str]: ...

    def predict(self, items: list[Any], /) -> Sequence[Sequence[float]]: ...


@dataclass(frozen=True)
class Model:
    """A loaded model. `reference` and `columns` are () if the project does not provide them."""

    predictor: Predictor
    classes: tuple[str, ...]
    checkpoint: str
    reference: tuple[int, ...]
    columns: tuple[str, ...] = ()

    def rows(self, items: list[Any]) -> list[list[float]]:
        """Compute a row of probabilities for each item; RefusedError for an invalid result."""
        predictions = self.predictor.predict(items)
        rows = [[float(value) for value in row] for row in predictions]
        if len(rows) != len(items) or any(len(row) != len(self.classes) for row in rows):
            text = "predict() must return one probability per class for each image or row"
            raise RefusedError(500, "model_failed", text)
        if not all(math.isfinite(value) for row in rows for value in row):
            raise RefusedError(500, "not_a_number", "the model returned NaN or infinity")
        return rows


def load(path: Path, module: str = MODULE) -> Model:
    """Load the project's model from a checkpoint that contains only data.

    ModelError if the checkpoint is refused or the project breaks the contract. Exceptions of the
    project's own code pass through.
    """
    files = checkpoint.check(path)
    try:
        project = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModelError(f"the project has no {module}.py; {CONTRACT}") from None
    load_project = getattr(project, "load", None)
    if not callable(load_project):
        raise ModelError(f"{module}.py has no load(); {CONTRACT}")
    return _check_predictor(load_project(path), files)


def _check_predictor(predictor: Any, files: tuple[str, ...]) -> Model:
    classes = tuple(str(value) for value in getattr(predictor, "classes", ()))
    if not classes or not callable(getattr(predictor, "predict", None)):
        raise ModelError(f"the result of load() has no classes or no predict(); {CONTRACT}")
    reference = tuple(int(value) for value in getattr(predictor, "reference", None) or ())
    if reference and (len(reference) != len(classes) or min(reference) < 0 or not any(reference)):
        raise ModelError("reference must have a count for each class")
    name = str(getattr(predictor, "checkpoint", "")) or files[0]
    columns = tuple(str(value) for value in getattr(predictor, "columns", ()))
    return Model(predictor, classes, name, reference, columns)
