"""Start a failed run again on all of its servers, from its newest checkpoint.

The first part writes the checkpoints. The servers share no file system, so labctl copies them to
the others, which all read the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from labctl.errors import BusyError, LabError
from labctl.events import report_wait
from labctl.lifecycle import gang, gang_runs, recover, restore, up
from labctl.lifecycle.recovery_wait import report_activity
from labctl.lifecycle.restore import RunTree, SavedRun
from labctl.lifecycle.server_loss import (
    DEAD_S,
    FailedChecks,
    ServerGoneError,
    require_alive,
    require_not_removed,
)
from labctl.lifecycle.spending_policy import make_recovery_context
from labctl.model import Run, Server
from labctl.retry import poll_until
from labctl.runs import images, outputs, runs
from labctl.servers import adoption
from labctl.servers.connections import is_reachable
from labctl.servers.context import LabContext
from labctl.sync import lab_files
from labctl.sync.transfer_lock import share_transfers
from labctl.text import names_text
from labctl.wire.runs import RESUME_RUN, GangMember, ResumeRunReply, ResumeRunRequest, RunSpec

ANSWER_S, POLL_S = 5.0, 5.0
# Until then, a server that its provider calls running has answered, or counts as dead, unless it
# may hold the only copy of results.
CONCLUSION_S = DEAD_S + 120.0


class Restart(NamedTuple):
    """A started attempt: the part of rank 0, the byte of its log at which the gap is marked, and
    the step of the checkpoint that it resumes from, None without one.
    """

    run: Run
    log_offset: int = 0
    step: float | None = None


class RestartAbandonedError(LabError):
    """The run was canceled, or its lab is no longer kept, before its restart began."""


def make_silence_error(names: Sequence[str], run_id: str) -> BusyError:
    """Return the error that these servers neither answer nor are gone."""
    verb = "does" if len(names) == 1 else "do"
    return BusyError(
        f"{names_text(names, 5)} {verb} not answer",
        why=f"{run_id} starts again when every server answers, or is gone at its provider",
        hint=f"labctl cancel {run_id}   # instead, to give it up\nlabctl down",
    )


def restart(
    context: LabContext,
    run_id: str,
    reason: str,
    *,
    recovers: bool,
    is_abandoned: Callable[[], bool] = lambda: False,
) -> Restart:
    """Start the run's next attempt on all servers.

    With `recovers`, servers that are gone are replaced within the agreed price. Safe to repeat.
    BusyError if another process starts the run again, or if a server neither answers nor is gone;
    RestartAbandonedError if `is_abandoned` while this waits for that; ServerRemovedError if the
    user has removed a server; PolicyError if it was recovered in vain too often.
    """
    with context.state.lock(f"{context.lab_id}-restart", f"restart {run_id}", wait_s=0.0):
        members = gang.build_members(context, gang_runs.count_parts(context, run_id))
        if recovers:
            recover.require_progress(context, run_id)
            _require_not_removed(members)
            _await_conclusion(context, members, run_id, is_abandoned)
            _require_not_removed(members)
            up.up(make_recovery_context(context, run_id))
        # Parts that still run, perhaps on a server that was silent, belong to the attempt before.
        gang_runs.end_parts(members, run_id, reason)
        saved = _save_first_part(members[0], run_id)
        with share_transfers():
            tree = restore.build_tree(members[0], run_id)
            gang.call_for_each(members[1:], lambda one: _provide_files(one, saved, tree))
        specs = {one.lab_id: _make_spec(one, saved.spec) for one in members}
        replies: dict[str, ResumeRunReply] = {}

        def resume(
            one: LabContext, server: Server, spec: RunSpec, member: GangMember
        ) -> GangMember:
            reply = replies[one.lab_id] = _resume(one, server, spec, member, reason)
            return reply.member or member

        run = gang_runs.start_parts(members, specs, resume)
        first = replies[members[0].lab_id]
        return Restart(run, first.offset, first.step)


def _require_not_removed(members: Sequence[LabContext]) -> None:
    """ServerRemovedError if `labctl down` has removed one of the servers."""
    for one in members:
        require_not_removed(one, one.state.get_lab_server(one.lab_id))


def _await_conclusion(
    context: LabContext,
    members: Sequence[LabContext],
    run_id: str,
    is_abandoned: Callable[[], bool],
) -> None:
    """Wait until each server either answers or is gone: a silent one still bills, and has files."""
    checks = FailedChecks()
    silent = [one.config.name for one in members]

    def is_concluded(one: LabContext) -> bool:
        server = adoption.adopt(one)
        # A stopped one is started by `up`.
        if server is None or server.state == "stopped" or is_reachable(server.endpoint, ANSWER_S):
            return True
        try:
            require_alive(one, server, checks)
        except ServerGoneError:
            return True
        return False

    def are_concluded() -> bool:
        if is_abandoned():
            raise RestartAbandonedError(f"{run_id} does not start again")
        silent[:] = [one.config.name for one in members if not is_concluded(one)]
        return not silent

    name = "waiting until every server answers or is gone"
    with report_wait(context.reporter, name), report_activity(context, name, CONCLUSION_S):
        if not poll_until(are_concluded, pause_s=POLL_S, deadline_s=CONCLUSION_S):
            raise make_silence_error(silent, run_id)


def _save_first_part(first: LabContext, run_id: str) -> SavedRun:
    """Bring the outputs of the first part here; put them on its server if that is a new one."""
    server, saved = first.get_server(), restore.read_saved_run(first, run_id)
    if runs.fetch_run(first, server, run_id) is None:
        restore.restore(first, server, run_id)
        lab_files.push_data(first, server)
    outputs.pull(first, server, [run_id])
    return saved


def _provide_files(context: LabContext, saved: SavedRun, tree: RunTree) -> None:
    """Give another server the checkpoints of the first part, and the code if it is new."""
    server, run_id = context.get_server(), saved.spec.id
    is_new = runs.fetch_run(context, server, run_id) is None
    if is_new:
        lab_files.push_data(context, server)
    kinds = ("checkpoints/", "code/") if is_new else ("checkpoints/",)
    files = tuple(file for file in tree.files if file.path.startswith(kinds))
    part = msgspec.structs.replace(saved, spec=_make_spec(context, saved.spec))
    chosen = RunTree(root=tree.root, files=files, index=tree.index)
    restore.send_tree(context, server, part, chosen, completes=True)


def _make_spec(context: LabContext, spec: RunSpec) -> RunSpec:
    """Return the spec of the first part for another server, which is a lab of its own there."""
    return spec._replace(lab=context.config.name, lab_id=context.lab_id)


def _resume(
    context: LabContext, server: Server, spec: RunSpec, member: GangMember, reason: str
) -> ResumeRunReply:
    remote = context.open_agent(server)
    secrets = runs.read_secrets(context)
    request = ResumeRunRequest(spec, secrets, f"{reason}; starting again", member)
    for _ in range(2):
        reply = remote.call(RESUME_RUN, request)
        if reply.run is not None:
            runs.record_run(context, server, reply.run)
            return reply
        images.ensure_image(context, server, remote, spec.image, of_run=spec.id)
    raise runs.make_missing_image_error(spec.image)
