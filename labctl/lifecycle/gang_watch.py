"""Watch the parts of a run on several servers, and end all of them as soon as one fails.

Without this, the others would wait for it: PyTorch gives up after 10 minutes (NCCL) or 30 (gloo).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import msgspec

from labctl.errors import LabError
from labctl.lifecycle import gang_runs
from labctl.lifecycle.fleet import run_for_each
from labctl.lifecycle.gang_stall import StallCheck
from labctl.lifecycle.server_loss import FailedChecks, ServerGoneError, require_alive
from labctl.model import Run, Server, Value
from labctl.runs import runs
from labctl.servers.context import LabContext
from labctl.text import duration_text

POLL_S = 2.0
# The first one after the log of one part has ended, since the others end at about the same time;
# each one after it is twice as long, up to POLL_S.
LAST_POLL_S = 0.2
# seconds after which a server that does not answer is the cause of a failure that was seen
CONFIRM_S = 4.0


class PartFailure(Value, frozen=True):
    """Why a run ends on all servers: its part on the server of `rank` failed, or hangs.

    `reason` begins with the server's name, or says that the run has stalled. `run` is that part as
    last seen. `is_lost` says that the server is gone or does not answer.
    """

    rank: int
    reason: str
    run: Run | None = None
    is_lost: bool = False

    @property
    def is_final(self) -> bool:
        """Whether a user or a limit (ttl, budget) ended it, so that it must not start again."""
        return self.run is not None and bool(self.run.state == "cancelled" or self.run.stopped_by)


class GangWatch:
    """Checks the parts regularly in a thread, from the beginning of a `with` block to its end.

    `failure` is the first one seen. It is set once the parts on the other servers have been ended.
    `is_done` is set once all parts have ended well. `silent` are the names of the servers that did
    not answer the last check.
    A server counts as lost if its provider says so, or if it does not answer for `silence_s`. Only
    the time in which another one answers counts, since the network of this machine may be down.
    A run that shows no progress anywhere for `stall_s` has failed, unless that is 0.
    """

    def __init__(
        self, members: Sequence[LabContext], run_id: str, silence_s: float, stall_s: float = 0.0
    ) -> None:
        self.failure: PartFailure | None = None
        self.is_done = False
        self.silent: tuple[str, ...] = ()
        self._members = list(members)
        self._run_id = run_id
        self._silence_s = silence_s
        self._failed_checks = FailedChecks()
        self._silent_s = [0.0] * len(self._members)
        self._stall_check = StallCheck(self._members, run_id, stall_s)
        # when the parts were checked last, by the monotonic clock
        self._checked_s: float | None = None
        self._last_pause_s = LAST_POLL_S
        self._is_over = threading.Event()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> GangWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._is_ending.set()
        self._thread.join()

    def check_link(self, context: LabContext, server: Server) -> None:
        """Record the server's address; ServerGoneError if the run has failed anyway."""
        if self.failure is not None:
            raise ServerGoneError(self.failure.reason)
        runs.refresh_address(context, server)

    def await_end(self) -> PartFailure | None:
        """Wait until all parts have ended; return the failure, None without one.

        The log of one part ends before those of the others, and before this has seen why.
        """
        self._is_ending.set()
        while self.failure is None and not self.is_done:
            self._is_over.wait(0.1)
        return self.failure

    def _poll(self) -> None:
        while not self._pause():
            if self.end_if_failed() or self.is_done:
                return

    def end_if_failed(self) -> PartFailure | None:
        """Check every part once; after a failure, end the parts that remain."""
        if failure := self._find_confirmed_failure():
            has_ended = failure.run is None or failure.run.has_ended
            ended_rank = failure.rank if has_ended else None
            remaining = [one for one in self._members if one.rank != ended_rank]
            gang_runs.end_parts(remaining, self._run_id, failure.reason)
            self.failure = failure
        return failure

    def _pause(self) -> bool:
        """Wait until all parts must be checked again; return whether the watch is over."""
        if self._is_ending.is_set():
            pause_s, self._last_pause_s = self._last_pause_s, min(2 * self._last_pause_s, POLL_S)
            return self._is_over.wait(pause_s)
        self._is_ending.wait(POLL_S)
        return self._is_over.is_set()

    def _find_confirmed_failure(self) -> PartFailure | None:
        """Return what failed. A lost server can make another part fail before anyone misses it.

        A stalled run may show progress at the last moment.
        """
        failure = self.find_failure(self._silence_s)
        if failure is None or failure.is_lost or failure.is_final:
            return failure
        self._is_over.wait(CONFIRM_S)
        return self.find_failure(CONFIRM_S)

    def find_failure(self, silence_s: float) -> PartFailure | None:
        """Check every part once; return the failure that matters: not those that it caused.

        A server that has not answered for `silence_s` has failed.
        """
        outcomes = run_for_each(self._members, self._check_part)
        self.silent = tuple(
            one.config.name
            for one, outcome in zip(self._members, outcomes, strict=True)
            if outcome.error is not None
        )
        parts = [outcome.value for outcome in outcomes if outcome.value is not None]
        failures = [part for part in parts if isinstance(part, PartFailure)]
        ended = [part for part in parts if isinstance(part, Run) and part.has_ended]
        self.is_done = len(ended) == len(self._members)
        now_s = time.monotonic()
        since_s = 0.0 if self._checked_s is None else now_s - self._checked_s
        self._checked_s = now_s
        if len(self.silent) == len(self._members):
            return None
        for rank, outcome in enumerate(outcomes):
            if outcome.error is None:
                self._silent_s[rank] = 0.0
                continue
            self._silent_s[rank] += since_s
            if self._silent_s[rank] >= silence_s:
                failures.append(self._make_silence_failure(rank, outcome.error))
        return _merge_failures(failures) or self._find_stall(parts)

    def _find_stall(self, parts: Sequence[PartFailure | Run]) -> PartFailure | None:
        """Return the failure of a run that stalls, with its part on the server that seems to."""
        running = {part.lab_id: part for part in parts if isinstance(part, Run)}
        if self.silent or self.is_done or not (stall := self._stall_check.find()):
            return None
        run = running.get(self._members[stall.rank].lab_id)
        return PartFailure(rank=stall.rank, reason=stall.reason, run=run)

    def _check_part(self, context: LabContext) -> PartFailure | Run:
        """Return the part as it is now, or its failure."""
        rank, name = context.rank or 0, context.config.name
        server = context.state.get_lab_server(context.lab_id)
        if server is None:
            return PartFailure(rank=rank, reason=f"{name}: the server is gone", is_lost=True)
        try:
            record = runs.fetch_run(context, server, self._run_id)
        except LabError:
            try:
                require_alive(context, server, self._failed_checks)
            except ServerGoneError as gone:
                return PartFailure(rank=rank, reason=f"{name}: {gone.what}", is_lost=True)
            raise
        if record is None:
            return PartFailure(
                rank=rank, reason=f"{name}: the server does not have the run", is_lost=True
            )
        run = runs.record_run(context, server, record)
        if not run.has_ended or run.exit_code == 0:
            return run
        return PartFailure(
            rank=rank, reason=f"{name}: {run.summary}", run=run, is_lost=run.state == "lost"
        )

    def _make_silence_failure(self, rank: int, error: LabError) -> PartFailure:
        silence = duration_text(self._silent_s[rank])
        reason = f"{self._members[rank].config.name}: no answer for {silence} ({error.what})"
        return PartFailure(rank=rank, reason=reason, is_lost=True)


def _merge_failures(failures: Sequence[PartFailure]) -> PartFailure | None:
    """Return the failure that came first, with the reasons of all of them; None without any.

    One failure makes the others fail within a second, which is the resolution of their times. A
    lost server is a cause and no consequence, and what a user or a limit ended stays ended.
    """

    def rate(failure: PartFailure) -> tuple[bool, bool, float]:
        ended_at = failure.run.ended_at if failure.run else None
        return not failure.is_final, not failure.is_lost, ended_at or 0.0

    ordered = sorted(failures, key=rate)
    if not ordered:
        return None
    reason = "; ".join(failure.reason for failure in ordered)
    return msgspec.structs.replace(ordered[0], reason=reason)
