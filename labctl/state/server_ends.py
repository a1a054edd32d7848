"""How the ledger records that a server has ended, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labctl.state import LedgerEntry, State

# Kind of the ledger entry with the reason of an end that was recorded as "gone" without one.
EXPLAINED = "end explained"
KINDS = ("terminated", "gone", EXPLAINED)


def list_ends(state: State, lab_id: str) -> list[LedgerEntry]:
    """Return the ends of a lab's servers, the last one last; `detail["why"]` is the reason."""
    lines = [line for kind in KINDS for line in state.list_events(lab_id=lab_id, kind=kind)]
    return sorted(lines, key=lambda line: line.number)


def find_end_reason(state: State, server_id: str) -> str | None:
    """Return why a server ended, "" if that is unknown; None if no end is on record."""
    ends = [line for line in state.list_events(server_id=server_id) if line.kind in KINDS]
    if not ends:
        return None
    reasons = [str(line.detail.get("why") or "") for line in ends]
    return next((reason for reason in reversed(reasons) if reason), "")
