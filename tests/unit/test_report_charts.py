"""Charts: where lines, ticks and labels go, and what cannot be drawn is said."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_facts import facts, sample, series

from labctl.insight.report.charts import (
    LABEL_GAP,
    MOST_POINTS,
    Chart,
    Curve,
    choose_axis,
    draw_chart,
    reduce_points,
    split_at_gaps,
)
from labctl.insight.report.curves import MOST_CHARTS, draw_logged, draw_telemetry
from labctl.insight.scalars import Scalars

NAN, INFINITY = math.nan, math.inf


def one(*ys: float | None, **options: object) -> Chart:
    curve = Curve(label="", xs=tuple(float(x) for x in range(len(ys))), ys=ys)
    return draw_chart("loss", "Loss", [curve], **options)  # type: ignore[arg-type]


def places(drawn: Chart) -> list[float]:
    """Every coordinate of every path, in percent."""
    return [
        float(number) / 10 for line in drawn.lines for number in re.findall(r"[\d.]+", line.path)
    ]


def test_a_line_goes_through_its_points() -> None:
    drawn = one(0.0, 2.0, 4.0)
    assert [tick.text for tick in drawn.y_ticks] == ["0", "1", "2", "3", "4"]
    assert [tick.at for tick in drawn.y_ticks] == [100, 75, 50, 25, 0]
    assert drawn.lines[0].path == "M0.0 1000.0 L500.0 500.0 L1000.0 0.0"
    assert drawn.lines[0].value == "4"


def test_what_is_no_number_interrupts_the_line_and_is_counted() -> None:
    drawn = one(1.0, NAN, 2.0, 3.0, INFINITY, -INFINITY)
    assert drawn.lines[0].path.count("M") == 2
    assert "3 of 6 values are NaN or infinite" in drawn.note


@pytest.mark.parametrize("ys", [(NAN,), (NAN, INFINITY, NAN), (-1.7e308, 1.7e308), ()])
def test_a_curve_of_nothing_that_can_be_drawn_says_so(ys: tuple[float, ...]) -> None:
    drawn = one(*ys)
    assert drawn.lines == ()
    assert drawn.note == "all values are NaN or infinite"
    assert drawn.alt == "Loss: all values are NaN or infinite."


@settings(max_examples=60)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40))
def test_whatever_was_logged_is_drawn_inside_of_the_plot(ys: list[float]) -> None:
    drawn = one(*ys)
    assert all(-0.01 <= place <= 100.01 for place in places(drawn))
    assert all(-0.01 <= tick.at <= 100.01 for tick in (*drawn.x_ticks, *drawn.y_ticks))
    assert len(drawn.y_ticks) <= 12


def test_a_figure_that_never_changes_is_a_line_in_the_middle() -> None:
    assert choose_axis([3.0, 3.0]) is not None
    assert 50.0 in places(one(5.0, 5.0, 5.0))
    assert one(0.0).lines[0].dots


def test_shares_are_told_in_percent_and_their_axis_reaches_100() -> None:
    drawn = one(0.5, 0.996, share=True, high=1.0)
    assert (drawn.unit, drawn.y_ticks[-1].text, drawn.lines[0].value) == ("%", "100", "99.6%")


def test_the_alternative_text_says_the_curve() -> None:
    said = one(2.0, 0.5, 0.7).alt
    assert said.startswith("Loss.")
    for part in ("from 2 at step\u00a00", "to 0.7 at step\u00a02", "lowest 0.5 at step\u00a01"):
        assert part in said


def test_labels_at_the_end_never_lie_on_each_other() -> None:
    curves = [
        Curve(label=str(place), xs=(0.0, 1.0), ys=(0.0, 1 - place / 1000)) for place in range(4)
    ]
    at = sorted(line.label_at for line in draw_chart("x", "X", curves).lines)
    assert all(b - a >= LABEL_GAP - 1e-9 for a, b in itertools.pairwise(at))
    assert at[0] >= 0
    assert at[-1] <= 98


def test_the_chosen_step_is_marked_where_the_line_is() -> None:
    drawn = one(0.0, 2.0, 4.0, mark=(1.0, "chosen"))
    assert drawn.mark is not None
    assert (drawn.mark.at, drawn.mark.dot) == (50.0, (50.0, 50.0))
    assert one(0.0, 2.0, mark=(7.0, "chosen")).mark is None


def test_many_points_keep_their_peaks() -> None:
    points = [(float(x), 0.0) for x in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    kept = reduce_points(points)
    assert len(kept) <= MOST_POINTS + 2
    assert (54_321.0, 9.0) in kept
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])


def test_more_lines_than_can_be_told_apart_are_counted() -> None:
    curves = [Curve(label=str(n), xs=(0.0, 1.0), ys=(0.0, 1.0)) for n in range(7)]
    drawn = draw_chart("x", "X", curves)
    assert len(drawn.lines) == 4
    assert "3 more lines" in drawn.note


def test_training_and_validation_share_a_chart_and_the_accent_is_the_validations() -> None:
    charts, left = draw_logged(facts())
    assert [one.title for one in charts] == ["Accuracy", "Loss"]
    loss = charts[1]
    assert [(line.label, line.style) for line in loss.lines] == [("validation", 0), ("training", 1)]
    assert (charts[0].unit, loss.unit, left) == ("%", "", "")
    assert loss.mark is not None
    assert loss.mark.text == "chosen, step\u00a030"


@pytest.mark.parametrize("tag", ["heldout/loss", "loss/valLoss", "dev_loss"])
def test_a_curve_of_held_out_data_is_known_by_any_of_its_names(tag: str) -> None:
    found = Scalars(series=(series(tag, 2, 1), series("train/accuracy", 0.5, 0.6)))
    labels = {line.label for one in draw_logged(facts(scalars=found))[0] for line in one.lines}
    assert labels == {"validation", "training"}


def test_kerass_names_too() -> None:
    found = Scalars(
        series=(series("train/epoch_loss", 2, 1), series("validation/epoch_loss", 2, 1.5))
    )
    (only,), _ = draw_logged(facts(scalars=found))
    assert {line.label for line in only.lines} == {"training", "validation"}


def test_an_accuracy_of_more_than_one_is_no_share() -> None:
    (only,), _ = draw_logged(facts(scalars=Scalars(series=(series("val/accuracy", 50, 98),))))
    assert only.unit == ""


def test_a_setting_is_told_and_not_drawn() -> None:
    found = (
        series("batch_size", 32.0),
        series("train/loss", 2.0, 1.0),
        series("val/accuracy", 0.5),
    )
    charts, told = draw_logged(facts(scalars=Scalars(series=found)))
    assert [one.title for one in charts] == ["Accuracy", "Loss"]
    assert told == "Logged once: batch size\u00a032."


def test_a_thousand_figures_are_a_dozen_charts() -> None:
    many = Scalars(series=tuple(series(f"layer-{n}/norm{n}", 1.0, 2.0) for n in range(1000)))
    charts, left = draw_logged(facts(scalars=many))
    assert len(charts) == MOST_CHARTS
    assert left == "988\u00a0more logged values are not drawn."


def test_what_was_measured_has_gaps_where_nobody_measured() -> None:
    times = [0, 10, 20, 30, 700, 710, 720]
    charts = {one.name: one for one in draw_telemetry([sample(at) for at in times])}
    assert set(charts) == {"gpu-use", "gpu-memory", "gpu-power", "cpu", "memory"}
    assert charts["gpu-use"].lines[0].path.count("M") == 2
    assert charts["gpu-use"].x_title == "minutes"


def test_a_recovered_runs_attempts_are_parted() -> None:
    samples = [sample(10 * n, attempt=1 + n // 3) for n in range(6)]
    assert draw_telemetry(samples)[0].lines[0].path.count("M") == 2


def test_too_few_samples_are_no_chart() -> None:
    assert draw_telemetry([sample(0), sample(10)]) == ()


def test_stretches_of_nothing() -> None:
    assert split_at_gaps(Curve(label="", xs=(1.0, 2.0), ys=(None, None))) == []
