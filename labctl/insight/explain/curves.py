"""Find a run's curves (loss, accuracy, ...) by the words in their names, and summarize them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from labctl.insight.explain.evidence import RunData
from labctl.insight.explain.samples import LEAST
from labctl.insight.scalars import HELD_OUT, TRAINING, Scalars, Series, split_words
from labctl.model import Value

# A curve is summarized in tenths.
PARTS = 10
# points on each side that a spike is compared with
REACH = 10
# With fewer points, the trend of a curve is unknown.
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


def _choose(candidates: Sequence[Series]) -> Series | None:
    """Choose the main curve: named for training, in few words, with many points."""

    def rank(series: Series) -> tuple[bool, int, int]:
        names = split_words(series.tag)
        return not names & TRAINING, len(names), -len(series.steps)

    return min(candidates, key=rank, default=None)


def find_train_losses(scalars: Scalars) -> list[Series]:
    """Find the curves with a loss in their names that were not measured on held-out data."""
    named = [(series, split_words(series.tag)) for series in scalars.series]
    return [series for series, names in named if _is_loss(names) and not names & HELD_OUT]


def find_train_loss(scalars: Scalars) -> Series | None:
    return _choose(find_train_losses(scalars))


def find_held_out_loss(scalars: Scalars) -> Series | None:
    named = [(series, split_words(series.tag)) for series in scalars.series]
    return _choose([series for series, names in named if _is_loss(names) and names & HELD_OUT])


def find_accuracies(scalars: Scalars) -> tuple[Series | None, Series | None]:
    """Return the accuracy curves (on training data, on held-out data)."""
    named = [(series, split_words(series.tag)) for series in scalars.series]
    candidates = [(series, names) for series, names in named if _is_accuracy(names)]
    trained = _choose([series for series, names in candidates if not names & HELD_OUT])
    return trained, _choose([series for series, names in candidates if names & HELD_OUT])


def find_learning_rate(scalars: Scalars) -> Series | None:
    return _choose([series for series in scalars.series if _is_rate(split_words(series.tag))])


def find_gradient_norm_series(scalars: Scalars) -> Series | None:
    return _choose(
        [series for series in scalars.series if _is_gradient_norm(split_words(series.tag))]
    )


def find_data_wait_series(scalars: Scalars) -> Series | None:
    """Find the curve of the share (0 to 1) of time waiting for data, by `data` and `wait`."""
    named = [series for series in scalars.series if {"data", "wait"} <= split_words(series.tag)]
    shares = [
        series
        for series in named
        if all(0 <= value <= 1 for value in series.values if math.isfinite(value))
    ]
    return _choose(shares)


def compute_data_wait_share(material: RunData) -> float | None:
    """Return the median share of time waiting for data, without the first fifth."""
    curve = find_data_wait_series(material.scalars)
    if curve is None:
        return None
    later = finite_points(curve)[len(curve.values) // 5 :]
    return median(value for _, value in later) if len(later) >= LEAST else None


def read_setting(scalars: Scalars, name: str) -> float | None:
    """Return a number that the run logged about itself, such as `setup/batch_size`."""
    series = scalars.get(f"setup/{name}")
    values = [] if series is None else [value for value in series.values if math.isfinite(value)]
    return values[-1] if values else None


def finite_points(series: Series) -> list[tuple[int, float]]:
    """Return (step, value) pairs without NaN and infinities."""
    pairs = zip(series.steps, series.values, strict=True)
    return [(step, value) for step, value in pairs if math.isfinite(value)]


def value_at(series: Series | None, step: int) -> float | None:
    """Return the last value logged at or before a step."""
    if series is None:
        return None
    pairs = zip(series.steps, series.values, strict=True)
    before = [value for at_step, value in pairs if at_step <= step]
    return before[-1] if before else None


class Trend(Value, frozen=True):
    """The trend of a curve in tenths: the median of each, and the step where it ends.

    `noise` is the median distance of the points from their tenth's median.
    """

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
        """The index of the tenth with the lowest median."""
        return min(range(len(self.medians)), key=lambda part: self.medians[part])


def summarize_trend(series: Series) -> Trend | None:
    """Summarize a curve in tenths; None with fewer than LEAST_POINTS finite points."""
    points = finite_points(series)
    if len(points) < LEAST_POINTS:
        return None
    medians, ends, distances = [], [], []
    for part in range(PARTS):
        tenth = points[len(points) * part // PARTS : len(points) * (part + 1) // PARTS]
        middle = median(value for _, value in tenth)
        medians.append(middle)
        ends.append(tenth[-1][0])
        distances += [abs(value - middle) for _, value in tenth]
    return Trend(medians=tuple(medians), ends=tuple(ends), noise=median(distances))


class Spike(Value, frozen=True):
    """A point far above its neighbors. `baseline` is their median."""

    step: int
    value: float
    baseline: float


def find_spikes(series: Series, times: float, least: float = 0.0) -> list[Spike]:
    """Find points above `times` the median of up to REACH neighbors on each side.

    They must also exceed it by `least`, and by 8 times the neighbors' scatter. The first tenth is
    left out, since every curve falls there.
    """
    points = finite_points(series)
    result = []
    for index in range(len(points) // PARTS, len(points)):
        neighbors = points[max(0, index - REACH) : index] + points[index + 1 : index + 1 + REACH]
        if len(neighbors) < REACH:
            continue
        values = [value for _, value in neighbors]
        baseline = median(values)
        scatter = median(abs(value - baseline) for value in values)
        step, value = points[index]
        above = value - baseline
        if baseline > 0 and value > times * baseline and above > max(least, 8 * scatter):
            result.append(Spike(step=step, value=value, baseline=baseline))
    return result
