"""The watchdog's clocks: pure, so that every hour of a server can be tried in no time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.agent.watchdog.decisions import (
    MOST_EARLY,
    WARN_AT_S,
    Budget,
    carry_elapsed_s,
    decide,
    estimate_wind_down_s,
    explain_refusal,
    limit_budget,
    limits_text,
    list_clocks,
    should_restart_ttl,
)
from labctl.wire.text import duration_text
from labctl.wire.watchdog import ElapsedTimeRecord, ServerLimits

HOUR = 3600.0
SPANS = st.floats(min_value=0.0, max_value=1e6)
MAYBE = st.none() | st.floats(min_value=1.0, max_value=1e6)
LIMITS = st.builds(
    ServerLimits,
    ttl_s=MAYBE,
    idle_s=MAYBE,
    budget_usd=st.none() | st.floats(min_value=0.0, max_value=1e3),
    price_usd_per_hour=st.just(0.0) | st.floats(min_value=0.01, max_value=100.0),
    ceiling_s=MAYBE,
    extended_s=SPANS,
    from_s=SPANS,
    held_until_s=SPANS,
    stopped_s=SPANS,
)


@pytest.mark.parametrize(
    ("limits", "is_due"),
    [
        (ServerLimits(ttl_s=12 * HOUR), True),
        (ServerLimits(budget_usd=12.0, price_usd_per_hour=1.0), True),
        (ServerLimits(ttl_s=1.5 * HOUR), False),
    ],
)
def test_a_long_limit_warns_an_hour_ahead(limits: ServerLimits, is_due: bool) -> None:
    latest_s = limits.latest_s
    assert latest_s is not None
    assert decide(limits, latest_s - HOUR - 60, 0.0, 0.0, {}).warn_s is None
    assert (decide(limits, latest_s - HOUR, 0.0, 0.0, {}).warn_s == HOUR) is is_due


def test_no_limit_never_ends() -> None:
    assert decide(ServerLimits(), 1e9, 1e9, 60.0, {}) == ("", None, False, None, {})


@pytest.mark.parametrize(
    ("limits", "elapsed_s", "idle_for_s", "ends_by"),
    [
        (ServerLimits(ttl_s=HOUR), HOUR, 0.0, "ttl"),
        (ServerLimits(idle_s=60.0), HOUR, 60.0, "idle"),
        (ServerLimits(budget_usd=1.0, price_usd_per_hour=2.0), HOUR / 2, 0.0, "budget"),
        (ServerLimits(ceiling_s=HOUR), HOUR, 0.0, "ttl"),
        (ServerLimits(ttl_s=HOUR, idle_s=60.0), 120.0, 60.0, "idle"),
        (ServerLimits(ttl_s=HOUR, extended_s=9 * HOUR, ceiling_s=2 * HOUR), 2 * HOUR, 0.0, "ttl"),
    ],
)
def test_each_limit_ends_it(
    limits: ServerLimits, elapsed_s: float, idle_for_s: float, ends_by: str
) -> None:
    ended = decide(limits, elapsed_s, idle_for_s, 0.0, {})
    assert (ended.ends_by, ended.end) == (ends_by, True)
    before = decide(limits, elapsed_s - 1, max(0.0, idle_for_s - 1), 0.0, {})
    assert not before.end


def test_a_free_server_has_no_budget_to_spend() -> None:
    assert not list_clocks(ServerLimits(budget_usd=1.0), 1e9, 0.0, 0.0)


def test_work_stops_the_idle_clock() -> None:
    assert decide(ServerLimits(idle_s=60.0), 1e6, 0.0, 0.0, {}).ends_by == ""


def test_an_extension_holds_idleness_off() -> None:
    held = ServerLimits(idle_s=60.0, held_until_s=1000.0)
    assert not decide(held, 500.0, 400.0, 0.0, {}).end
    assert decide(held, 1000.0, 900.0, 0.0, {}).end


@given(LIMITS, SPANS, SPANS, SPANS)
def test_the_wind_down_is_over_at_the_limit(
    limits: ServerLimits, elapsed_s: float, idle_for_s: float, wind_down: float
) -> None:
    for clock in list_clocks(limits, elapsed_s, idle_for_s, wind_down).values():
        early = clock.left_s - clock.ends_in_s
        assert early >= -1e-6
        if clock.name == "idle":
            assert early == 0.0
        else:
            assert early == pytest.approx(min(wind_down, clock.limit_s * MOST_EARLY), abs=0.01)


@given(LIMITS, st.lists(st.floats(min_value=0.1, max_value=500.0), max_size=60))
def test_every_warning_comes_once_and_before_the_end(
    limits: ServerLimits, steps: list[float]
) -> None:
    elapsed, warned, said = 0.0, {}, []
    decision = decide(limits, 0.0, 0.0, 0.0, {})
    for step in steps:
        elapsed += step
        decision = decide(limits, elapsed, 0.0, 0.0, warned)
        warned = decision.warned
        if decision.warn_s is not None:
            said.append((decision.ends_by, decision.warn_s))
        if decision.end:
            assert decision.warn_s is None
            break
    for name in ("ttl", "budget"):
        lefts = [left for by, left in said if by == name]
        assert len(lefts) <= len(WARN_AT_S)
        assert lefts == sorted(lefts, reverse=True)


def walked(limits: ServerLimits, upto_s: float, step_s: float = 5.0) -> list[tuple[float, float]]:
    """(elapsed, left) of each warning of a server that nobody idles on."""
    found, warned, elapsed = [], {}, 0.0
    while elapsed <= upto_s:
        decision = decide(limits, elapsed, 0.0, 0.0, warned)
        warned = decision.warned
        if decision.warn_s is not None:
            found.append((elapsed, decision.warn_s))
        elapsed += step_s
    return found


def test_warnings_at_15_5_and_1_minutes() -> None:
    assert walked(ServerLimits(ttl_s=HOUR), HOUR) == [
        (2700.0, 900.0),
        (3300.0, 300.0),
        (3540.0, 60.0),
    ]


def test_a_short_life_is_warned_of_once_at_its_start() -> None:
    assert walked(ServerLimits(ttl_s=20.0), 20.0) == [(0.0, 20.0)]


def test_an_extension_makes_warnings_due_again() -> None:
    first = decide(ServerLimits(ttl_s=HOUR), HOUR - 50, 0.0, 0.0, {})
    assert first.warn_s == 50
    more = ServerLimits(ttl_s=HOUR, extended_s=HOUR)
    after = decide(more, HOUR - 49, 0.0, 0.0, first.warned)
    assert (after.warn_s, after.warned) == (None, {"ttl": ()})
    again = decide(more, 2 * HOUR - 50, 0.0, 0.0, after.warned)
    assert again.warn_s == 50


def test_a_pause_warns_only_in_its_second_half() -> None:
    limits = ServerLimits(idle_s=600.0)
    assert decide(limits, HOUR, 10.0, 0.0, {}).warn_s is None
    assert decide(limits, HOUR, 301.0, 0.0, {}).warn_s == 299.0
    assert decide(ServerLimits(idle_s=10.0), HOUR, 6.0, 0.0, {}).warn_s == 4.0


def test_work_makes_the_idle_warning_due_again() -> None:
    limits = ServerLimits(idle_s=600.0)
    warned = decide(limits, HOUR, 350.0, 0.0, {}).warned
    assert decide(limits, HOUR, 360.0, 0.0, warned).warn_s is None
    warned = decide(limits, HOUR, 0.0, 0.0, warned).warned
    assert decide(limits, HOUR, 350.0, 0.0, warned).warn_s == 250.0


@pytest.mark.parametrize(
    ("limits", "span_s", "said"),
    [
        (ServerLimits(ttl_s=HOUR), 1e9, ""),
        (ServerLimits(idle_s=60.0), 1e9, ""),
        (ServerLimits(ttl_s=HOUR, ceiling_s=2 * HOUR), HOUR, ""),
        (ServerLimits(ttl_s=HOUR, ceiling_s=2 * HOUR), HOUR + 60, "ceiling"),
        (ServerLimits(ttl_s=HOUR, extended_s=HOUR, ceiling_s=2 * HOUR), 60, "at most 0 s"),
        (ServerLimits(ttl_s=HOUR, budget_usd=3.0, price_usd_per_hour=2.0), HOUR, "at most 30 min"),
    ],
)
def test_extensions_stay_inside(limits: ServerLimits, span_s: float, said: str) -> None:
    why = explain_refusal(limits, span_s)
    assert (said in why) if said else why == ""


@given(LIMITS, SPANS)
def test_no_extension_that_is_allowed_passes_the_ceiling(
    limits: ServerLimits, span_s: float
) -> None:
    if explain_refusal(limits, span_s):
        return
    after = limits._replace(extended_s=limits.extended_s + span_s)
    ends = after.deadline_s
    if ends is None or limits.ttl_s is None:
        return
    if limits.ceiling_s is not None:
        assert ends <= limits.from_s + limits.ceiling_s + 1.0
    if limits.budget_end_s is not None:
        assert ends <= limits.budget_end_s + 1.0


AGE = ElapsedTimeRecord("a", boottime_s=100.0, wall_s=1000.0, elapsed_s=50.0)


@pytest.mark.parametrize(
    ("boot", "boottime_s", "wall_s", "elapsed_s"),
    [
        ("a", 160.0, 1000.0, 110.0),
        ("a", 160.0, 0.0, 110.0),
        ("b", 5.0, 1600.0, 650.0),
        ("b", 5.0, 900.0, 50.0),
        ("a", 90.0, 1000.0, 50.0),
    ],
)
def test_time_is_carried(boot: str, boottime_s: float, wall_s: float, elapsed_s: float) -> None:
    assert carry_elapsed_s(AGE, boot, boottime_s, wall_s) == elapsed_s


@given(st.text(max_size=1), SPANS, SPANS)
def test_time_never_goes_back(boot: str, boottime_s: float, wall_s: float) -> None:
    assert carry_elapsed_s(AGE, boot, boottime_s, wall_s) >= 50.0


def test_who_was_off_at_the_deadline_begins_anew() -> None:
    limits = ServerLimits(ttl_s=HOUR)
    assert should_restart_ttl(limits, HOUR + 1, False)
    assert should_restart_ttl(limits, HOUR - 30, True)
    assert not should_restart_ttl(limits, HOUR - 30, False)
    assert not should_restart_ttl(ServerLimits(idle_s=1.0), 1e9, True)
    later = ServerLimits(ttl_s=HOUR, from_s=5 * HOUR)
    assert not decide(later, 5.5 * HOUR, 0.0, 0.0, {}).end
    assert decide(later, 6 * HOUR, 0.0, 0.0, {}).end


@pytest.mark.parametrize(
    ("previous", "requested", "left"),
    [
        (Budget(None, None), Budget(5.0, None), 5.0),
        (Budget(2.0, 5.0), Budget(None, None), None),
        # The ledger is lost: nothing is believed to be spent elsewhere.
        (Budget(2.0, 5.0), Budget(5.0, 5.0), 2.0),
        # More was spent elsewhere meanwhile.
        (Budget(2.0, 5.0), Budget(1.0, 5.0), 1.0),
        # lab.yaml gives more now.
        (Budget(2.0, 5.0), Budget(8.0, 8.0), 5.0),
    ],
)
def test_a_lost_ledger_gives_no_second_budget(
    previous: Budget, requested: Budget, left: float | None
) -> None:
    assert limit_budget(previous, requested) == left


def test_the_wind_down_is_as_long_as_what_is_to_be_sent() -> None:
    assert estimate_wind_down_s(60.0, 1e9, 1e7, True) == pytest.approx(163.0)
    assert estimate_wind_down_s(60.0, 1e9, 1e7, False) == pytest.approx(63.0)
    assert estimate_wind_down_s(60.0, 1e9, 1e7, True, saver_s=240.0) == pytest.approx(403.0)


def test_words_for_people() -> None:
    assert [duration_text(s) for s in (-3, 45, 119, 720, 3600, 5400, 90000, 260_000)] == [
        "0 s",
        "45 s",
        "119 s",
        "12 min",
        "1 h",
        "1 h 30 min",
        "25 h",
        "3 d",
    ]
    assert limits_text(ServerLimits()) == "none"
    told = limits_text(
        ServerLimits(ttl_s=HOUR, idle_s=600.0, budget_usd=5.0, price_usd_per_hour=0.5)
    )
    assert told == "ttl 1 h, idle 10 min, budget $5.00 at $0.50/h"
