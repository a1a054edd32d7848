"""A keeper's check of a run on several servers: starts it again after a failure."""

from __future__ import annotations

from collections.abc import Callable

from labctl.events import Note, Step
from labctl.lifecycle import gang, gang_outcome, gang_restart, gang_runs
from labctl.lifecycle.gang_watch import POLL_S, GangWatch, PartFailure
from labctl.runs import runs
from labctl.servers.context import LabContext


def check_and_recover(context: LabContext, run_id: str, *, pause: Callable[[float], None]) -> None:
    """Check the run until every server answers, or until a part has failed; then recover it.

    The run starts again from its newest checkpoint, on new servers where one is lost, or has failed
    for good. Repeated after an error, this goes on. LockHeldError if another process here follows
    a run of the lab.
    """
    with gang_runs.hold_watch(context, f"recover {run_id}"):
        members = gang.build_members(context, gang_runs.count_parts(context, run_id))
        if failure := gang_outcome.find_unfinished_restart(context, run_id):
            _restart(context, members, run_id, failure)
            return
        watch = GangWatch(members, run_id, context.config.launch.silence_s)
        while True:
            if failure := watch.end_if_failed():
                _settle(context, members, run_id, failure)
                return
            if watch.all_answer:
                return
            pause(POLL_S)


def _settle(
    context: LabContext, members: list[LabContext], run_id: str, failure: PartFailure
) -> None:
    """Start the failed run again, or record that it has failed for good."""
    if failure.is_final or gang_runs.is_canceled(context, run_id):
        return
    if not gang_outcome.can_restart(context, run_id, failure, recovers=True):
        gang_outcome.save_failure(context, runs.find_run(members[0], run_id), failure)
        return
    gang_outcome.record_restart_begun(context, run_id, failure)
    _restart(context, members, run_id, failure)


def _restart(
    context: LabContext, members: list[LabContext], run_id: str, failure: PartFailure
) -> None:
    """Start the run again, also if an earlier try was interrupted."""
    name = f"starting {run_id} again"
    context.reporter.emit(Note(text=f"{failure.reason}; {name}", level="warning"))
    restarted = gang_restart.restart(context, run_id, failure.reason, recovers=True)
    gang_outcome.record_restart(context, run_id, failure, restarted)
    context.reporter.emit(Step(name=name, done=True))
    # Its user's machine says so while this one works.
    if gang_runs.is_canceled(context, run_id):
        gang_runs.cancel(members, run_id, gang_runs.GRACE_S)
