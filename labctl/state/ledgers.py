"""The ledgers of two machines about one lab, made one: each line is taken over exactly once.

A line is known by the ledger that it was first written in and its number there. What a line says of
when it was written is kept as "at" in its detail.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from labctl.model import Value
from labctl.state import LedgerEntry, State

HANDED = "handed"
BACK = "taken-back"
# Kinds that concern the machine alone that wrote them.
OWN = (HANDED, BACK, "attempt", "watch")
SOURCE, NUMBER, AT = "from", "number", "at"


class Line(Value, frozen=True):
    """One line of some ledger. `ledger` and `number` are those of its first home."""

    ledger: str
    number: int
    at: float
    kind: str
    server_id: str = ""
    run_id: str = ""
    detail: dict[str, Any] = msgspec.field(default_factory=dict)


def lines(state: State, lab_id: str) -> list[Line]:
    """All that this machine knows of a lab, whoever wrote it, the oldest first."""
    found = state.events(lab_id=lab_id)
    own = _name(found)
    return sorted(
        (_line(entry, own) for entry in found if entry.kind not in OWN), key=lambda one: one.at
    )


def take_over(state: State, lab_id: str, told: Iterable[Line]) -> int:
    """Write down what is not known here yet; how many lines that were."""
    with state.exclusive(f"{lab_id}-ledger", "taking over a ledger"):
        known = {(one.ledger, one.number) for one in lines(state, lab_id)}
        news = [one for one in told if (one.ledger, one.number) not in known]
        for one in news:
            origin = {SOURCE: one.ledger, NUMBER: one.number, AT: one.detail.get(AT, one.at)}
            state.record(
                one.kind,
                lab_id=lab_id,
                server_id=one.server_id,
                run_id=one.run_id,
                detail={**one.detail, **origin},
            )
        return len(news)


def _line(entry: LedgerEntry, own: str) -> Line:
    detail = dict(entry.detail)
    return Line(
        ledger=str(detail.pop(SOURCE, own)),
        number=int(detail.pop(NUMBER, entry.number)),
        at=float(detail.get(AT) or entry.at),
        kind=entry.kind,
        server_id=entry.server_id,
        run_id=entry.run_id,
        detail=detail,
    )


def _name(found: list[LedgerEntry]) -> str:
    """This ledger's own name: when its first line about the lab was written. Lines only follow."""
    return next((f"{entry.at:.6f}" for entry in found if SOURCE not in entry.detail), "")
