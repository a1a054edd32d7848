"""The parts of an automatic grade as values, and how a metric becomes points."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

from labctl.model import Value

# Gradescope's values: when a student may see a test's result.
VISIBILITIES = ("hidden", "after_due_date", "after_published", "visible")
# `grader`: the grading command on predictions. `public` tests and an `autograder` run beside the
# student's code.
PartKind = Literal["grader", "hidden", "public", "autograder"]


class MarkedTest(Value, frozen=True):
    """A test function by pytest's name for it. `visibility` is "" if it has no marker for it."""

    name: str
    points: float
    visibility: str = ""


class GradedPart(Value, frozen=True):
    """One part, and its highest points. `tests` are the functions of hidden or public tests."""

    kind: PartKind
    points: float
    tests: tuple[MarkedTest, ...] = ()

    @property
    def title(self) -> str:
        """The part's name in messages; "" for the grading command."""
        titles = {"hidden": "hidden tests", "public": "public tests", "autograder": "autograder"}
        return titles.get(self.kind, "")


def scale_metric(scale: Mapping[float, float], value: float) -> float:
    """Return the points of a metric's value: linear between two given values, else flat."""
    known = sorted(scale)
    if value <= known[0]:
        return scale[known[0]]
    for low, high in pairwise(known):
        if value <= high:
            share = (value - low) / (high - low)
            return round(scale[low] + share * (scale[high] - scale[low]), 4)
    return scale[known[-1]]
