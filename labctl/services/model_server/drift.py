"""Measure drift: whether current images resemble those of the validation, by predictions only.

The population stability index compares how often each class is predicted now and on the validation
set: the sum of (p - q) ln(p / q). It needs no true labels. By an old rule of thumb of credit
scoring, below 0.1 nothing has changed and above 0.25 something has. But an index of few predictions
is large by chance alone: about (classes - 1) (1/n + 1/m) for n predictions and m validation items
(B. Yurdakul and J. Naranjo, Journal of Risk Model Validation 14(4), 2020), so that value is
reported too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 1000
# Number of predictions from which drift is reported.
AT_LEAST = 100
# Added to each count, so that a class that was never predicted is not infinitely far.
HALF = 0.5


@dataclass(frozen=True)
class Drift:
    """`index` is the population stability index, `by_chance` what to expect of it without drift."""

    index: float
    by_chance: float
    predictions: int


class DriftMonitor:
    """Compares the last WINDOW predictions with `reference`, a count for each class."""

    def __init__(self, reference: Sequence[int]) -> None:
        self._reference = tuple(reference)
        self._now = [0] * len(self._reference)
        self._window: deque[int] = deque()

    def count(self, number: int) -> None:
        """Count a prediction, by the number of its class."""
        if not self._reference:
            return
        self._window.append(number)
        self._now[number] += 1
        if len(self._window) > WINDOW:
            self._now[self._window.popleft()] -= 1

    def measure(self) -> Drift | None:
        """Return the drift; None without a reference, or with too few predictions."""
        count = len(self._window)
        if not self._reference or count < AT_LEAST:
            return None
        classes = len(self._reference)
        by_chance = (classes - 1) * (1 / count + 1 / sum(self._reference))
        return Drift(stability_index(self._now, self._reference), by_chance, count)


def stability_index(now: Sequence[int], reference: Sequence[int]) -> float:
    """Compute the population stability index of two rows of counts; 0.0 for equal shares."""
    shares = []
    for counts in (now, reference):
        total = sum(counts) + HALF * len(counts)
        shares.append([(count + HALF) / total for count in counts])
    return float(sum((p - q) * math.log(p / q) for p, q in zip(*shares, strict=True)))
