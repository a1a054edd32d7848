"""The last known state of a seat, as the command line and the dashboard both show it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.model import Run, Server

# time for which a refused request is shown as a problem
REFUSAL_S = 12 * 3600.0
# lines after which a refusal is no longer a problem: a server was created, or the budget changed
SOLVED_BY = ("up", "budget")
# time without a report from its watchdog after which nothing is known of a server
SILENT_S = 900.0


def find_open_refusal(
    entries: Iterable[CourseLedgerEntry], server: Server | None, now: float
) -> str:
    """Return why the seat's last request was refused; "" if that is solved or long ago.

    `entries` are the lines of the seat and its students, the oldest first. A seat that has a server
    has no such problem.
    """
    if server is not None and server.state in ("starting", "running"):
        return ""
    kinds = (*SOLVED_BY, "refused")
    last = next((line for line in reversed(list(entries)) if line.kind in kinds), None)
    if last is None or last.kind != "refused" or last.at < now - REFUSAL_S:
        return ""
    return last.why or str(last.detail.get("error", "")) or "refused"


def is_silent(server: Server, heard_at: float | None, now: float) -> bool:
    """Tell whether the last report of a server that should run is too old to believe."""
    return server.state == "running" and heard_at is not None and now - heard_at > SILENT_S


def mark_lost(run: Run, server: Server | None) -> Run:
    """Return the run as lost if it had not ended when its server did; `server` is None if gone."""
    if run.has_ended or (server is not None and server.state not in ("stopped", "terminated")):
        return run
    return msgspec.structs.replace(run, state="lost", summary="its server has ended")
