"""The last reports of servers' watchdogs, as far as staff is shown them."""

from __future__ import annotations

import msgspec

from labctl.decoding import convert_value
from labctl.model import Value
from labctl.state import LedgerEntry


class WatchReport(Value, frozen=True):
    """A watchdog's report. Numbers are None for what was not reported; `busy` names activities."""

    alive: bool = False
    ttl_left_s: int | float | None = None
    idle_for_s: int | float | None = None
    busy: tuple[str, ...] | None = ()
    gpu_percent: int | float | None = None


class DatedWatchReport(Value, frozen=True):
    """A report, and when it arrived."""

    watch: WatchReport
    at: float


def read_report(event: LedgerEntry) -> DatedWatchReport:
    """Return the report in a recorded event of the kind "watch".

    It is not trusted: a student who is root on the server may forge it. One of another shape says
    nothing but that it arrived.
    """
    try:
        watch = convert_value(event.detail.get("watch") or {}, WatchReport)
    except msgspec.ValidationError:
        watch = WatchReport()
    return DatedWatchReport(watch=watch, at=event.at)
