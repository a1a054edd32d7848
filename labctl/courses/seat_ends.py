"""Why a seat's last server ended, from the ledger, or is stopped, from its watchdog's report."""

from __future__ import annotations

import time

from labctl.courses.metering import WATCHDOG_WORDS
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.ledger_servers import is_unseen_end
from labctl.servers.watch_reports import parse_watch
from labctl.state import State
from labctl.wire.keeper import SeatEndRecord

LIFE = ("up", "down")
FOUND_GONE = "the keeper found it gone: its own limits, the provider or staff ended it"
ENDED_BY_STAFF = "the course's staff ended it"
STOPPED = "it is stopped, and labctl up starts it again"


def describe_end(folder: CourseFolder, seat: Seat) -> SeatEndRecord | None:
    """Return why the seat's last server ended; None if it has one, or never had one."""
    lines = [entry for entry in folder.ledger.list_entries(seat=seat.name) if entry.kind in LIFE]
    if not lines or lines[-1].kind == "up":
        return None
    last = lines[-1]
    why = FOUND_GONE if is_unseen_end(last) else last.why or ENDED_BY_STAFF
    reason = str(last.detail.get("reason") or why)
    return SeatEndRecord(last.at, reason, str(last.detail.get("saved", "")))


def describe_stop(state: State, server_id: str) -> SeatEndRecord | None:
    """Return why a server is stopped that still has its disk; None if it never reported."""
    for line in state.list_events(server_id=server_id, kind="watch", limit=1):
        report = parse_watch(line.detail.get("watch"))
        limit = report.ending if report else ""
        if report and report.ends_in_s is not None and line.at + report.ends_in_s <= time.time():
            limit = limit or report.ends_by
        return SeatEndRecord(
            line.at, "; ".join(filter(None, [WATCHDOG_WORDS.get(limit, ""), STOPPED]))
        )
    return None
