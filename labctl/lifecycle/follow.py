"""Follow a run to its end, across the servers that its recoveries need."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec

from labctl.errors import (
    BusyError,
    CapacityError,
    LabError,
    NoOfferError,
    NotFoundError,
    ThrottledError,
)
from labctl.events import Note, SilentReporter
from labctl.lifecycle import recover
from labctl.lifecycle.recovery_lock import RecoveryLockedError
from labctl.lifecycle.server_loss import (
    FailedChecks,
    ServerGoneError,
    require_alive,
    require_not_removed,
)
from labctl.model import Run, Server
from labctl.retry import retry_on
from labctl.runs import outputs, runs
from labctl.servers import adoption
from labctl.servers.context import LabContext
from labctl.servers.provider_choice import use_recorded_provider

# seconds between two pulls of a followed run's outputs
MIRROR_S = 20.0
# Errors that pass: no capacity, no offer at the agreed price, another recovery, no network.
TEMPORARY = (BusyError, CapacityError, NoOfferError, ThrottledError)
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 120.0


def follow(
    context: LabContext, run_id: str, *, on_log: Callable[[bytes], None], offset: int = 0
) -> Run:
    """Follow a run's log until the run ends, across as many servers as that takes.

    A run that a limit stopped (`Run.stopped_by`) has ended too: money was its limit. PolicyError
    if budget or price rule out another server, or if recoveries bring no progress.
    """
    with mirror_outputs(context, run_id):
        return _follow_attempts(context, run_id, on_log, offset)


def _follow_attempts(
    context: LabContext, run_id: str, on_log: Callable[[bytes], None], at: int
) -> Run:
    silences = FailedChecks()
    while True:
        # The provider may be asked here, and may be busy: that must not end the run's follower.
        server = retry_on(TEMPORARY, pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S)(
            _get_addressed_server, context
        )
        context = use_recorded_provider(context)
        try:
            if server is None:
                raise ServerGoneError("the lab no longer has a server")
            run = runs.watch(
                context,
                server,
                run_id,
                offset=at,
                on_log=on_log,
                on_cut=partial(require_alive, silences=silences),
            )
        except ServerGoneError as error:
            reason = error.what
        except NotFoundError:  # a newer server, to which the run was not restored
            reason = "the lab's server does not have this run"
        else:
            if run.state != "lost" or run.stopped_by:
                return run
            reason = run.summary
        require_not_removed(context, server)
        context.reporter.emit(Note(text=f"{run_id}: {reason}", level="warning"))
        try:
            at = _recover_or_wait(context, run_id, reason)
        except recover.EndedError as error:
            log_offset = _find_other_recovery(context, run_id)
            if log_offset is None:
                return error.run
            at = log_offset


def _get_addressed_server(context: LabContext) -> Server | None:
    """Return the recorded server, with its address; None without a server.

    A recovery that was ended before its new server ran has left that server on record without one.
    """
    server = context.state.get_lab_server(context.lab_id)
    if server is None or server.endpoint.host:
        return server
    return adoption.adopt(use_recorded_provider(context))


def _recover_or_wait(context: LabContext, run_id: str, reason: str) -> int:
    """Wait until the run is resumed, here or by a keeper; return where its log resumes (bytes)."""
    announced = ""

    def announce(message: str) -> None:
        nonlocal announced
        if message != announced:
            context.reporter.emit(Note(text=message, level="warning"))
            announced = message

    def resume() -> int:
        if (at := _find_other_recovery(context, run_id)) is not None:
            return at
        return recover.recover(context, run_id, reason=reason).log_offset

    while_others_recover = retry_on(
        RecoveryLockedError,
        pause_s=FIRST_PAUSE_S,
        before_pause=lambda error: announce(f"{error}; waiting for that recovery"),
    )
    until_possible = retry_on(
        TEMPORARY,
        pause_s=FIRST_PAUSE_S,
        longest_pause_s=LONGEST_PAUSE_S,
        before_pause=lambda error: announce(f"{run_id} cannot resume yet: {error}; trying again"),
    )
    offset: int = until_possible(while_others_recover, resume)
    return offset


def _find_other_recovery(context: LabContext, run_id: str) -> int | None:
    """Return where the log resumes if another process has recovered the run, else None."""
    context = use_recorded_provider(context)
    with contextlib.suppress(LabError):
        server = adoption.adopt(context)
        record = None if server is None else runs.fetch_run(context, server, run_id)
        if server is not None and record is not None:
            run = runs.record_run(context, server, record)
            if run.state != "lost" or run.stopped_by:
                return record.log_offset
    return None


@contextmanager
def mirror_outputs(context: LabContext, run_id: str) -> Iterator[None]:
    """Pull the run's outputs regularly while it is followed, if the lab has no store."""
    if context.config.store:
        yield
        return
    ended = threading.Event()
    quiet = msgspec.structs.replace(context, reporter=SilentReporter())

    def keep_up() -> None:
        while not ended.wait(MIRROR_S):
            # The next round or the recovery reports a lasting error. With wait_s=0, the end of
            # the run does not wait in silence for another process's transfer.
            with contextlib.suppress(LabError):
                server = quiet.state.get_lab_server(quiet.lab_id)
                if server is not None:
                    outputs.pull(quiet, server, [run_id], wait_s=0.0)

    thread = threading.Thread(target=keep_up, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
