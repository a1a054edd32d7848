"""The probes of a lab that labctl stopped because they had measured enough.

The server only knows that they were canceled, as by a person.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labctl.model import Run
    from labctl.state import State

# Kind of the ledger entry of such a probe.
MEASURED = "probe measured"


def record_measured(state: State, run: Run) -> None:
    state.record(MEASURED, lab_id=run.lab_id, server_id=run.server_id, run_id=run.id)


def list_measured(state: State, lab_id: str) -> tuple[str, ...]:
    """List the ids of these runs, the oldest first."""
    return tuple(entry.run_id for entry in state.list_events(lab_id=lab_id, kind=MEASURED))
