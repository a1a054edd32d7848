"""The results of a sweep as one HTML file, in the style of the report."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from labctl.config.sweep import Parameter
from labctl.errors import LabError
from labctl.insight.report.charts import Chart, Curve, draw_chart
from labctl.insight.report.formatting import number, percent, span
from labctl.insight.report.render import render
from labctl.lifecycle.sweeps.plan import SweepPlan, shorten_number
from labctl.lifecycle.sweeps.study import Importances
from labctl.lifecycle.sweeps.trials import Trial, find_best
from labctl.model import Value

TEMPLATE = "sweep.html.j2"
MOST_CHARTS = 12
MOST_ROWS = 500
# choices of a parameter in the first sentences of the page
MOST_VALUES = 10


class ImportanceRow(Value, frozen=True):
    """A parameter, its share of 1 as a text, and the width of its bar in percent."""

    name: str
    share: str
    width: float


class TrialLine(Value, frozen=True):
    """A trial as texts; `cells` are the values of the parameters."""

    number: int
    state: str
    value: str
    cells: tuple[str, ...]
    took: str
    run: str
    why: str
    is_best: bool = False


class SweepPage(Value, frozen=True):
    lab: str
    study: str
    figure: str
    headline: str
    lead: str
    command: str
    history: Chart
    importances: tuple[ImportanceRow, ...]
    importance_note: str
    charts: tuple[Chart, ...]
    charts_note: str
    names: tuple[str, ...]
    metric: str
    rows: tuple[TrialLine, ...]
    rows_note: str
    labctl: str


def build_page(
    lab: str, plan: SweepPlan, trials: Sequence[Trial], importances: Importances, version: str
) -> SweepPage:
    """Build the page of `trials`, which are sorted best first."""
    best = find_best(trials, plan.direction)
    names = tuple(plan.space)
    shares = importances.shares
    order = sorted(names, key=lambda name: -shares.get(name, 0.0))
    return SweepPage(
        lab=lab,
        study=plan.study,
        figure="" if best is None or best.value is None else number(best.value),
        headline=f"{plan.metric} of trial {best.number}" if best else "No trial is complete yet",
        lead=_describe_trials(plan, trials),
        command=f"labctl run --from-trial {plan.study}:{best.number}" if best else "",
        history=_draw_history(plan, trials),
        importances=tuple(
            ImportanceRow(name=name, share=percent(share), width=min(100.0, max(0.0, share * 100)))
            for name, share in sorted(shares.items(), key=lambda item: -item[1])
        ),
        importance_note=importances.why or f"Computed by {importances.evaluator}.",
        charts=tuple(
            chart
            for name in order[:MOST_CHARTS]
            if (chart := _draw_parameter(name, plan, trials)) is not None
        ),
        charts_note=f"The first {MOST_CHARTS} parameters." if len(names) > MOST_CHARTS else "",
        names=names,
        metric=plan.metric,
        rows=tuple(_make_line(one, names, best) for one in trials[:MOST_ROWS]),
        rows_note=f"The first {MOST_ROWS} of {len(trials)} trials."
        if len(trials) > MOST_ROWS
        else "",
        labctl=version,
    )


def _describe_trials(plan: SweepPlan, trials: Sequence[Trial]) -> str:
    states = Counter(trial.state_text for trial in trials)
    order = ("complete", "pruned", "running", "failed")
    first = [state for state in order if state in states]
    counts = [f"{states[state]} {state}" for state in dict.fromkeys([*first, *states])]
    space = "; ".join(f"{name}: {_describe_values(one)}" for name, one in plan.space.items())
    text = f"{len(trials)} of {plan.trials} trials ({', '.join(counts) or 'none'})"
    return f"{text}, to {plan.direction} {plan.metric}. Tried: {space}."


def _describe_values(parameter: Parameter) -> str:
    if parameter.kind != "choice":
        return parameter.text
    shown, left = parameter.values[:MOST_VALUES], parameter.values[MOST_VALUES:]
    return ", ".join([*shown, *([f"and {len(left)} more"] if left else [])])


def _draw_history(plan: SweepPlan, trials: Sequence[Trial]) -> Chart:
    """Draw the value of each complete trial, and the best until then."""
    complete = [
        (float(trial.number), trial.value)
        for trial in sorted(trials, key=lambda trial: trial.number)
        if trial.state == "complete" and trial.value is not None
    ]
    choose = max if plan.direction == "maximize" else min
    best: list[float] = []
    for _, value in complete:
        best.append(choose([*best[-1:], value]))
    curves = []
    if complete:
        xs = tuple(x for x, _ in complete)
        curves = [
            Curve(label="best", xs=xs, ys=tuple(best)),
            _make_dots("", [(x, value) for x, value in complete]),
        ]
    return draw_chart("history", plan.metric, curves, x_title="trial")


def _make_dots(label: str, points: Sequence[tuple[float, float]]) -> Curve:
    """Return a curve of dots alone: a gap after each interrupts its line."""
    xs = tuple(x for x, _ in points for _ in range(2))
    ys = tuple(y for _, value in points for y in (value, None))
    return Curve(label=label, xs=xs, ys=ys, main=False)


def _draw_parameter(name: str, plan: SweepPlan, trials: Sequence[Trial]) -> Chart | None:
    """Draw the metric over a parameter's values; None if no trial is complete.

    The axis of a range is numeric. Choices, also of numbers, are at equal distances as typed: the
    sampler knows neither an order nor a distance of them, and 0.001, 0.01, 0.1 would overlap.
    """
    parameter = plan.space[name]
    points = [
        (x, trial.value)
        for trial in trials
        if trial.state == "complete"
        and trial.value is not None
        and (x := _find_position(parameter, trial.params.get(name, ""))) is not None
    ]
    if not points:
        return None
    x_title = "log10" if parameter.log else ""
    curves = [_make_dots("", sorted(points))]
    names = parameter.values if parameter.kind == "choice" else ()
    return draw_chart(f"parameter {name}", name, curves, x_title=x_title, names=names)


def _find_position(parameter: Parameter, text: str) -> float | None:
    if parameter.kind == "choice":
        return float(parameter.values.index(text)) if text in parameter.values else None
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return math.log10(value) if parameter.log and value > 0 else value


def _make_line(trial: Trial, names: Sequence[str], best: Trial | None) -> TrialLine:
    return TrialLine(
        number=trial.number,
        state=trial.state_text,
        value="" if trial.value is None else number(trial.value),
        cells=tuple(shorten_number(trial.params.get(name, "")) for name in names),
        took=span(trial.seconds) if trial.seconds else "",
        run=trial.run,
        why=trial.why,
        is_best=best is not None and best.number == trial.number,
    )


def write_page(file: Path, page: SweepPage, templates: Path) -> None:
    """Write the page in one rename; LabError if the file cannot be written."""
    text = render(page, templates / "report", TEMPLATE)
    staging = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        staging.write_text(text, encoding="utf-8")
        staging.replace(file)
    except OSError as error:
        staging.unlink(missing_ok=True)
        raise LabError(f"{file} cannot be written", why=str(error)) from error
