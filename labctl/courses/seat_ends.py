"""Why a seat's last server ended, from the ledger."""

from __future__ import annotations

from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.ledger_servers import is_unseen_end
from labctl.wire.keeper import SeatEndRecord

LIFE = ("up", "down")
FOUND_GONE = "the keeper found it gone: its own limits, the provider or staff ended it"
ENDED_BY_STAFF = "the course's staff ended it"


def describe_end(folder: CourseFolder, seat: Seat) -> SeatEndRecord | None:
    """Return why the seat's last server ended; None if it has one, or never had one."""
    lines = [entry for entry in folder.ledger.list_entries(seat=seat.name) if entry.kind in LIFE]
    if not lines or lines[-1].kind == "up":
        return None
    last = lines[-1]
    why = FOUND_GONE if is_unseen_end(last) else last.why or ENDED_BY_STAFF
    reason = str(last.detail.get("reason") or why)
    return SeatEndRecord(last.at, reason, str(last.detail.get("saved", "")))
