"""The lab's other runs that are active on the server when a run starts or is canceled."""

from __future__ import annotations

from labctl.events import Note
from labctl.model import Server
from labctl.runs import runs
from labctl.servers.context import LabContext
from labctl.text import names_text
from labctl.wire.runs import STATUS, StatusRequest

MOST_NAMED = 3


def note_active_runs(context: LabContext, server: Server, run_id: str) -> None:
    """Say which other runs of the lab are active on the server, before the run `run_id` starts."""
    if names := list_active_runs(context, server, run_id):
        context.reporter.emit(Note(text=_describe_active_runs(names)))


def list_active_runs(context: LabContext, server: Server, run_id: str) -> list[str]:
    """List the lab's active runs on the server except `run_id`, the newest first.

    The server is queried only if this machine's records have such a run: a query is one more round
    trip.
    """
    recorded = [
        run.id
        for run in context.state.list_runs(context.lab_id)
        if run.server_id == server.id and run.id != run_id and not run.has_ended
    ]
    if not recorded:
        return []
    request = StatusRequest(context.config.name, context.lab_id, tuple(recorded))
    reply = context.open_agent(server).call(STATUS, request)
    for record in reply.runs:
        runs.record_run(context, server, record)
    # A claimed run has no container: its start may have failed.
    active = {record.id for record in reply.runs if record.state in ("starting", "running")}
    return [name for name in reversed(recorded) if name in active]


def describe_remaining_runs(names: list[str]) -> str:
    """Describe the runs that are still active after a run was canceled."""
    runs_are = "run {} is" if len(names) == 1 else "runs {} are"
    still = runs_are.format(names_text(names, MOST_NAMED))
    return f"{still} still running; to stop {names[0]}: labctl cancel {names[0]}"


def _describe_active_runs(names: list[str]) -> str:
    runs_are, them = ("run {} is", "it") if len(names) == 1 else ("runs {} are", "them")
    still = runs_are.format(names_text(names, MOST_NAMED))
    newest = names[0]
    return (
        f"{still} still running on this server; this run starts beside {them}. "
        f"To follow {newest}: labctl logs -f {newest}; to stop it: labctl cancel {newest}"
    )
