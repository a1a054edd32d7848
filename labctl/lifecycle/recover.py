"""A run goes on when its server is gone: another server, what was saved, the next attempt.

What was saved lies in the lab's store, or, without one, in what `pull --follow` has brought here.
A run that ended by itself is never recovered: another server would not help it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from labctl.errors import (
    BusyError,
    CapacityError,
    ConnectError,
    LabError,
    NoOfferError,
    NotFoundError,
    PolicyError,
    ThrottledError,
)
from labctl.events import Note, Silent, Step
from labctl.lifecycle import restore, up
from labctl.lifecycle.recovery_lock import NotOursError, Turn, our_turn
from labctl.lifecycle.server_loss import GoneError, Silences, check_there, clear_away, not_put_down
from labctl.lifecycle.spending_policy import unasked
from labctl.model import Run, RunSpec, Server, Value
from labctl.retry import retry_on
from labctl.runs import images, outputs, runs
from labctl.servers import adoption
from labctl.servers.context import Ground
from labctl.sync import lab_files

# Recoveries of one run, one after the other, from the same checkpoint.
MOST_IN_VAIN = 5
# Between two rounds of bringing outputs here.
MIRROR_S = 20.0
# What passes: no machine left just now, or none at the agreed price; somebody else's turn; a
# network that is down.
LATER = (BusyError, CapacityError, NoOfferError, ThrottledError)
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 120.0
# States in which a run can be in need of recovery.
LOST = ("claimed", "starting", "running", "lost")


class EndedError(PolicyError):
    """The run ended by itself, perhaps on a server that somebody else had made for it."""

    def __init__(self, run: Run) -> None:
        super().__init__(
            f"run {run.id} ended by itself and is not recovered",
            why=run.told,
            hint=f"labctl logs {run.id}",
        )
        self.run = run


class Recovery(Value, frozen=True):
    """One recovery. Steps are the run's own, None where it tells none; seconds of the wall clock.

    `from_step` is that of the checkpoint from which it goes on. `log_offset` is the byte of the
    run's log at which the gap is marked.
    """

    run: Run
    server_id: str
    last_step: float | None
    from_step: float | None
    took_s: float
    files: int = 0
    log_offset: int = 0
    told: str = ""


def follow(ground: Ground, run_id: str, *, on_log: Callable[[bytes], None], offset: int = 0) -> Run:
    """A run's log to its real end, on however many servers that takes.

    One that a limit stopped (`Run.stopped_by`) has ended too: money was its limit. PolicyError
    where budget or price refuse another server, or after MOST_IN_VAIN recoveries in vain.
    """
    with _mirrored(ground, run_id):
        return _through(ground, run_id, on_log, offset)


def _through(ground: Ground, run_id: str, on_log: Callable[[bytes], None], at: int) -> Run:
    silences = Silences()
    while True:
        server = ground.state.server_of_lab(ground.lab_id)
        try:
            if server is None:
                raise GoneError("the lab has no server any more")
            run = runs.watch(
                ground,
                server,
                run_id,
                offset=at,
                on_log=on_log,
                on_cut=partial(check_there, ground, server, silences),
            )
        except GoneError as error:
            told = error.what
        except NotFoundError:  # a newer server, to which it has not been brought
            told = "the lab's server does not have it"
        else:
            if run.state != "lost" or run.stopped_by:
                return run
            told = run.told
        not_put_down(ground, server)
        ground.reporter.emit(Note(text=f"{run_id}: {told}", level="warning"))
        try:
            at = _await_recovery(ground, run_id, told)
        except EndedError as error:
            found = _elsewhere(ground, run_id)
            if found is None:
                return error.run
            at = found


def _await_recovery(ground: Ground, run_id: str, told: str) -> int:
    """Have it go on, here or by a keeper, however long that takes; where its log goes on."""
    announced = ""

    def announce(message: str) -> None:
        nonlocal announced
        if message != announced:
            ground.reporter.emit(Note(text=message, level="warning"))
            announced = message

    def go_on() -> int:
        if (at := _elsewhere(ground, run_id)) is not None:
            return at
        return recover(ground, run_id, told=told).log_offset

    while_others_recover = retry_on(
        NotOursError,
        pause_s=FIRST_PAUSE_S,
        before_pause=lambda error: announce(f"{error}; waiting for it"),
    )
    until_possible = retry_on(
        LATER,
        pause_s=FIRST_PAUSE_S,
        longest_pause_s=LONGEST_PAUSE_S,
        before_pause=lambda error: announce(f"{run_id} cannot go on yet: {error}; trying again"),
    )
    offset: int = until_possible(while_others_recover, go_on)
    return offset


def _elsewhere(ground: Ground, run_id: str) -> int | None:
    """Where the log goes on of a run that somebody else has recovered; None where nobody has."""
    with contextlib.suppress(LabError):
        server = adoption.adopt(ground)
        found = None if server is None else _there(ground, server, run_id)
        if server is not None and found is not None:
            run = runs.keep(ground, server, found)
            if run.state != "lost" or run.stopped_by:
                return int(found.get("log_offset") or 0)
    return None


def tend(
    ground: Ground, run_id: str, silences: Silences | None = None, *, wait: bool = False
) -> Run:
    """One look at a run, and its recovery where its server is gone and it is our turn.

    Returns the run as it is then. One whose server cannot be reached is left as it was last seen,
    until `silences`, kept from look to look, tell that it is dead. With `wait` another watcher's
    turn is waited for, and taken where that watcher has died.
    """
    known = runs.latest(ground, run_id)
    server = ground.state.server_of_lab(ground.lab_id) or adoption.adopt(ground)
    try:
        if server is None:
            raise GoneError("the lab has no server any more")
        known = _seen(ground, server, run_id) or known
        if known.state != "lost" or known.stopped_by:
            return known
        told = known.told
    except GoneError as error:
        told = error.what
    except ConnectError:
        try:
            if server is not None:
                check_there(ground, server, silences or Silences())
            return known
        except GoneError as error:
            told = error.what
    with contextlib.suppress(NotOursError):
        return recover(ground, run_id, told=told, wait=wait).run
    return runs.latest(ground, run_id)


def _seen(ground: Ground, server: Server, run_id: str) -> Run | None:
    """The run as its server tells it; GoneError where the server does not know it."""
    found = _there(ground, server, run_id)
    if found is None:
        raise GoneError(f"the server {server.id} does not have it")
    return runs.keep(ground, server, found)


@contextmanager
def _mirrored(ground: Ground, run_id: str) -> Iterator[None]:
    """Where the lab has no store, what the run makes comes here while it is followed."""
    if ground.config.store:
        yield
        return
    ended = threading.Event()
    quiet = dataclasses.replace(ground, reporter=Silent())

    def keep_up() -> None:
        while not ended.wait(MIRROR_S):
            # The next round, or the recovery, meets the same trouble and tells it. The end of the
            # run is not held up by somebody else's transfer: nobody waits for that in silence.
            with contextlib.suppress(LabError):
                server = quiet.state.server_of_lab(quiet.lab_id)
                if server is not None:
                    outputs.pull(quiet, server, [run_id], wait_s=0.0)

    thread = threading.Thread(target=keep_up, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def recover(
    ground: Ground, run_id: str, *, told: str = "its server was lost", wait: bool = True
) -> Recovery:
    """Have the run go on, on the lab's server or a new one. Repeated, it finds it running.

    PolicyError where the run ended by itself, or where it got no further MOST_IN_VAIN times;
    NotFoundError where nothing of it was saved; NotOursError where a keeper sees to it, or, without
    `wait`, where another watcher is at it now.
    """
    begun = time.monotonic()
    known = ground.state.run(ground.lab_id, run_id)
    last_step = known.progress.get("step") if known else None
    with our_turn(ground, run_id, wait=wait) as turn:
        # Nothing is made, or ended, for what could not go on.
        _not_in_vain(ground, run_id)
        _not_ended(ground, run_id, restore.record(ground, run_id).run)
        clear_away(ground, run_id)
        turn.check()
        server = up.up(unasked(ground, run_id))
        spec, files = _brought(ground, server, run_id)
        lab_files.push_data(ground, server)
        ground.reporter.emit(Step(name=f"going on with {run_id}"))
        reply = _resumed(ground, server, spec, told, turn)
        run = runs.keep(ground, server, reply["run"])
        made = Recovery(
            run=run,
            server_id=server.id,
            last_step=last_step,
            from_step=reply.get("step"),
            took_s=time.monotonic() - begun,
            files=files,
            log_offset=int(reply["offset"]),
            told=told,
        )
        ground.reporter.emit(Step(name=f"going on with {run_id}", done=True, detail=server.id))
        if not reply["found"]:
            _record(ground, made)
    return made


def _record(ground: Ground, made: Recovery) -> None:
    detail = {
        "told": made.told,
        "took_s": made.took_s,
        "last_step": made.last_step,
        "step": made.from_step,
        "files": made.files,
    }
    ground.state.record(
        "recovered",
        lab_id=ground.lab_id,
        server_id=made.server_id,
        run_id=made.run.id,
        detail=detail,
    )


def _not_in_vain(ground: Ground, run_id: str) -> None:
    """PolicyError where the last recoveries all began at the same step."""
    done = ground.state.events(
        lab_id=ground.lab_id, run_id=run_id, kind="recovered", limit=MOST_IN_VAIN
    )
    steps = {event.detail.get("step") for event in done}
    if len(done) == MOST_IN_VAIN and len(steps) == 1:
        (step,) = steps
        where = "its beginning" if step is None else f"step {step:.0f}"
        raise PolicyError(
            f"run {run_id} is not recovered again",
            why=f"it went on from {where} {MOST_IN_VAIN} times, and saved nothing after that",
            hint=f"labctl logs {run_id}   # does it write checkpoints often enough?",
        )


def _resumed(
    ground: Ground, server: Server, spec: RunSpec, told: str, turn: Turn
) -> dict[str, Any]:
    """The next attempt, started exactly once: {"run", "found", "offset", "step"}."""
    remote = ground.remote(server)
    request = {**runs.asked(ground, spec), "told": f"{told}; it goes on here"}
    for _ in range(2):
        turn.check()
        reply = remote.call("resume", request)
        if "missing" not in reply:
            return reply
        images.ensure(ground, server, remote, spec.image, of_run=spec.id)
    raise LabError(f"{spec.image} is not on the server after it was made", hint="labctl doctor")


def _there(ground: Ground, server: Server, run_id: str) -> dict[str, Any] | None:
    """What the server says of the run; None where it has none of that name."""
    about = {"lab": ground.config.name, "lab_id": ground.lab_id, "runs": [run_id]}
    reply = ground.remote(server).call("status", about)
    return next((found for found in reply["runs"] if found["id"] == run_id), None)


def _brought(ground: Ground, server: Server, run_id: str) -> tuple[RunSpec, int]:
    """The run's directory on the server: there already, or made of what was saved."""
    there = _there(ground, server, run_id)
    kept = restore.record(ground, run_id)
    _not_ended(ground, run_id, there or kept.run)
    return kept.spec, 0 if there else restore.restore(ground, server, run_id)


def _not_ended(ground: Ground, run_id: str, said: dict[str, Any]) -> None:
    """EndedError where the run is said to have ended by itself; that is recorded."""
    if said.get("state", "lost") in LOST:
        return
    known = ground.state.run(ground.lab_id, run_id)
    run = runs.to_run({"lab_id": ground.lab_id, **said}, known.server_id if known else "")
    ground.state.save_run(run)
    raise EndedError(run)


def unfinished(ground: Ground, run_id: str) -> bool:
    """Whether this run began, has not ended by itself, and is not on the lab's present server."""
    known = ground.state.run(ground.lab_id, run_id)
    server = ground.state.server_of_lab(ground.lab_id)
    if known is not None and (known.state not in LOST or (server and known.server_id == server.id)):
        return False
    try:
        kept = restore.record(ground, run_id)
    except NotFoundError:
        return False
    return kept.run.get("state", "lost") in LOST
