"""Merge the ledgers of two machines about one lab: each line is imported exactly once.

A line is identified by the ledger that it was first written in and its number there. The time at
which it was written is kept as "at" in its detail.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from labctl.model import Value
from labctl.state import LedgerEntry, State

HANDED = "handed"
BACK = "taken-back"
# `labctl down` or `labctl orphans` is about to remove a server: nothing must replace it.
PUT_DOWN = "down"
# A user has canceled a run on several servers.
CANCELED = "parts canceled"
# This keeper has taken over a run on several servers: what was canceled earlier runs again.
KEPT = "parts kept"
# Kinds that concern only the machine that wrote them.
OWN = (HANDED, BACK, CANCELED, KEPT, "attempt", "watch")
SOURCE, NUMBER, AT = "from", "number", "at"


class LedgerLine(Value, frozen=True):
    """One line of a ledger. `ledger` and `number` say where it was first written."""

    ledger: str
    number: int
    at: float
    kind: str
    server_id: str = ""
    run_id: str = ""
    detail: dict[str, Any] = msgspec.field(default_factory=dict)


def list_lines(state: State, lab_id: str) -> list[LedgerLine]:
    """List the lines about a lab that this machine has, from any ledger, the oldest first."""
    entries = state.list_events(lab_id=lab_id)
    own = _find_own_name(entries)
    return sorted(
        (_parse_entry(entry, own) for entry in entries if entry.kind not in OWN),
        key=lambda line: line.at,
    )


def import_lines(state: State, lab_id: str, other_lines: Iterable[LedgerLine]) -> int:
    """Import the lines that are not on record here yet, and return their number.

    Lines of kinds that concern only their own machine are ignored, whatever another machine sends.
    """
    with state.lock(f"{lab_id}-ledger", "importing a ledger", is_command=False):
        recorded = {(line.ledger, line.number) for line in list_lines(state, lab_id)}
        new_lines = [
            line
            for line in other_lines
            if line.kind not in OWN and (line.ledger, line.number) not in recorded
        ]
        for line in new_lines:
            origin = {SOURCE: line.ledger, NUMBER: line.number, AT: line.detail.get(AT, line.at)}
            state.record(
                line.kind,
                lab_id=lab_id,
                server_id=line.server_id,
                run_id=line.run_id,
                detail={**line.detail, **origin},
            )
        return len(new_lines)


def _parse_entry(entry: LedgerEntry, own: str) -> LedgerLine:
    detail = dict(entry.detail)
    return LedgerLine(
        ledger=str(detail.pop(SOURCE, own)),
        number=int(detail.pop(NUMBER, entry.number)),
        at=float(detail.get(AT) or entry.at),
        kind=entry.kind,
        server_id=entry.server_id,
        run_id=entry.run_id,
        detail=detail,
    )


def _find_own_name(entries: list[LedgerEntry]) -> str:
    """Return this ledger's name: the time of its own first line about the lab, which stays."""
    return next((f"{entry.at:.6f}" for entry in entries if SOURCE not in entry.detail), "")
