"""Reports of watchdogs on students' servers, which their root may forge."""

from __future__ import annotations

import pytest

from labctl.courses.watch_reports import HeardReport, WatchReport, read_report
from labctl.state import LedgerEntry


def heard(detail: dict[str, object]) -> HeardReport:
    return read_report(LedgerEntry(number=1, at=5.0, kind="watch", detail=detail))


def test_a_report_is_read_as_far_as_staff_is_shown_it() -> None:
    watch = {"alive": True, "ttl_left_s": 60, "idle_for_s": 1.5, "busy": ["a run"], "pid": 7}
    assert heard({"watch": watch, "idle_share": None}) == HeardReport(
        watch=WatchReport(alive=True, ttl_left_s=60, idle_for_s=1.5, busy=("a run",)), at=5.0
    )


@pytest.mark.parametrize(
    "watch", [None, {}, [1], "x", {"ttl_left_s": "soon"}, {"busy": {"a": 1}}, {"alive": 1}]
)
def test_a_forged_report_stops_nothing(watch: object) -> None:
    assert heard({"watch": watch}) == HeardReport(watch=WatchReport(), at=5.0)


def test_a_report_without_an_end_is_one() -> None:
    nothing = {"alive": False, "ttl_left_s": None, "idle_for_s": None, "busy": None}
    assert heard({"watch": nothing}).watch == WatchReport(busy=None)
