"""Recover a run whose server is lost: get another server, restore the saved files, resume.

The saved files are in the lab's store or, without one, in what `pull --follow` copied here. A run
that ended by itself is never recovered: another server would not help it.
"""

from __future__ import annotations

import contextlib
import time

import msgspec

from labctl.errors import (
    ConnectError,
    HostKeyError,
    NotFoundError,
    PolicyError,
)
from labctl.events import Step
from labctl.lifecycle import restore, up
from labctl.lifecycle.recovery_lock import RecoveryLock, RecoveryLockedError, hold_recovery_lock
from labctl.lifecycle.server_loss import (
    FailedChecks,
    ServerGoneError,
    require_alive,
    save_and_terminate,
)
from labctl.lifecycle.spending_policy import make_recovery_context
from labctl.model import Run, Server, Value
from labctl.runs import images, runs
from labctl.servers import adoption
from labctl.servers.context import LabContext
from labctl.servers.open_costs import explain_open_costs
from labctl.servers.provider_choice import use_recorded_provider
from labctl.sync import lab_files
from labctl.wire.runs import RESUME_RUN, ResumeRunReply, ResumeRunRequest, RunRecord, RunSpec

# consecutive recoveries of one run from the same checkpoint, at most
MOST_IN_VAIN = 5
# States in which a run can be in need of recovery. "unknown" is in the store's copy if its server
# could not ask its Docker Engine.
UNFINISHED = ("claimed", "starting", "running", "lost", "unknown")


class EndedError(PolicyError):
    """The run ended by itself, perhaps on a server that another process created for it."""

    def __init__(self, run: Run) -> None:
        super().__init__(
            f"run {run.id} ended by itself and is not recovered",
            why=run.summary,
            hint=f"labctl logs {run.id}",
        )
        self.run = run


class Recovery(Value, frozen=True):
    """One recovery. Steps are the run's own, None if it reports none; `took_s` is wall-clock time.

    `from_step` is the step of the checkpoint that the run resumes from. `log_offset` is the byte
    of the run's log at which the gap is marked.
    """

    run: Run
    server_id: str
    last_step: float | None
    from_step: float | None
    took_s: float
    files: int = 0
    log_offset: int = 0
    reason: str = msgspec.field(default="", name="told")


def check_and_recover(
    context: LabContext, run_id: str, silences: FailedChecks | None = None, *, wait: bool = False
) -> Run:
    """Check a run once, and recover it if its server is gone and no one else recovers it.

    Returns the run's state then. A run whose server cannot be reached stays as last seen, until
    `silences`, passed from check to check, shows that the server is dead. With `wait`, this waits
    for another watcher's recovery, and takes over from a watcher that has died.
    """
    known = runs.find_run(context, run_id)
    context = use_recorded_provider(context)
    server = context.state.get_lab_server(context.lab_id)
    if server is None or not server.endpoint.host:
        server = adoption.adopt(context)
    try:
        if server is None:
            raise ServerGoneError("the lab no longer has a server")
        known = _refresh_run(context, server, run_id)
        if known.state != "lost" or known.stopped_by:
            return known
        reason = known.summary
    except ServerGoneError as error:
        reason = error.what
    except (ConnectError, HostKeyError) as error:
        try:
            if server is not None:
                require_alive(context, server, silences or FailedChecks())
                # A cloud gives the address of an ended server to another machine.
                if isinstance(error, HostKeyError) and not runs.has_moved(context, server):
                    raise
            return known
        except ServerGoneError as gone:
            reason = gone.what
    with contextlib.suppress(RecoveryLockedError):
        return recover(context, run_id, reason=reason, wait=wait).run
    return runs.find_run(context, run_id)


def _refresh_run(context: LabContext, server: Server, run_id: str) -> Run:
    """Record the run's state on the server; ServerGoneError if the server does not have the run."""
    record = runs.fetch_run(context, server, run_id)
    if record is None:
        raise ServerGoneError(f"the server {server.id} does not have this run")
    return runs.record_run(context, server, record)


def recover(
    context: LabContext, run_id: str, *, reason: str = "its server was lost", wait: bool = True
) -> Recovery:
    """Resume the run on the lab's server or a new one. Repeated, it finds the run active.

    PolicyError if the run ended by itself, or made no progress in MOST_IN_VAIN recoveries;
    NotFoundError if nothing of it was saved; RecoveryLockedError if a keeper recovers it, or,
    without `wait`, if another watcher does so now.
    """
    started_s = time.monotonic()
    with hold_recovery_lock(context, run_id, wait=wait) as lock:
        # A move may have held the lock, and taken the lab to another provider.
        context = use_recorded_provider(context)
        recorded = context.state.get_run(context.lab_id, run_id)
        last_step = recorded.progress.get("step") if recorded else None
        _require_not_moving(context, recorded)
        # Check first: for a run that cannot resume, no server is created or ended.
        require_progress(context, run_id)
        _require_unfinished(context, run_id, restore.read_saved_run(context, run_id).run)
        save_and_terminate(context, run_id)
        lock.renew()
        server = up.up(make_recovery_context(context, run_id))
        context = use_recorded_provider(context)
        spec, files = _restore_run(context, server, run_id)
        # The new server may lack a directory that the lab's data is in, and costs money already.
        with explain_open_costs(context, (NotFoundError, PolicyError)):
            lab_files.push_data(context, server)
        context.reporter.emit(Step(name=f"resuming {run_id}"))
        reply, resumed = resume_run(context, server, spec, reason, lock)
        run = runs.record_run(context, server, resumed)
        recovery = Recovery(
            run=run,
            server_id=server.id,
            last_step=last_step,
            from_step=reply.step,
            took_s=time.monotonic() - started_s,
            files=files,
            log_offset=reply.offset,
            reason=reason,
        )
        context.reporter.emit(Step(name=f"resuming {run_id}", done=True, detail=server.id))
        if not reply.found:
            record_recovery(context, recovery)
    return recovery


def _require_not_moving(context: LabContext, run: Run | None) -> None:
    """RecoveryLockedError if an interrupted move has resumed the run on its new server."""
    server = context.state.get_lab_server(context.lab_id, "next")
    if run is not None and server is not None and run.server_id == server.id:
        raise RecoveryLockedError(
            f"run {run.id} is on the new server of an unfinished move",
            why="the lab's own server is still the old one",
            hint="labctl move   # completes the move",
        )


def record_recovery(context: LabContext, recovery: Recovery) -> None:
    """Write a recovery, or the move of a run, to the ledger."""
    detail = {
        "told": recovery.reason,
        "took_s": recovery.took_s,
        "last_step": recovery.last_step,
        "step": recovery.from_step,
        "files": recovery.files,
    }
    context.state.record(
        "recovered",
        lab_id=context.lab_id,
        server_id=recovery.server_id,
        run_id=recovery.run.id,
        detail=detail,
    )


def require_progress(context: LabContext, run_id: str) -> None:
    """PolicyError if the last MOST_IN_VAIN recoveries all resumed from the same step."""
    recoveries = context.state.list_events(
        lab_id=context.lab_id, run_id=run_id, kind="recovered", limit=MOST_IN_VAIN
    )
    steps = {event.detail.get("step") for event in recoveries}
    if len(recoveries) == MOST_IN_VAIN and len(steps) == 1:
        (step,) = steps
        start = "its beginning" if step is None else f"step {step:.0f}"
        raise PolicyError(
            f"run {run_id} is not recovered again",
            why=f"it resumed from {start} {MOST_IN_VAIN} times without saving a later checkpoint",
            hint=f"labctl logs {run_id}   # does it write checkpoints often enough?",
        )


def resume_run(
    context: LabContext, server: Server, spec: RunSpec, reason: str, lock: RecoveryLock
) -> tuple[ResumeRunReply, RunRecord]:
    """Start the next attempt exactly once; return the reply, and its run."""
    remote = context.open_agent(server)
    secrets = runs.read_secrets(context)
    request = ResumeRunRequest(spec, secrets, reason=f"{reason}; resuming here")
    for _ in range(2):
        lock.renew()
        reply = remote.call(RESUME_RUN, request)
        if reply.run is not None:
            return reply, reply.run
        images.ensure_image(context, server, remote, spec.image, of_run=spec.id)
    raise runs.make_missing_image_error(spec.image)


def _restore_run(context: LabContext, server: Server, run_id: str) -> tuple[RunSpec, int]:
    """Restore the run's directory unless the server has it; return (spec, files restored)."""
    record = runs.fetch_run(context, server, run_id)
    saved = restore.read_saved_run(context, run_id)
    _require_unfinished(context, run_id, record or saved.run)
    return saved.spec, 0 if record else restore.restore(context, server, run_id)


def _require_unfinished(context: LabContext, run_id: str, record: RunRecord | None) -> None:
    """EndedError if the record says that the run ended by itself; records that end."""
    if record is None or record.state in UNFINISHED:
        return
    known = context.state.get_run(context.lab_id, run_id)
    record = record._replace(lab_id=record.lab_id or context.lab_id)
    run = runs.to_run(record, known.server_id if known else "")
    context.state.save_run(run)
    raise EndedError(run)


def is_unfinished(context: LabContext, run_id: str) -> bool:
    """Whether this run started, has not ended by itself, and is not on the lab's current server."""
    recorded = context.state.get_run(context.lab_id, run_id)
    server = context.state.get_lab_server(context.lab_id)
    if recorded is not None and (
        recorded.state not in UNFINISHED or (server and recorded.server_id == server.id)
    ):
        return False
    try:
        saved = restore.read_saved_run(context, run_id)
    except NotFoundError:
        return False
    return saved.run is None or saved.run.state in UNFINISHED
