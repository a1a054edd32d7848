"""Which of a run's curves is which, by the words in their names, and what is seen in a curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from labctl.insight.explain.evidence import Material
from labctl.insight.explain.samples import LEAST
from labctl.insight.scalars import HELD_OUT, TRAINING, Scalars, Series, words
from labctl.model import Value

# A curve is looked at in tenths.
PARTS = 10
# Fewer points than this tell nothing about a curve's course.
LEAST_POINTS = 20


def _is_loss(names: set[str]) -> bool:
    return any(word.endswith("loss") for word in names) or "nll" in names


def _is_accuracy(names: set[str]) -> bool:
    return bool(names & {"acc", "accuracy", "top1"})


def _is_rate(names: set[str]) -> bool:
    return "lr" in names or {"learning", "rate"} <= names


def _is_gradient_norm(names: set[str]) -> bool:
    return ("norm" in names and bool(names & {"grad", "gradient", "gradients"})) or (
        "gradnorm" in names
    )


def _chosen(found: Sequence[Series]) -> Series | None:
    """The one that stands for the whole: named for training, in few words, with many points."""

    def rank(one: Series) -> tuple[bool, int, int]:
        names = words(one.tag)
        return not names & TRAINING, len(names), -len(one.steps)

    return min(found, key=rank, default=None)


def train_losses(scalars: Scalars) -> list[Series]:
    named = [(one, words(one.tag)) for one in scalars.series]
    return [one for one, names in named if _is_loss(names) and not names & HELD_OUT]


def train_loss(scalars: Scalars) -> Series | None:
    return _chosen(train_losses(scalars))


def held_out_loss(scalars: Scalars) -> Series | None:
    named = [(one, words(one.tag)) for one in scalars.series]
    return _chosen([one for one, names in named if _is_loss(names) and names & HELD_OUT])


def accuracies(scalars: Scalars) -> tuple[Series | None, Series | None]:
    """(in training, on what was held out)"""
    named = [(one, words(one.tag)) for one in scalars.series]
    own = [(one, names) for one, names in named if _is_accuracy(names)]
    trained = _chosen([one for one, names in own if not names & HELD_OUT])
    return trained, _chosen([one for one, names in own if names & HELD_OUT])


def learning_rate(scalars: Scalars) -> Series | None:
    return _chosen([one for one in scalars.series if _is_rate(words(one.tag))])


def gradient_norm(scalars: Scalars) -> Series | None:
    return _chosen([one for one in scalars.series if _is_gradient_norm(words(one.tag))])


def data_wait(scalars: Scalars) -> Series | None:
    """A share from 0 to 1 with `data` and `wait` in its name."""
    named = [one for one in scalars.series if {"data", "wait"} <= words(one.tag)]
    shares = [one for one in named if all(0 <= v <= 1 for v in one.values if math.isfinite(v))]
    return _chosen(shares)


def data_wait_share(material: Material) -> float | None:
    """The median share of time waiting for data, the beginning left out."""
    found = data_wait(material.scalars)
    if found is None:
        return None
    later = finite(found)[len(found.values) // 5 :]
    return median(v for _, v in later) if len(later) >= LEAST else None


def setting(scalars: Scalars, name: str) -> float | None:
    """A number that the run logged once about itself: `setup/batch_size`."""
    found = scalars.get(f"setup/{name}")
    values = [] if found is None else [v for v in found.values if math.isfinite(v)]
    return values[-1] if values else None


def finite(series: Series) -> list[tuple[int, float]]:
    """(step, value) without NaN and infinities."""
    pairs = zip(series.steps, series.values, strict=True)
    return [(step, value) for step, value in pairs if math.isfinite(value)]


def at(series: Series | None, step: int) -> float | None:
    """The last value logged at or before a step."""
    if series is None:
        return None
    pairs = zip(series.steps, series.values, strict=True)
    before = [value for own, value in pairs if own <= step]
    return before[-1] if before else None


class Course(Value, frozen=True):
    """A curve in tenths: the median of each, and the step where it ends. `noise` is the median
    distance of the points from their tenth's median."""

    medians: tuple[float, ...]
    ends: tuple[int, ...]
    noise: float

    @property
    def first(self) -> float:
        return self.medians[0]

    @property
    def last(self) -> float:
        return self.medians[-1]

    @property
    def lowest(self) -> int:
        """Which tenth."""
        return min(range(len(self.medians)), key=lambda part: self.medians[part])


def course(series: Series) -> Course | None:
    """None where there are too few finite points."""
    points = finite(series)
    if len(points) < LEAST_POINTS:
        return None
    medians, ends, distances = [], [], []
    for part in range(PARTS):
        own = points[len(points) * part // PARTS : len(points) * (part + 1) // PARTS]
        middle = median(value for _, value in own)
        medians.append(middle)
        ends.append(own[-1][0])
        distances += [abs(value - middle) for _, value in own]
    return Course(medians=tuple(medians), ends=tuple(ends), noise=median(distances))


class Spike(Value, frozen=True):
    step: int
    value: float
    around: float


def spikes(series: Series, times: float, least: float = 0.0, reach: int = 10) -> list[Spike]:
    """Points `times` as high as the median of up to `reach` before and after, higher than it by
    `least` and by far more than they scatter. The beginning, where everything falls, is left out.
    """
    points = finite(series)
    found = []
    for index in range(len(points) // PARTS, len(points)):
        near = points[max(0, index - reach) : index] + points[index + 1 : index + 1 + reach]
        if len(near) < reach:
            continue
        values = [value for _, value in near]
        around = median(values)
        scatter = median(abs(value - around) for value in values)
        step, value = points[index]
        above = value - around
        if around > 0 and value > times * around and above > max(least, 8 * scatter):
            found.append(Spike(step=step, value=value, around=around))
    return found
