"""The curves of several runs in one chart for each metric, and their last and best values."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from msgspec.structs import replace

from labctl.insight.report.charts import Chart, Curve, draw_chart
from labctl.insight.report.curves import (
    SHARES,
    is_result,
    metric_name,
    metric_priority,
    metric_title,
)
from labctl.insight.report.facts import ReportFacts
from labctl.insight.scalars import HELD_OUT, TRAINING, Series, split_words
from labctl.model import Value

MOST_CHARTS = 6
_LESS_IS_BETTER = re.compile(r"loss|error|perplexity|seconds|_ms|wait")
# Neither their highest nor their lowest value is better: settings, and what describes the training.
_WITHOUT_BEST = re.compile(r"(?:^|_)(?:learning_rate|lr|momentum|(?:gradient|grad|weight)s?_norm)$")


class CurveValues(Value, frozen=True):
    """A metric's curves: the last value of each run and the best one; None without that curve.

    `data` is what it was measured on. `best` are the lowest values for a loss or a time, and None
    where no value is better than another, as for a learning rate.
    """

    name: str
    data: str
    last: tuple[float | None, ...]
    best: tuple[float | None, ...]
    steps: tuple[int | None, ...]
    is_share: bool


def compare_curves(
    runs: Sequence[ReportFacts], labels: Sequence[str]
) -> tuple[tuple[CurveValues, ...], tuple[Chart, ...]]:
    """Draw each metric that at least two runs logged; return values and charts alike in order."""
    grouped = [_group(facts) for facts in runs]
    names = dict.fromkeys(name for one in grouped for name in one)
    shared = [name for name in names if sum(name in one for one in grouped) > 1]
    shared.sort(key=lambda name: (metric_priority(name[0]), name))
    # A loss on the training set beside the one on held-out data would double the charts.
    held_out = {metric for metric, data in shared if data == "validation"}
    shown = [one for one in shared if one[1] == "validation" or one[0] not in held_out]
    values, charts = [], []
    for name in shown[:MOST_CHARTS]:
        series = [one.get(name) for one in grouped]
        found = _describe(name, series)
        values.append(found)
        charts.append(_draw(found, series, labels))
    return tuple(values), tuple(charts)


def _group(facts: ReportFacts) -> dict[tuple[str, str], Series]:
    """Return a run's curves by metric and data; settings, which are logged once, are left out."""
    grouped: dict[tuple[str, str], Series] = {}
    for series in facts.scalars.series:
        words, metric = split_words(series.tag), metric_name(series.tag)
        data = "validation" if words & HELD_OUT else "training" if words & TRAINING else ""
        if len(series.values) > 1 or is_result(metric):
            grouped.setdefault((metric, data), series)
    return grouped


def _describe(name: tuple[str, str], series: Sequence[Series | None]) -> CurveValues:
    metric, data = name
    better = min if _LESS_IS_BETTER.search(metric.lower()) else max
    finite = [
        [(v, s) for v, s in zip(one.values, one.steps, strict=True) if math.isfinite(v)]
        if one
        else []
        for one in series
    ]
    has_best = not _WITHOUT_BEST.search(metric.lower())
    best = [
        better(points, key=lambda point: point[0]) if points and has_best else None
        for points in finite
    ]
    is_share = bool(SHARES.search(metric.lower())) and all(
        -1e-9 <= value <= 1 + 1e-9 for points in finite for value, _ in points
    )
    return CurveValues(
        name=metric,
        data=data,
        last=tuple(points[-1][0] if points else None for points in finite),
        best=tuple(point[0] if point else None for point in best),
        steps=tuple(point[1] if point else None for point in best),
        is_share=is_share,
    )


def _draw(found: CurveValues, series: Sequence[Series | None], labels: Sequence[str]) -> Chart:
    curves = [
        Curve(label=label, xs=tuple(map(float, one.steps)), ys=one.values)
        for label, one in zip(labels, series, strict=True)
        if one
    ]
    title = metric_title(found.name) + (f", {found.data}" if found.data else "")
    high = 1.0 if found.is_share else None
    name = f"{found.name}-{found.data}"
    chart = draw_chart(name, title, curves, share=found.is_share, high=high, most=len(labels))
    # A run has one color in all charts, also in one that lacks another run's curve.
    places = {label: place for place, label in enumerate(labels)}
    lines = tuple(replace(line, style=places[line.label]) for line in chart.lines)
    return replace(chart, lines=lines)
