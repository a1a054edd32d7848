"""Follow a run on several servers to its end, and start it again after a failure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from labctl.errors import LockHeldError
from labctl.events import Note
from labctl.lifecycle import gang, gang_restart
from labctl.lifecycle.gang_watch import GangWatch, PartFailure
from labctl.lifecycle.server_loss import ServerGoneError
from labctl.model import Run
from labctl.runs import runs
from labctl.servers.context import LabContext

# Kind of the ledger's line about a run that was started again on all of its servers.
RESTARTED = "restarted"
# seconds that a failure may take to be seen after the log of the first part has ended
SEEN_WITHIN_S = 30.0


def follow(
    context: LabContext,
    run_id: str,
    *,
    recovers: bool,
    on_log: Callable[[bytes], None],
    tail: int = 0,
) -> Run:
    """Follow the log of the first part until the run ends on all servers; return its outcome.

    After a failure the run starts again from its last checkpoint, as often as `restarts` under
    `launch:` says. With `recovers`, a lost server is replaced, which does not count as a restart.
    If another process follows a run of the lab, that one does all this, and this one only follows
    the log.
    """
    try:
        with context.state.lock(f"{context.lab_id}-watch", f"follow {run_id}", wait_s=0.0):
            return _follow_and_restart(context, run_id, recovers, on_log, tail)
    except LockHeldError as error:
        text = f"{error.what}; this one only shows the log"
        context.reporter.emit(Note(text=text))
        first = gang.build_members(context)[0]
        return runs.watch(first, first.get_server(), run_id, tail=tail, on_log=on_log)


def follow_log(
    context: LabContext, run_id: str, *, on_log: Callable[[bytes], None], tail: int = 0
) -> Run:
    """Do what `follow` does for a run that is active; show the log of one that has ended."""
    first = gang.build_members(context)[0]
    server = first.get_server()
    record = runs.fetch_run(first, server, run_id)
    if record is None or runs.record_run(first, server, record).has_ended:
        return runs.watch(first, server, run_id, tail=tail, on_log=on_log)
    return follow(context, run_id, recovers=False, on_log=on_log, tail=tail)


def _follow_and_restart(
    context: LabContext,
    run_id: str,
    recovers: bool,
    on_log: Callable[[bytes], None],
    tail: int,
) -> Run:
    members = gang.build_members(context)
    offset = 0
    while True:
        run, failure, offset = _follow_attempt(members, run_id, offset, tail, on_log)
        tail = 0
        if failure is None or failure.is_canceled:
            return run
        if not _can_restart(context, run_id, failure, recovers):
            return _save_failure(context, run, failure)
        context.reporter.emit(
            Note(text=f"{failure.reason}; starting {run_id} again", level="warning")
        )
        gang_restart.restart(context, run_id, failure.reason, recovers=recovers)
        kind = "recovered" if failure.is_lost else RESTARTED
        context.state.record(
            kind, lab_id=context.lab_id, run_id=run_id, detail={"told": failure.reason}
        )


def has_failed(run: Run) -> bool:
    """Whether a run on several servers ended by a failure, so that it can start again."""
    return run.has_ended and run.exit_code != 0 and run.state != "cancelled"


def _can_restart(context: LabContext, run_id: str, failure: PartFailure, recovers: bool) -> bool:
    if failure.is_lost:
        return recovers
    if failure.run is not None and failure.run.is_auxiliary:
        return False
    done = context.state.list_events(lab_id=context.lab_id, run_id=run_id, kind=RESTARTED)
    return len(done) < context.config.launch.restarts


def _follow_attempt(
    members: list[LabContext],
    run_id: str,
    offset: int,
    tail: int,
    on_log: Callable[[bytes], None],
) -> tuple[Run, PartFailure | None, int]:
    """Follow one attempt; return the first part, what failed, and where its log goes on (bytes)."""
    first, length = members[0], offset

    def count(block: bytes) -> None:
        nonlocal length
        length += len(block)
        on_log(block)

    silence_s = first.config.launch.silence_s
    with GangWatch(members, run_id, silence_s) as watch:
        try:
            run = runs.watch(
                first,
                first.get_server(),
                run_id,
                offset=offset,
                tail=tail,
                on_log=count,
                on_cut=watch.check_link,
            )
        except ServerGoneError:
            run = runs.find_run(first, run_id)
        if run.exit_code == 0:
            return run, None, length
        failure = watch.await_failure(silence_s)
    return runs.find_run(first, run_id), failure, length


def _save_failure(context: LabContext, run: Run, failure: PartFailure) -> Run:
    """Record that the run failed because one of its parts did; return it."""
    code = failure.run.exit_code if failure.run else None
    state = "lost" if failure.is_lost else "exited"
    result = msgspec.structs.replace(run, state=state, exit_code=code or 1, summary=failure.reason)
    context.state.save_run(result)
    return result
