"""The provider that `labctl up --provider` chose, for later commands of the lab without it."""

from __future__ import annotations

from labctl.config import LabConfig
from labctl.servers.context import LabContext
from labctl.state import State

EVENT = "provider chosen"
FLAG = "--provider"
# Kind of the ledger entry of a run that another server may resume.
RECOVERABLE = "recoverable"
# Runs that ended by themselves or were canceled: no server resumes them.
ENDED_STATES = ("exited", "cancelled")


def note_choice(context: LabContext) -> None:
    """Record that the flag chose the provider, before a server can exist there."""
    name = context.provider.name
    is_chosen = context.config.origins.get("server.provider") == FLAG
    if is_chosen and _read_last_choice(context.state, context.lab_id) != name:
        context.state.record(EVENT, lab_id=context.lab_id, detail={"provider": name})


def find_choice(state: State, lab_id: str, config: LabConfig) -> str:
    """Return the chosen provider while the lab has, or may have, a server there; else "".

    It also stays chosen while the lab's latest run may be recovered on another server. It is "" if
    `config` selects that provider, or if a flag or a variable selects another one.
    """
    choice = _read_last_choice(state, lab_id)
    is_selected = config.origins.get("server.provider", "").startswith(("--", "LABCTL_"))
    if not choice or choice == config.server.provider or is_selected:
        return ""
    server = state.get_lab_server(lab_id)
    places = [server] if server else state.list_open_attempts(lab_id)
    if not places:
        return choice if _can_recover_latest_run(state, lab_id) else ""
    return choice if any(place.provider == choice for place in places) else ""


def _can_recover_latest_run(state: State, lab_id: str) -> bool:
    run = state.get_latest_run(lab_id)
    if run is None or run.state in ENDED_STATES:
        return False
    return bool(state.list_events(lab_id=lab_id, run_id=run.id, kind=RECOVERABLE, limit=1))


def _read_last_choice(state: State, lab_id: str) -> str:
    events = state.list_events(lab_id=lab_id, kind=EVENT, limit=1)
    return str(events[0].detail["provider"]) if events else ""
