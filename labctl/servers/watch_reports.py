"""Reports of watchdogs as they were recorded or passed on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labctl.lazy import lazy_imports
from labctl.wire.codec import MessageError, from_json

if TYPE_CHECKING:
    from labctl.wire.watchdog import WatchRecord

with lazy_imports(__name__):
    from labctl.wire import watchdog


def parse_watch(report: object) -> WatchRecord | None:
    """Convert a report; None for {} or null, and for one that is not a report.

    A server on which somebody else is root may have reported anything.
    """
    try:
        return from_json(watchdog.WatchRecord, report) if report else None
    except MessageError:
        return None
