"""From the first steps of a run to its whole time: a mean without the warm-up, and a range.

A run tells now and then how many steps it has done. Between two such words lies a stretch; its pace
is its seconds for each step. The first stretches are slower (kernels are chosen, files are read for
the first time), so they are dropped; what they cost once is kept as part of the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from labctl.model import Value

# A leading stretch so much slower than the rest's median belongs to the warm-up.
WARM = 1.25
LEAST_STRETCHES = 6
LEAST_SPAN_S = 5.0
# Nobody knows a run's time better than to so much, however even its first steps are.
LEAST_MARGIN = 0.05


class Point(NamedTuple):
    """That so many steps were done at this moment (seconds on one clock, whichever)."""

    at: float
    step: float


class Stretch(NamedTuple):
    seconds: float
    steps: float

    @property
    def pace(self) -> float:
        return self.seconds / self.steps


class Pace(Value, frozen=True):
    """Seconds for each step after the warm-up: the mean, and what to expect at best and worst.

    `start_s` is what the start cost beyond these: from the container's start until the first steps,
    and what the warm-up's steps took longer. `steps` were measured, `warm_up_steps` dropped.
    """

    seconds_per_step: float
    low_seconds_per_step: float
    high_seconds_per_step: float
    start_s: float
    steps: float
    warm_up_steps: float
    stretches: int


class Whole(Value, frozen=True):
    """A whole run's time in seconds, from its container's start, with a range."""

    seconds: float
    low_s: float
    high_s: float


def pace(points: Sequence[Point], started_at: float) -> Pace | None:
    """The pace of the steps in `points` (in order of time); None where they tell too little yet.

    The range is that of the slower and of the faster half of the stretches, and at least
    LEAST_MARGIN to both sides. Points that go back (a run that resumed) begin anew.
    """
    points = _forward(points)
    stretches = _stretches(points)
    warm = _warm_up(stretches)
    kept = stretches[warm:]
    steps, seconds = sum(one.steps for one in kept), sum(one.seconds for one in kept)
    if len(kept) < LEAST_STRETCHES or seconds < LEAST_SPAN_S:
        return None
    mean = seconds / steps
    ordered = sorted(one.pace for one in kept)
    half = len(ordered) // 2
    low = min(fmean(ordered[:half]), mean * (1 - LEAST_MARGIN))
    high = max(fmean(ordered[-half:]), mean * (1 + LEAST_MARGIN))
    first = points[warm]
    return Pace(
        seconds_per_step=mean,
        low_seconds_per_step=low,
        high_seconds_per_step=high,
        start_s=max(0.0, first.at - started_at - first.step * mean),
        steps=steps,
        warm_up_steps=first.step,
        stretches=len(kept),
    )


def whole(found: Pace, total_steps: float) -> Whole:
    """The time of all steps at this pace, the start included."""
    return Whole(
        seconds=found.start_s + total_steps * found.seconds_per_step,
        low_s=found.start_s + total_steps * found.low_seconds_per_step,
        high_s=found.start_s + total_steps * found.high_seconds_per_step,
    )


def _forward(points: Sequence[Point]) -> list[Point]:
    kept: list[Point] = []
    for point in points:
        if kept and point.step < kept[-1].step:
            kept = []
        if not kept or (point.step > kept[-1].step and point.at > kept[-1].at):
            kept.append(point)
    return kept


def _stretches(points: Sequence[Point]) -> list[Stretch]:
    return [Stretch(b.at - a.at, b.step - a.step) for a, b in pairwise(points)]


def _warm_up(stretches: Sequence[Stretch]) -> int:
    """How many of the first stretches are warm-up: the very first, and slower ones behind it.

    At most half of them: what is slow for so long is not the start.
    """
    warm = min(1, len(stretches))
    while warm < len(stretches) // 2:
        rest = median(one.pace for one in stretches[warm + 1 :])
        if stretches[warm].pace <= WARM * rest:
            break
        warm += 1
    return warm
