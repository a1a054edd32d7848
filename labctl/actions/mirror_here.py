"""A run's outputs brought here while it goes on, over however many servers that takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from labctl.actions import Note, runs, work
from labctl.actions.ground import Ground
from labctl.actions.sync import PulledRun
from labctl.errors import BusyError, NotFoundError

EVERY_S = 15.0
LONGEST_PAUSE_S = 60.0
RECOVERED_WITHIN_S = 600.0
"""So long is a lost run waited for: `run --recover`, or a keeper, may have it go on elsewhere."""


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
            (pulled,) = work.pull(ground, ground.server(), [run_id], everything=False)
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
