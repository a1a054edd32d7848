"""Train a model for tables on growing parts of its rows, and time it.

A part of measure.py, which imports it in the lab's own Python: nothing of labctl is imported here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

# The first part has so many of the rows, but at least FEWEST_ROWS if there are that many.
FIRST_SHARE = 1 / 64
FEWEST_ROWS = 200
# No further part is tried after so many seconds.
ENOUGH_S = 3.0


class FitReply(NamedTuple):
    """The trainings; labctl.estimate.plan.FitMeasurement describes them."""

    name: str
    rows: int
    columns: int
    trials: Sequence[Sequence[float]]
    python: str


def is_estimator(model: Any) -> bool:
    """Tell whether it has scikit-learn's interface: `fit`, and no PyTorch parameters."""
    return callable(getattr(model, "fit", None)) and not hasattr(model, "parameters")


def is_table(example: Any) -> bool:
    """Tell whether it is (rows, labels), as `fit` takes them."""
    if not isinstance(example, (tuple, list)) or len(example) != 2:
        return False
    rows, labels = (tuple(getattr(part, "shape", ())) for part in example)
    return len(rows) == 2 and len(labels) > 0 and rows[0] == labels[0] > 1


def measure_fit(model: Any, table: Any, python: str) -> FitReply:
    """Train with doubled numbers of rows, up to half of them or until it takes seconds."""
    inputs, labels = table
    rows, columns = inputs.shape
    order = list(range(rows))
    random.Random(0).shuffle(order)
    size = max(1, int(rows * FIRST_SHARE), min(FEWEST_ROWS, rows // 4))
    # The first call of a library starts threads and compiles.
    model.fit(*(take(part, order[:size]) for part in table))
    trials: list[tuple[int, float]] = []
    started = time.perf_counter()
    while not trials or (size <= rows / 2 and time.perf_counter() - started < ENOUGH_S):
        part = [take(values, order[:size]) for values in (inputs, labels)]
        before = time.perf_counter()
        model.fit(*part)
        trials.append((size, time.perf_counter() - before))
        size *= 2
    return FitReply(type(model).__name__, rows, columns, trials, python)


def take(values: Any, chosen: Any) -> Any:
    """Take rows of an array, a sparse matrix, or a frame of pandas."""
    return values.iloc[chosen] if hasattr(values, "iloc") else values[chosen]
