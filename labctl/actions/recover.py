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

from labctl.actions import Note, Silent, Step, attempts, images, provision, runs, saved, work
from labctl.actions.ground import Ground
from labctl.errors import ConnectError, LabError, PolicyError
from labctl.model import Run, RunSpec, Server, Value

MOST_ATTEMPTS = 5
MIRROR_S = 20.0
"""Between two rounds of bringing outputs here."""
GONE = ("ending", "terminated")


class GoneError(ConnectError):
    """The server that a run was on does not exist any more."""


class Recovery(Value, frozen=True):
    """One recovery. Steps are the run's own, None where it tells none; seconds of the wall clock.

    `log_offset` is the byte of the run's log at which the gap is marked.
    """

    run: Run
    server_id: str
    last_step: float | None
    first_step: float | None
    took_s: float
    files: int = 0
    log_offset: int = 0
    told: str = ""


def follow(
    ground: Ground,
    run_id: str,
    *,
    on_log: Callable[[bytes], None],
    offset: int = 0,
    most: int = MOST_ATTEMPTS,
) -> Run:
    """A run's log to its real end, on however many servers that takes.

    PolicyError after `most` recoveries, or where budget or price refuse another server.
    """
    with _mirrored(ground, run_id):
        return _through(ground, run_id, on_log, offset, most)


def _through(
    ground: Ground, run_id: str, on_log: Callable[[bytes], None], at: int, most: int
) -> Run:
    for _ in range(most + 1):
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
                on_cut=partial(check_there, ground, server),
            )
        except GoneError as error:
            run, told = runs.latest(ground, run_id), error.what
        else:
            if run.state != "lost":
                return run
            told = run.told
        ground.reporter.emit(Note(text=f"{run_id}: {told}", level="warning"))
        at = recover(ground, run_id, told=told).log_offset
    raise PolicyError(
        f"run {run_id} was lost {most + 1} times and is not recovered again",
        why="its servers ended each time",
        hint=f"labctl run --recover --id {run_id}   # tries again",
    )


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
            # The next round, or the recovery, meets the same trouble and tells it.
            with contextlib.suppress(LabError):
                server = quiet.state.server_of_lab(quiet.lab_id)
                if server is not None:
                    work.pull(quiet, server, [run_id], everything=False)

    thread = threading.Thread(target=keep_up, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def check_there(ground: Ground, server: Server) -> None:
    """GoneError where the provider says that the server has ended, or is about to."""
    try:
        found = ground.provider.find(server.id)
    except ConnectError:
        return
    if found is None and time.time() - server.created_at < ground.provider.settle_s:
        return
    if found is None or found.state in GONE:
        raise GoneError(f"the server {server.id} is gone", hint="labctl run --recover")


def recover(ground: Ground, run_id: str, *, told: str = "its server was lost") -> Recovery:
    """Have the run go on, on the lab's server or a new one. Repeated, it finds it running.

    PolicyError where the run ended by itself; NotFoundError where nothing of it was saved.
    """
    begun = time.monotonic()
    known = ground.state.run(ground.lab_id, run_id)
    last_step = known.progress.get("step") if known else None
    _leave_zone(ground)
    server = provision.up(ground)
    spec, files = _brought(ground, server, run_id)
    work.push_data(ground, server)
    ground.reporter.emit(Step(name=f"going on with {run_id}"))
    run, log_offset = _resumed(ground, server, spec, told)
    took_s = time.monotonic() - begun
    ground.reporter.emit(Step(name=f"going on with {run_id}", done=True, detail=server.id))
    detail = {"told": told, "took_s": took_s, "last_step": last_step, "files": files}
    ground.state.record(
        "recovered", lab_id=ground.lab_id, server_id=server.id, run_id=run_id, detail=detail
    )
    return Recovery(
        run=run,
        server_id=server.id,
        last_step=last_step,
        first_step=None,
        took_s=took_s,
        files=files,
        log_offset=log_offset,
        told=told,
    )


def _resumed(ground: Ground, server: Server, spec: RunSpec, told: str) -> tuple[Run, int]:
    """The next attempt, started exactly once, and at which byte of the log it begins."""
    remote = ground.remote(server)
    request = {**runs.asked(ground, spec), "told": f"{told}; it goes on here"}
    reply = remote.call("resume", request)
    if "missing" in reply:
        images.ensure(ground, server, remote, spec.image, of_run=spec.id)
        reply = remote.call("resume", request)
    if "missing" in reply:
        raise LabError(f"{spec.image} is not on the server after it was made", hint="labctl doctor")
    return runs.keep(ground, server, reply["run"]), int(reply["offset"])


def _leave_zone(ground: Ground) -> None:
    """The zone that has just taken a server back is asked last for the next."""
    server = ground.state.server_of_lab(ground.lab_id)
    if server is None or not server.offer.zone:
        return
    found = ground.provider.find(server.id)
    if found is None or found.state in GONE:
        detail = {"zone": server.offer.zone}
        ground.state.record(attempts.LEFT, lab_id=ground.lab_id, server_id=server.id, detail=detail)


def _brought(ground: Ground, server: Server, run_id: str) -> tuple[RunSpec, int]:
    """The run's directory on the server: there already, or made of what was saved."""
    remote = ground.remote(server)
    reply = remote.call("status", {"lab": ground.config.name, "lab_id": ground.lab_id})
    there = next((found for found in reply["runs"] if found["id"] == run_id), None)
    if there is not None:
        if there["state"] in ("exited", "cancelled"):
            run = runs.keep(ground, server, there)
            raise _ended(run)
        return saved.record(ground, run_id).spec, 0
    kept = saved.record(ground, run_id)
    if kept.run.get("state") in ("exited", "cancelled"):
        raise _ended(runs.to_run(kept.run, server))
    return kept.spec, saved.restore(ground, server, run_id)


def _ended(run: Run) -> LabError:
    return PolicyError(
        f"run {run.id} ended by itself and is not recovered",
        why=run.told,
        hint=f"labctl logs {run.id}",
    )
