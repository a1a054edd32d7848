"""The metric of a trial, from progress and from curves, and its steps for the pruner."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from labctl.lifecycle.sweeps.costs import SweepCost, describe_exhausted_budget, measure_union_s
from labctl.lifecycle.sweeps.metric import (
    MOST_REPORTS,
    StepSeries,
    as_number,
    describe_names,
    find_step,
    read_last_progress,
    read_progress,
)


@pytest.mark.parametrize(
    ("progress", "step"),
    [
        ({"epoch": 3, "step": 70}, 3),
        ({"step": 70, "total_steps": 200}, 35),
        ({"step": 70}, 70),
        ({"step": 70, "total_steps": 0}, 70),
        ({"loss": 1.0}, None),
        ({"epoch": -1.0}, None),
        ({"epoch": math.inf}, None),
        ({"step": 1e300, "total_steps": 1e-300}, None),
    ],
)
def test_the_step_is_one_that_other_trials_have(progress: dict[str, float], step: int) -> None:
    assert find_step(progress) == step


def test_a_metric_that_is_missing_is_told_apart_from_one_without_a_step() -> None:
    assert read_progress({"loss": 2.0, "epoch": 1}, "loss").points == ((1, 2.0),)
    assert read_progress({"loss": 2.0}, "loss").points == ()
    assert read_progress({"loss": 2.0}, "loss").last == 2.0
    missing = read_progress({"los": 2.0, "epoch": 1}, "loss")
    assert (missing.last, missing.names) == (None, ("los", "epoch"))
    assert describe_names("loss", missing.names) == "did you mean los? It reports: epoch, los"
    assert "it reports none" in describe_names("loss", ())
    many = describe_names("loss", [f"m{n}" for n in range(1000)])
    assert many.endswith("and 980 more")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("NaN", math.nan),
        ("Infinity", math.inf),
        ("1e400", math.inf),
        (f"1{'0' * 400}", math.inf),
        ("1e200", 1e200),
        ('"0.5"', None),
        ("[1]", None),
        ("null", None),
        ("true", None),
    ],
)
def test_what_the_agent_does_not_report_is_read_from_the_file(
    tmp_path: Path, text: str, number: float | None
) -> None:
    (tmp_path / "progress.json").write_text(f'{{"loss": {text}}}')
    read = as_number(read_last_progress(tmp_path, "loss"))
    assert read == pytest.approx(number, nan_ok=True)
    assert read_last_progress(tmp_path, "los") is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_damaged_progress_has_no_metric(tmp_path: Path, content: bytes) -> None:
    assert read_last_progress(tmp_path, "loss") is None
    (tmp_path / "progress.json").write_bytes(content)
    assert read_last_progress(tmp_path, "loss") is None


def test_steps_that_no_check_saw_have_the_value_before_them() -> None:
    series = StepSeries(None)
    assert series.add_progress([(1, 0.5)]) == []
    assert series.add_progress([(1, 0.4)]) == []
    assert series.add_progress([(4, 0.2)]) == [(1, 0.4), (2, 0.4), (3, 0.4)]
    assert series.add_progress([(3, 9.0)]) == []
    assert series.add_progress([(5, math.nan)]) == [(4, 0.2)]
    assert series.finish() == []
    again = StepSeries(3)
    assert again.add_progress([(4, 0.2), (5, 0.1)]) == [(4, 0.2)]
    assert again.finish() == [(5, 0.1)]
    assert again.finish() == []


def test_a_curve_counts_every_step_once() -> None:
    series = StepSeries(None)
    assert series.add_curve([(0, 3.0), (10, 2.0)]) == [(0, 3.0), (10, 2.0)]
    assert series.add_curve([(0, 3.0), (10, 2.0), (20, math.inf), (30, 1.0)]) == [(30, 1.0)]


def test_no_run_fills_the_study() -> None:
    series = StepSeries(None)
    assert len(series.add_curve((n, 1.0) for n in range(10 * MOST_REPORTS))) == MOST_REPORTS
    jump = StepSeries(None)
    jump.add_progress([(1, 1.0)])
    assert jump.add_progress([(10**12, 1.0)]) == [(1, 1.0)]


def test_trials_side_by_side_share_the_price() -> None:
    assert measure_union_s([(0, 10), (5, 20), (30, 40), (31, 35)]) == 30
    assert measure_union_s([]) == 0


@pytest.mark.parametrize(
    ("spent", "dearest", "running", "is_over"),
    [(0.0, 0.0, 3, False), (1.0, 0.5, 0, False), (1.0, 0.5, 3, True), (2.0, 0.1, 0, True)],
)
def test_no_trial_starts_that_may_exceed_the_budget(
    spent: float, dearest: float, running: int, is_over: bool
) -> None:
    cost = SweepCost(spent_usd=spent, dearest_usd=dearest, is_free=False)
    assert bool(describe_exhausted_budget(cost, 2.0, running)) == is_over
