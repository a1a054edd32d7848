"""A keeper's check of a run on several servers: starts it again after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from labctl.events import Note, Step
from labctl.lifecycle import gang, gang_outcome, gang_restart, gang_runs
from labctl.lifecycle.gang_restart import RestartAbandonedError, make_silence_error
from labctl.lifecycle.gang_watch import POLL_S, GangWatch, PartFailure
from labctl.lifecycle.recovery_wait import is_drop_requested, report_activity
from labctl.lifecycle.server_loss import DEAD_S
from labctl.runs import runs
from labctl.servers.context import LabContext

# seconds that one check may take longer than it takes until a silent server counts as lost or dead
MARGIN_S = 120.0


def check_and_recover(context: LabContext, run_id: str, *, pause: Callable[[float], None]) -> None:
    """Check the run until every server answers, or until a part has failed; then recover it.

    The run starts again from its newest checkpoint, on new servers where one is lost, or has failed
    for good. Repeated after an error, this goes on. It ends early if the user cancels the run, or
    removes the lab. BusyError if servers do not answer for too long; LockHeldError if another
    process here follows a run of the lab.
    """
    with gang_runs.hold_watch(context, f"recover {run_id}"):
        members = gang.build_members(context, gang_runs.count_parts(context, run_id))
        failure = gang_outcome.find_unfinished_restart(context, run_id)
        if failure is None:
            failure = _await_answer(context, members, run_id, pause)
            if failure is None or not _can_restart(context, members, run_id, failure):
                return
            gang_outcome.record_restart_begun(context, run_id, failure)
        with suppress(RestartAbandonedError):
            _restart(context, members, run_id, failure)


def _await_answer(
    context: LabContext, members: list[LabContext], run_id: str, pause: Callable[[float], None]
) -> PartFailure | None:
    """Wait until a part has failed, and return that; None if every server answers without one."""
    launch = context.config.launch
    watch = GangWatch(members, run_id, launch.silence_s, launch.stall_s)
    limit_s = max(launch.silence_s, DEAD_S) + MARGIN_S
    end_s = time.monotonic() + limit_s
    with report_activity(context, "waiting until every server answers or is gone", limit_s):
        while not _is_abandoned(context, run_id):
            if failure := watch.end_if_failed():
                return failure
            if not watch.silent:
                return None
            if time.monotonic() >= end_s:
                raise make_silence_error(watch.silent, run_id)
            pause(POLL_S)
    return None


def _is_abandoned(context: LabContext, run_id: str) -> bool:
    """Whether the user has canceled the run, or is removing the lab."""
    return gang_runs.is_canceled(context, run_id) or is_drop_requested(context)


def _can_restart(
    context: LabContext, members: list[LabContext], run_id: str, failure: PartFailure
) -> bool:
    """Whether the failed run starts again; record that it has failed for good if it does not."""
    if failure.is_final or gang_runs.is_canceled(context, run_id):
        return False
    if gang_outcome.can_restart(context, run_id, failure, recovers=True):
        return True
    gang_outcome.save_failure(context, runs.find_run(members[0], run_id), failure)
    return False


def _restart(
    context: LabContext, members: list[LabContext], run_id: str, failure: PartFailure
) -> None:
    """Start the run again, also if an earlier try was interrupted."""
    name = f"starting {run_id} again"
    context.reporter.emit(Note(text=f"{failure.reason}; {name}", level="warning"))
    is_abandoned = partial(_is_abandoned, context, run_id)
    with report_activity(context, name):
        restarted = gang_restart.restart(
            context, run_id, failure.reason, recovers=True, is_abandoned=is_abandoned
        )
    gang_outcome.record_restart(context, run_id, failure, restarted)
    context.reporter.emit(Step(name=name, done=True))
    # Its user's machine says so while this one works.
    if gang_runs.is_canceled(context, run_id):
        gang_runs.cancel(members, run_id, gang_runs.GRACE_S)
