"""Cancel a run, also one that its server has already taken along."""

from __future__ import annotations

from contextlib import suppress

from labctl.errors import LabError, NotFoundError
from labctl.events import Note
from labctl.lifecycle import gang, gang_keeper, gang_runs
from labctl.lifecycle.fleet import run_for_each
from labctl.lifecycle.recovery_lock import find_keeper
from labctl.model import Run, Server
from labctl.runs import runs
from labctl.runs.active_runs import describe_remaining_runs
from labctl.servers import accounts, adoption
from labctl.servers.context import LabContext
from labctl.wire.runs import STATUS, StatusRequest


def cancel(context: LabContext, run_id: str, grace_s: int) -> tuple[Run, bool]:
    """Cancel a run, "" for the latest; return it, and whether it had ended before.

    A run whose server has ended counts as ended, although its record may not say so.
    """
    run = runs.find_run(context, run_id)
    if (count := gang_runs.count_parts(context, run.id)) > 1:
        members = gang.build_members(context, count)
        if keeper := find_keeper(context, run.id):
            gang_keeper.note_cancel(context, keeper, run.id)
            # Where the provider does not answer, the servers on record are tried.
            run_for_each(members, adoption.adopt)
        return gang_runs.cancel(members, run.id, grace_s)
    current = context.state.get_lab_server(context.lab_id)
    # The server does not know a run that ended on an earlier one; a lost run may have moved here.
    is_final = run.has_ended and run.state != "lost"
    if is_final and not (current and current.id == run.server_id):
        return run, True
    try:
        return runs.cancel(context, context.get_server(), run.id, grace_s)
    except NotFoundError:
        if not _has_lost_server(context, run):
            raise
        return run, True


def note_remaining_runs(context: LabContext, canceled: Run) -> None:
    """Say which runs of the lab are still active on the server of the run that was canceled."""
    server = context.state.get_server(canceled.server_id)
    if server is None:
        return
    # The run is canceled, whether or not the server replies again.
    with suppress(LabError):
        if names := _list_active_runs(context, server):
            context.reporter.emit(Note(text=describe_remaining_runs(names)))


def _list_active_runs(context: LabContext, server: Server) -> list[str]:
    """List the lab's active runs on the server, the newest first.

    The server is queried only if this machine's records have such a run: a query is one more round
    trip.
    """
    recorded = [
        run.id
        for run in context.state.list_runs(context.lab_id)
        if run.server_id == server.id and not run.has_ended
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


def _has_lost_server(context: LabContext, run: Run) -> bool:
    """Whether the run's server has ended, and no keeper can have moved the run to another one."""
    forgotten = context.state.list_events(server_id=run.server_id, kind=accounts.FORGOTTEN, limit=1)
    is_recorded = context.state.get_server(run.server_id) is not None
    return not (is_recorded or forgotten or find_keeper(context))
