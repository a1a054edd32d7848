"""Predict a run's time from its first steps: a mean without the warm-up, and a range.

A run regularly reports its number of steps. The time between two reports is a stretch; its pace is
its seconds per step. The first stretches are slower (kernels are chosen, files are read for the
first time), so they are dropped; their extra time counts as part of the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from labctl.model import Value

# A first stretch belongs to the warm-up if it is slower than the median of the rest by this factor.
WARM = 1.25
LEAST_STRETCHES = 6
LEAST_SPAN_S = 5.0
# The range is at least this share of the mean, however even the first steps are.
LEAST_MARGIN = 0.05


class StepCount(NamedTuple):
    """The number of steps done at a moment (seconds of any one clock)."""

    at: float
    step: float


class Stretch(NamedTuple):
    seconds: float
    steps: float

    @property
    def pace(self) -> float:
        return self.seconds / self.steps


class StepPace(Value, frozen=True):
    """Seconds per step after the warm-up: the mean, the best and the worst to expect.

    `start_s` is the additional time of the start: from the container's start until the first steps,
    plus the extra time of the warm-up's steps. `steps` were measured, `warm_up_steps` dropped.
    """

    seconds_per_step: float
    low_seconds_per_step: float
    high_seconds_per_step: float
    start_s: float
    steps: float
    warm_up_steps: float
    stretches: int


class PredictedTime(Value, frozen=True):
    """A whole run's time in seconds, from its container's start, with a range."""

    seconds: float
    low_s: float
    high_s: float


def compute_pace(points: Sequence[StepCount], started_at: float) -> StepPace | None:
    """Compute the pace of the steps in `points` (in order of time); None with too few points.

    The range is from the mean of the faster half of the stretches to that of the slower half, and
    at least LEAST_MARGIN to both sides. Where the step decreases (a resumed run), it starts over.
    """
    points = _drop_repeated(points)
    stretches = _to_stretches(points)
    warm = _count_warm_up(stretches)
    kept = stretches[warm:]
    steps = sum(stretch.steps for stretch in kept)
    seconds = sum(stretch.seconds for stretch in kept)
    if len(kept) < LEAST_STRETCHES or seconds < LEAST_SPAN_S:
        return None
    mean = seconds / steps
    ordered = sorted(stretch.pace for stretch in kept)
    half = len(ordered) // 2
    low = min(fmean(ordered[:half]), mean * (1 - LEAST_MARGIN))
    high = max(fmean(ordered[-half:]), mean * (1 + LEAST_MARGIN))
    first = points[warm]
    return StepPace(
        seconds_per_step=mean,
        low_seconds_per_step=low,
        high_seconds_per_step=high,
        start_s=max(0.0, first.at - started_at - first.step * mean),
        steps=steps,
        warm_up_steps=first.step,
        stretches=len(kept),
    )


def predict_time(measured_pace: StepPace, total_steps: float) -> PredictedTime:
    """Compute the time of all steps at this pace, including the start."""
    return PredictedTime(
        seconds=measured_pace.start_s + total_steps * measured_pace.seconds_per_step,
        low_s=measured_pace.start_s + total_steps * measured_pace.low_seconds_per_step,
        high_s=measured_pace.start_s + total_steps * measured_pace.high_seconds_per_step,
    )


def _drop_repeated(points: Sequence[StepCount]) -> list[StepCount]:
    kept: list[StepCount] = []
    for point in points:
        if kept and point.step < kept[-1].step:
            kept = []
        if not kept or (point.step > kept[-1].step and point.at > kept[-1].at):
            kept.append(point)
    return kept


def _to_stretches(points: Sequence[StepCount]) -> list[Stretch]:
    return [Stretch(b.at - a.at, b.step - a.step) for a, b in pairwise(points)]


def _count_warm_up(stretches: Sequence[Stretch]) -> int:
    """Count the stretches of the warm-up: the first one, and slower ones after it.

    At most half of all stretches: a longer slow phase is not the start.
    """
    warm = min(1, len(stretches))
    while warm < len(stretches) // 2:
        rest = median(stretch.pace for stretch in stretches[warm + 1 :])
        if stretches[warm].pace <= WARM * rest:
            break
        warm += 1
    return warm
