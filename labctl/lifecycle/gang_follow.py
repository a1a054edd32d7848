"""Follow a run on several servers to its end, and start it again after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from labctl.errors import LockHeldError
from labctl.events import Note
from labctl.lifecycle import gang, gang_restart, gang_runs
from labctl.lifecycle.follow import FIRST_PAUSE_S, LONGEST_PAUSE_S, TEMPORARY, mirror_outputs
from labctl.lifecycle.gang_restart import Restart
from labctl.lifecycle.gang_watch import GangWatch, PartFailure
from labctl.lifecycle.server_loss import ServerGoneError
from labctl.model import Run
from labctl.retry import retry_on
from labctl.runs import runs
from labctl.servers.context import LabContext

# Kind of the ledger's line about a run that was started again on all of its servers.
RESTARTED = "restarted"


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
            follower = _Follower(context, run_id, recovers, on_log)
            with mirror_outputs(follower.first, run_id):
                return follower.follow(tail)
    except LockHeldError as error:
        context.reporter.emit(Note(text=f"{error.what}; this one only shows the log"))
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


class _Follower:
    """Follows one run of a lab with several servers, through all of its attempts."""

    def __init__(
        self,
        context: LabContext,
        run_id: str,
        recovers: bool,
        on_log: Callable[[bytes], None],
    ) -> None:
        self.context, self.run_id, self.recovers, self.on_log = context, run_id, recovers, on_log
        self.members = gang.build_members(context, gang_runs.count_parts(context, run_id))
        self.first = self.members[0]
        self.started_at = time.time()

    def follow(self, tail: int) -> Run:
        offset = 0
        while True:
            run, failure = self._follow_attempt(offset, tail)
            if failure is None or failure.is_final:
                return run
            if not self._can_restart(failure):
                return self._save_failure(run, failure)
            text = f"{failure.reason}; starting {self.run_id} again"
            self.context.reporter.emit(Note(text=text, level="warning"))
            restarted = self._restart(failure)
            if restarted is None:
                return runs.find_run(self.first, self.run_id)
            self._record(failure, restarted)
            offset, tail = restarted.log_offset, 0

    def _follow_attempt(self, offset: int, tail: int) -> tuple[Run, PartFailure | None]:
        """Follow one attempt to the end of all parts; return the first part, and what failed."""
        silence_s = self.context.config.launch.silence_s
        with GangWatch(self.members, self.run_id, silence_s) as watch:
            with suppress(ServerGoneError):  # the watch has seen why
                runs.watch(
                    self.first,
                    self.first.get_server(),
                    self.run_id,
                    offset=offset,
                    tail=tail,
                    on_log=self.on_log,
                    on_cut=watch.check_link,
                )
            failure = watch.await_end()
        return runs.find_run(self.first, self.run_id), failure

    def _can_restart(self, failure: PartFailure) -> bool:
        if failure.is_lost:
            return self.recovers
        if failure.run is not None and failure.run.is_auxiliary:
            return False
        done = self.context.state.list_events(
            lab_id=self.context.lab_id, run_id=self.run_id, kind=RESTARTED
        )
        return len(done) < self.context.config.launch.restarts

    def _restart(self, failure: PartFailure) -> Restart | None:
        """Start the run again, also after a while; None if its user has canceled it meanwhile."""

        def restart() -> Restart | None:
            if self._is_canceled():
                return None
            done = gang_restart.restart(
                self.context, self.run_id, failure.reason, recovers=self.recovers
            )
            if self._is_canceled():
                gang_runs.cancel(self.members, self.run_id, gang_runs.GRACE_S)
                return None
            return done

        def announce(error: BaseException) -> None:
            text = f"{self.run_id} cannot start again yet: {error}; trying again"
            self.context.reporter.emit(Note(text=text, level="warning"))

        retry = retry_on(
            TEMPORARY,
            pause_s=FIRST_PAUSE_S,
            longest_pause_s=LONGEST_PAUSE_S,
            before_pause=announce,
        )
        restarted: Restart | None = retry(restart)
        return restarted

    def _is_canceled(self) -> bool:
        return gang_runs.is_canceled_since(self.context, self.run_id, self.started_at)

    def _record(self, failure: PartFailure, restarted: Restart) -> None:
        """Write the new attempt to the ledger."""
        detail = {"told": failure.reason, "step": restarted.step}
        self.context.state.record(
            "recovered" if failure.is_lost else RESTARTED,
            lab_id=self.context.lab_id,
            server_id=restarted.run.server_id,
            run_id=self.run_id,
            detail=detail,
        )

    def _save_failure(self, run: Run, failure: PartFailure) -> Run:
        """Record that the run failed because one of its parts did; return it."""
        code = failure.run.exit_code if failure.run else None
        state = "lost" if failure.is_lost else "exited"
        result = msgspec.structs.replace(
            run, state=state, exit_code=code or 1, summary=failure.reason
        )
        self.context.state.save_run(result)
        return result
