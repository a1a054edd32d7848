"""Follow a run on several servers to its end, and start it again after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec

from labctl.errors import LabError, LockHeldError, NotFoundError
from labctl.events import Event, Note, PolicyReporter, RepeatedNote, SilentReporter, report_wait
from labctl.lifecycle import gang, gang_outcome, gang_restart, gang_runs, reconcile
from labctl.lifecycle.fleet import run_for_each
from labctl.lifecycle.follow import FIRST_PAUSE_S, LONGEST_PAUSE_S, TEMPORARY, mirror_outputs
from labctl.lifecycle.gang_restart import Restart, RestartAbandonedError
from labctl.lifecycle.gang_watch import GangWatch, PartFailure
from labctl.lifecycle.recovery_lock import find_keeper
from labctl.lifecycle.server_loss import ServerGoneError
from labctl.model import Run, Server
from labctl.retry import poll_until, retry_on
from labctl.runs import runs
from labctl.servers import adoption
from labctl.servers.context import LabContext

# seconds between two questions to the keeper, while it may be starting the run again
KEEPER_POLL_S = 5.0


class NextAttempt(NamedTuple):
    """Where the log of the next attempt begins (byte); None if no further attempt will come."""

    log_offset: int | None


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
    If another process follows a run of the lab, or a keeper watches over the run, that one does all
    this, and this one only follows the log.
    """
    # Before the lock: a keeper in the user's own account holds it while it recovers the run.
    if keeper := find_keeper(context, run_id):
        text = f"the keeper at {keeper} watches over {run_id}; this only shows its log"
        context.reporter.emit(Note(text=text))
        return _follow_beside_keeper(context, keeper, run_id, on_log, tail)
    try:
        with gang_runs.hold_watch(context, f"follow {run_id}"):
            follower = _Follower(context, run_id, recovers, on_log)
            with mirror_outputs(follower.first, run_id):
                return follower.follow(tail)
    except LockHeldError as error:
        context.reporter.emit(Note(text=f"{error.what}; this one only shows the log"))
        first = gang.build_members(context)[0]
        return runs.watch(first, first.get_server(), run_id, tail=tail, on_log=on_log)


def _follow_beside_keeper(
    context: LabContext,
    keeper: str,
    run_id: str,
    on_log: Callable[[bytes], None],
    tail: int,
) -> Run:
    """Follow the log of a run that a keeper starts again, through all of its attempts."""
    first = gang.build_members(context)[0]
    offset = 0
    while True:
        with suppress(ServerGoneError, NotFoundError):  # the keeper replaces the server
            runs.watch(
                first,
                first.get_server(),
                run_id,
                offset=offset,
                tail=tail,
                on_log=on_log,
                on_cut=_require_same_server,
            )
        with report_wait(context.reporter, _name_wait(keeper)):
            find = partial(_find_next_attempt, context, keeper, run_id)
            attempt = poll_until(find, pause_s=KEEPER_POLL_S)
        if attempt is None or attempt.log_offset is None:
            return gang_outcome.save_outcome(first, run_id)
        offset, tail = attempt.log_offset, 0


def _name_wait(keeper: str) -> str:
    return f"waiting for the keeper at {keeper}"


def _require_same_server(context: LabContext, server: Server) -> None:
    """Record the server's address; ServerGoneError if the lab has another server, or none."""
    try:
        current = adoption.adopt(context)
    except LabError:
        return  # this machine may be offline; the next lost connection tries again
    if current is None or current.id != server.id:
        raise ServerGoneError(f"the server {server.id} is gone")


def _find_next_attempt(context: LabContext, keeper: str, run_id: str) -> NextAttempt | None:
    """Find the attempt that the keeper has started; None while it may still start one."""
    quiet = msgspec.structs.replace(context, reporter=SilentReporter())
    name = _name_wait(keeper)

    def repeat_warning(event: Event) -> None:
        """Say why the wait goes on, such as no credentials at the keeper."""
        if isinstance(event, Note) and event.level == "warning":
            note = RepeatedNote(text=event.text, level="warning", name=name)
            context.reporter.emit(note)

    warning = msgspec.structs.replace(context, reporter=PolicyReporter(repeat_warning))
    if not reconcile.merge_keeper_records(warning):
        return NextAttempt(None)  # the keeper has dropped the lab
    offsets: dict[int, int] = {}

    def fetch(one: LabContext) -> None:
        server = adoption.adopt(one)
        record = runs.fetch_run(one, server, run_id) if server else None
        if server and record and not runs.record_run(one, server, record).has_ended:
            offsets[one.rank or 0] = record.log_offset

    # What the keeper reported counts for a server that does not answer.
    run_for_each(gang.build_members(quiet, gang_runs.count_parts(context, run_id)), fetch)
    if gang_outcome.is_over(context, run_id):
        return NextAttempt(None)
    return NextAttempt(offsets[0]) if 0 in offsets else None


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
            if not gang_outcome.can_restart(
                self.context, self.run_id, failure, recovers=self.recovers
            ):
                return gang_outcome.save_failure(self.context, run, failure)
            text = f"{failure.reason}; starting {self.run_id} again"
            self.context.reporter.emit(Note(text=text, level="warning"))
            restarted = self._restart(failure)
            if restarted is None:
                return runs.find_run(self.first, self.run_id)
            gang_outcome.record_restart(self.context, self.run_id, failure, restarted)
            offset, tail = restarted.log_offset, 0

    def _follow_attempt(self, offset: int, tail: int) -> tuple[Run, PartFailure | None]:
        """Follow one attempt to the end of all parts; return the first part, and what failed."""
        launch = self.context.config.launch
        with GangWatch(self.members, self.run_id, launch.silence_s, launch.stall_s) as watch:
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

    def _restart(self, failure: PartFailure) -> Restart | None:
        """Start the run again, also after a while; None if its user has canceled it meanwhile."""

        def restart() -> Restart | None:
            if self._is_canceled():
                return None
            try:
                done = gang_restart.restart(
                    self.context,
                    self.run_id,
                    failure.reason,
                    recovers=self.recovers,
                    is_abandoned=self._is_canceled,
                )
            except RestartAbandonedError:
                return None
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
