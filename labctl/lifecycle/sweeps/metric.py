"""The metric of a trial, from what its run reports: logs/progress.json, or a curve of TensorBoard.

Progress arrives with every check of the server and is a sample: what was written between two checks
is not there. A curve is complete, but its files must be downloaded first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from labctl.config.reader import find_nearest
from labctl.insight.scalars import read_scalars
from labctl.model import Value

LARGEST_STEP = 2**53
# values of one trial that the study records, for the pruner
MOST_REPORTS = 1000
MOST_NAMED = 20
MOST_PROGRESS_BYTES = 1024**2


class Reading(Value, frozen=True):
    """What a run has reported of the metric: (step, value) in order, and the `last` value.

    `names` are all metrics that it reports. `last` is None if the metric is not among them.
    """

    points: tuple[tuple[int, float], ...] = ()
    last: float | None = None
    names: tuple[str, ...] = ()


def read_progress(progress: Mapping[str, float], metric: str) -> Reading:
    """Read the metric from the newest progress."""
    names = tuple(progress)
    value = progress.get(metric)
    if value is None:
        return Reading(names=names)
    step = find_step(progress)
    points = () if step is None else ((step, value),)
    return Reading(points=points, last=value, names=names)


def find_step(progress: Mapping[str, float]) -> int | None:
    """Return the step of a progress that other trials have too: its epoch, else its percentage.

    Checks see only some steps. Epochs, and hundredths of the whole, are coarse enough to meet.
    """
    epoch, step, total = (progress.get(name) for name in ("epoch", "step", "total_steps"))
    if epoch is not None:
        return _as_step(epoch)
    if step is None:
        return None
    return _as_step(100 * step / total) if total and total > 0 else _as_step(step)


def _as_step(value: float) -> int | None:
    return int(value) if math.isfinite(value) and 0 <= value <= LARGEST_STEP else None


def read_curve(logs: Path, metric: str) -> Reading:
    """Read the metric from the downloaded event files; OSError if they cannot be read."""
    scalars = read_scalars(logs)
    names = tuple(series.tag for series in scalars.series)
    series = scalars.get(metric)
    if series is None or not series.values:
        return Reading(names=names)
    pairs = zip(series.steps, series.values, strict=True)
    points = tuple((step, value) for step, value in pairs if 0 <= step <= LARGEST_STEP)
    return Reading(points=points, last=series.values[-1], names=names)


def read_last_progress(logs: Path, metric: str) -> object:
    """Return what the downloaded progress.json has as the metric, None without one.

    The agent reports ordinary numbers only. This finds those that it leaves out, such as NaN, and
    what is no number at all.
    """
    try:
        with (logs / "progress.json").open("rb") as file:
            progress = json.loads(file.read(MOST_PROGRESS_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return progress.get(metric) if isinstance(progress, dict) else None


def as_number(value: object) -> float | None:
    """Return a value of progress.json as a float, None if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def describe_names(metric: str, names: Iterable[str]) -> str:
    """Say which metrics a run reports, the one that is most like `metric` first."""
    known = sorted(set(names))
    if not known:
        return "it reports none: neither logs/progress.json nor TensorBoard's files have a number"
    near = find_nearest(metric, known)
    start = f"did you mean {near}? " if near else ""
    more = f" and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
    return f"{start}It reports: {', '.join(known[:MOST_NAMED])}{more}"


class StepSeries:
    """The steps of one trial for the pruner: each once, in order, without gaps.

    A value counts for its step once a later step is seen, or the run has ended. Steps that no check
    saw get the value before them, so that trials have the same steps.
    """

    def __init__(self, reached: int | None) -> None:
        self.reached = reached
        self._newest: tuple[int, float] | None = None
        self._count = 0

    def add_progress(self, points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
        """Return what can be recorded now that `points` were seen."""
        done: list[tuple[int, float]] = []
        for step, value in points:
            if self._newest is not None and step > self._newest[0]:
                done += self._fill(self._newest, step)
            # A run that started again goes back to steps that count already.
            is_back = self._newest is not None and step < self._newest[0]
            if math.isfinite(value) and not is_back:
                self._newest = (step, value)
        return done

    def add_curve(self, points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
        """Return the points of a complete curve that are new."""
        return [point for step, value in points for point in self._take(step, value)]

    def finish(self) -> list[tuple[int, float]]:
        """Return the last step, at the end of the run."""
        newest, self._newest = self._newest, None
        return self._take(*newest) if newest else []

    def _fill(self, newest: tuple[int, float], until: int) -> list[tuple[int, float]]:
        step, value = newest
        first = self._take(step, value)
        if until - step > MOST_REPORTS:
            return first
        return [
            *first,
            *(each for one in range(step + 1, until) for each in self._take(one, value)),
        ]

    def _take(self, step: int, value: float) -> list[tuple[int, float]]:
        is_new = self.reached is None or step > self.reached
        if not is_new or not math.isfinite(value) or self._count >= MOST_REPORTS:
            return []
        self.reached = step
        self._count += 1
        return [(step, value)]
