"""Reports of watchdogs as they were recorded or passed on."""

from __future__ import annotations

from labctl.wire.codec import MessageError, from_json
from labctl.wire.watchdog import WatchRecord


def parse_watch(report: object) -> WatchRecord | None:
    """Convert a report; None for {} or null, and for one that is not a report.

    A server on which somebody else is root may have reported anything.
    """
    try:
        return from_json(WatchRecord, report) if report else None
    except MessageError:
        return None
