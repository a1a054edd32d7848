"""From a run's first steps to its whole time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.estimate.pace import LEAST_MARGIN, StepCount, compute_pace, predict_time

BEGIN = StepCount(100.0, 0.0)


def points(*stretches: tuple[float, float], first: StepCount = BEGIN) -> list[StepCount]:
    """(seconds, steps) one after another."""
    found = [first]
    for seconds, steps in stretches:
        found.append(StepCount(found[-1].at + seconds, found[-1].step + steps))
    return found


def test_an_even_run_is_its_pace_and_a_margin() -> None:
    found = compute_pace(points(*[(1.0, 20.0)] * 10), started_at=97.0)
    assert found is not None
    assert found.seconds_per_step == pytest.approx(0.05)
    assert found.low_seconds_per_step == pytest.approx(0.05 * (1 - LEAST_MARGIN))
    assert found.high_seconds_per_step == pytest.approx(0.05 * (1 + LEAST_MARGIN))
    assert (found.steps, found.warm_up_steps, found.stretches) == (180, 20, 9)
    assert found.start_s == pytest.approx(3.0)
    assert predict_time(found, 1000).seconds == pytest.approx(3 + 50)


def test_the_warm_up_is_dropped_and_what_it_cost_is_kept() -> None:
    slow = [(8.0, 10.0), (4.0, 10.0), (2.0, 10.0)]
    found = compute_pace(points(*slow, *[(1.0, 10.0)] * 10), started_at=95.0)
    assert found is not None
    assert found.seconds_per_step == pytest.approx(0.1)
    assert found.warm_up_steps == 30
    assert found.start_s == pytest.approx(5 + 14 - 30 * 0.1)


def test_a_run_that_is_slow_for_long_is_slow() -> None:
    """Half of it at the most is warm-up."""
    found = compute_pace(points(*[(3.0, 10.0)] * 12, *[(1.0, 10.0)] * 4), started_at=100.0)
    assert found is not None
    assert found.warm_up_steps <= 80
    assert found.seconds_per_step > 0.15


def test_pauses_widen_the_range_and_count_in_the_mean() -> None:
    """Every fourth stretch has a checkpoint in it."""
    stretches = [(1.0, 10.0), (1.0, 10.0), (1.0, 10.0), (3.0, 10.0)] * 4
    found = compute_pace(points(*stretches), started_at=100.0)
    assert found is not None
    assert found.seconds_per_step == pytest.approx(0.15, rel=0.05)
    assert found.low_seconds_per_step == pytest.approx(0.1)
    assert found.high_seconds_per_step > 0.18
    times = predict_time(found, 100)
    assert times.low_s < times.seconds < times.high_s


@pytest.mark.parametrize(
    "seen",
    [
        [],
        [StepCount(1.0, 1.0)],
        points(*[(1.0, 10.0)] * 5),
        points(*[(0.1, 10.0)] * 30),
        [StepCount(float(n), 5.0) for n in range(50)],
    ],
)
def test_too_little_is_told_as_nothing(seen: list[StepCount]) -> None:
    assert compute_pace(seen, started_at=0.0) is None


def test_a_run_that_went_back_begins_anew() -> None:
    before = points(*[(9.0, 1.0)] * 10)
    after = points(*[(1.0, 10.0)] * 10, first=StepCount(before[-1].at + 5, 3.0))
    found = compute_pace([*before, *after], started_at=100.0)
    assert found is not None
    assert found.seconds_per_step == pytest.approx(0.1)


@given(st.lists(st.tuples(st.floats(0.01, 1e4), st.floats(0.5, 1e4)), max_size=40))
def test_the_mean_lies_in_the_range_whatever_the_stretches(
    stretches: list[tuple[float, float]],
) -> None:
    found = compute_pace(points(*stretches), started_at=100.0)
    if found is not None:
        assert 0 < found.low_seconds_per_step < found.seconds_per_step
        assert found.seconds_per_step < found.high_seconds_per_step
        assert found.start_s >= 0
