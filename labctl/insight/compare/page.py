"""The text and figures of the page that compares several runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from labctl.insight.compare.comparison import ComparedRun, ComparisonResult
from labctl.insight.compare.curves import CurveValues
from labctl.insight.compare.settings import SettingDifference
from labctl.insight.compare.wording import describe_pairs
from labctl.insight.report.charts import Chart, Tick, choose_axis
from labctl.insight.report.formatting import (
    NOT_MEASURED,
    bare_percent,
    date,
    dollars,
    number,
    percent,
    span,
)
from labctl.model import Value


class IntervalBar(Value, frozen=True):
    """A run's accuracy and interval, as positions on the common axis in percent."""

    label: str
    run: str
    value: str
    point: float
    low: float
    high: float


class RunRow(Value, frozen=True):
    label: str
    run: str
    state: str
    accuracy: str
    interval: str
    items: str
    time: str
    cost: str


class CurveRow(Value, frozen=True):
    name: str
    values: tuple[str, ...]


class Verdict(Value, frozen=True):
    """What the test of two runs says. `hint` is the command that provides missing data."""

    names: str
    text: str
    hint: str
    strong: bool


class ComparisonPage(Value, frozen=True):
    """The page. `ticks` are those of the axis of `bars`."""

    lab: str
    headline: str
    labels: tuple[str, ...]
    rows: tuple[RunRow, ...]
    bars: tuple[IntervalBar, ...]
    ticks: tuple[Tick, ...]
    verdicts: tuple[Verdict, ...]
    charts: tuple[Chart, ...]
    curves: tuple[CurveRow, ...]
    differences: tuple[SettingDifference, ...]
    code: str
    notes: tuple[str, ...]
    made: str


def build_comparison_page(
    lab: str,
    comparison: ComparisonResult,
    charts: Sequence[Chart],
    *,
    made_at: float,
    labctl: str,
) -> ComparisonPage:
    """Write the page's text. Pure: the same comparison gives the same page."""
    bars, ticks = _draw_intervals(comparison.runs)
    return ComparisonPage(
        lab=lab,
        headline=_headline(comparison),
        labels=tuple(run.label for run in comparison.runs),
        rows=tuple(make_run_row(run) for run in comparison.runs),
        bars=bars,
        ticks=ticks,
        verdicts=tuple(
            Verdict(
                names=f"{pair.first} and {pair.second}",
                text=text,
                hint=pair.hint,
                strong=bool(pair.is_significant),
            )
            for pair, text in zip(comparison.pairs, describe_pairs(comparison.pairs), strict=True)
        ),
        charts=tuple(charts),
        curves=make_curve_rows(comparison.curves),
        differences=comparison.differences,
        code=comparison.code,
        notes=comparison.notes,
        made=f"Created on {date(made_at)} by labctl {labctl}".strip(),
    )


def _headline(comparison: ComparisonResult) -> str:
    """Say in a few words what the comparison found."""
    number_of_runs = len(comparison.runs)
    tested = [pair for pair in comparison.pairs if pair.test]
    if not tested:
        return f"{number_of_runs} runs side by side"
    wins = Counter(better for pair in tested if (better := pair.better))
    if not wins:
        return f"No significant difference between {number_of_runs} runs"
    best, won = wins.most_common(1)[0]
    if won == number_of_runs - 1:
        return f"Run {best} is better" if number_of_runs == 2 else f"Run {best} is the best"
    return f"{sum(wins.values())} of {len(tested)} differences are significant"


def make_run_row(run: ComparedRun) -> RunRow:
    """Return a run's figures as text."""
    interval = NOT_MEASURED
    if run.low is not None and run.high is not None:
        interval = f"{bare_percent(run.low)} to {percent(run.high)}"
    items = NOT_MEASURED
    if run.correct is not None and run.items is not None:
        items = f"{run.correct:,} of {run.items:,} on {run.split}"
    return RunRow(
        label=run.label,
        run=run.run,
        state=run.state,
        accuracy=percent(run.accuracy),
        interval=interval,
        items=items,
        time=span(run.took_s),
        cost=dollars(run.cost_usd),
    )


def make_curve_rows(curves: Sequence[CurveValues]) -> tuple[CurveRow, ...]:
    """Return the rows of the curves that have a best value."""
    return tuple(
        _make_curve_row(curve) for curve in curves if any(step is not None for step in curve.steps)
    )


def _make_curve_row(curve: CurveValues) -> CurveRow:
    """Return the best value of each run's curve, and its step."""
    name = f"{curve.data} {curve.name}".strip().replace("_", " ")
    values = []
    for best, step in zip(curve.best, curve.steps, strict=True):
        if best is None or step is None:
            values.append("-")
            continue
        value = percent(best) if curve.is_share else number(best)
        values.append(f"{value} at step {step:,}")
    return CurveRow(name=name, values=tuple(values))


def _draw_intervals(
    runs: Sequence[ComparedRun],
) -> tuple[tuple[IntervalBar, ...], tuple[Tick, ...]]:
    """Place the intervals on one axis that begins and ends near them."""
    ends = [end for run in runs for end in (run.low, run.high) if end is not None]
    axis = choose_axis(ends) if ends else None
    if axis is None:
        return (), ()
    bars = tuple(
        IntervalBar(
            label=run.label,
            run=run.run,
            value=percent(run.accuracy),
            point=axis.position_of(run.accuracy),
            low=axis.position_of(run.low),
            high=axis.position_of(run.high),
        )
        for run in runs
        if run.accuracy is not None and run.low is not None and run.high is not None
    )
    ticks = tuple(Tick(at=axis.position_of(v), text=percent(v, 0)) for v in axis.ticks)
    return bars, ticks
