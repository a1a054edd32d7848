"""The page of a sweep: ranges have a numeric axis, choices a place for each."""

from __future__ import annotations

from labctl.config.sweep import Parameter
from labctl.insight.report.charts import Chart
from labctl.lifecycle.sweeps.page import SweepPage, build_page
from labctl.lifecycle.sweeps.plan import SweepPlan
from labctl.lifecycle.sweeps.study import Importances
from labctl.lifecycle.sweeps.trials import Trial


def build(parameter: Parameter, *tried: str) -> SweepPage:
    plan = SweepPlan(
        study="sweep", space={"x": parameter}, metric="loss", direction="minimize",
        command=("python", "train.py"), trials=8, parallel=0, budget_usd=None, sampler="tpe",
        seed=3, pruner="median", startup=2, warmup=0,
    )  # fmt: skip
    trials = [
        Trial(number=number, state="complete", params={"x": text}, value=1.0 + number)
        for number, text in enumerate(tried)
    ]
    return build_page("lab", plan, trials, Importances(why="none"), "1.0")


def draw(parameter: Parameter, *tried: str) -> Chart:
    (chart,) = build(parameter, *tried).charts
    return chart


def list_ticks(chart: Chart) -> list[tuple[str, float]]:
    return [(tick.text, round(tick.at, 1)) for tick in chart.x_ticks]


def test_choices_that_are_numbers_are_at_equal_distances_as_typed() -> None:
    rates = Parameter(kind="choice", values=("0.1", "1e-4", "0.001", "0.01"))
    chart = draw(rates, "0.1", "1e-4", "0.01")
    assert list_ticks(chart) == [("0.1", 12.5), ("1e-4", 37.5), ("0.001", 62.5), ("0.01", 87.5)]
    assert [round(x, 1) for x, _ in chart.lines[0].dots] == [12.5, 37.5, 87.5]
    assert "from 1 at 0.1 to 3 at 0.01" in chart.alt


def test_choices_that_are_words_are_drawn_too() -> None:
    long = "a-very-long-name-of-an-activation-function-of-somebody"
    chart = draw(Parameter(kind="choice", values=("relu", long)), "relu", long, "nan")
    (first, _), (second, _) = list_ticks(chart)
    assert first == "relu"
    assert second == "a-very-long-name-of-an-acti…"
    assert len(chart.lines[0].dots) == 2, "nan is none of the choices"


def test_of_many_choices_some_are_named_and_all_are_drawn() -> None:
    values = tuple(str(1000 * number) for number in range(100))
    chart = draw(Parameter(kind="choice", values=values), *values)
    assert [tick.text for tick in chart.x_ticks] == [values[at] for at in range(0, 100, 13)]
    assert len(chart.lines[0].dots) == 100
    lead = build(Parameter(kind="choice", values=values), *values).lead
    assert "Tried: x: 0, 1000, 2000, " in lead
    assert "9000, and 90 more." in lead


def test_a_range_has_a_numeric_axis() -> None:
    chart = draw(Parameter(kind="int", low=1, high=64), "1", "64", "32")
    assert [tick.text for tick in chart.x_ticks] == ["0", "20", "40", "60"]
    logarithmic = draw(Parameter(kind="float", low=1e-4, high=1.0, log=True), "0.0001", "1.0")
    assert logarithmic.x_title == "log10"
    assert list_ticks(logarithmic)[0] == ("\N{MINUS SIGN}4", 0.0)
