"""Outputs of runs, from their server to here: once, or while a run goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from labctl.errors import BusyError, NotFoundError
from labctl.events import Note
from labctl.model import Server
from labctl.runs import runs
from labctl.servers.context import Ground
from labctl.sync import pull as transfer
from labctl.sync.local_results import Missing
from labctl.sync.pull import PulledRun
from labctl.sync.transfer_lock import WAIT_S

EVERY_S = 15.0
LONGEST_PAUSE_S = 60.0
# So long is a lost run waited for: `run --recover`, or a keeper, may have it go on elsewhere.
RECOVERED_WITHIN_S = 600.0


def pull(
    ground: Ground,
    server: Server,
    run_ids: list[str],
    *,
    everything: bool = False,
    only: Sequence[str] = (),
    wait_s: float = WAIT_S,
) -> list[PulledRun]:
    """Outputs of these runs (of all, if empty) to `<lab>/runs/`, whole and verified.

    With `only`, nothing but these directories of them. BusyError where another transfer of the lab
    goes on for longer than `wait_s`.
    """
    remote = ground.remote(server)
    runs.refresh(ground, server, remote)
    result = transfer.pull(
        remote,
        ground.config.name,
        ground.lab_id,
        run_ids,
        ground.config.root,
        reporter=ground.reporter,
        everything=everything,
        only=only,
        records=ground.state.runs(ground.lab_id),
        wait_s=wait_s,
    )
    return list(result.runs)


def list_missing(ground: Ground, server: Server) -> tuple[Missing, ...]:
    """Every file that runs have left on the server and that is not on the disk here."""
    about = (ground.remote(server), ground.config.name, ground.lab_id)
    return transfer.verify(*about, [], ground.config.root, everything=True)


def mirror_here(
    ground: Ground,
    run_id: str,
    *,
    every_s: float = EVERY_S,
    on_round: Callable[[PulledRun], None] = lambda pulled: None,
) -> PulledRun:
    """Pull the run every `every_s` seconds until it has ended and all of it is here.

    A server that does not answer is asked again; the one that replaces it is found by the record.
    NotFoundError where there is none after RECOVERED_WITHIN_S, or where there was none to begin
    with.
    """
    pause_s, lived_s = every_s, -math.inf
    while True:
        patient = time.monotonic() - lived_s < RECOVERED_WITHIN_S
        try:
            (pulled,) = pull(ground, ground.server(), [run_id])
        except (BusyError, NotFoundError) as error:
            if isinstance(error, NotFoundError) and not patient:
                raise
            ground.reporter.emit(Note(text=f"{error.what}; trying again", level="warning"))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        else:
            on_round(pulled)
            run, pause_s = runs.latest(ground, run_id), every_s
            may_go_on = patient and run.state == "lost" and not run.stopped_by
            if not may_go_on and (pulled.complete or run.ended):
                return pulled
            if not run.ended:
                lived_s = time.monotonic()
        time.sleep(pause_s)
