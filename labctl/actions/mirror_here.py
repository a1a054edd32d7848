"""A run's outputs brought here while it goes on, over however many servers that takes."""

from __future__ import annotations

import time
from collections.abc import Callable

from labctl.actions import Note, runs, work
from labctl.actions.ground import Ground
from labctl.actions.sync import PulledRun
from labctl.errors import BusyError

EVERY_S = 15.0
LONGEST_PAUSE_S = 60.0


def mirror_here(
    ground: Ground,
    run_id: str,
    *,
    every_s: float = EVERY_S,
    on_round: Callable[[PulledRun], None] = lambda pulled: None,
) -> PulledRun:
    """Pull the run every `every_s` seconds until it has ended and all of it is here.

    A server that does not answer is asked again; the one that replaces it is found by the record.
    """
    pause_s = every_s
    while True:
        try:
            (pulled,) = work.pull(ground, ground.server(), [run_id], everything=False)
        except BusyError as error:
            ground.reporter.emit(Note(text=f"{error.what}; trying again", level="warning"))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        else:
            on_round(pulled)
            if pulled.complete or runs.latest(ground, run_id).ended:
                return pulled
            pause_s = every_s
        time.sleep(pause_s)
