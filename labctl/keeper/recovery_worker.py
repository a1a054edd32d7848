"""One lab that needs more than a look: its runs are recovered, or what is left of it swept.

It runs in a process of its own, beside the keeper: a recovery takes minutes and AWS's library much
memory, and no lab's trouble is another's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from labctl.errors import LabError
from labctl.events import Note
from labctl.lifecycle import kept_labs, recover
from labctl.lifecycle.kept_labs import Ward
from labctl.lifecycle.server_loss import Silences
from labctl.model import Run
from labctl.servers import end_server, kept_disks
from labctl.servers.accounts import ENDED
from labctl.servers.adoption import adopt
from labctl.servers.context import Ground
from labctl.servers.gate import let_in
from labctl.state.disks import list_kept_disks

LOOK_S = 10.0
SWEPT = "swept"


def attend(ground: Ground, one: Ward, *, pause: Callable[[float], None] = time.sleep) -> None:
    """Look at the lab's runs until each is well, or over; then sweep, if all are over.

    The first error of a run, once every other run was looked at: later may be better.
    """
    silences = Silences()
    while left := [run_id for run_id in one.runs if not _over(ground, run_id)]:
        begun = time.time()
        _let_in(ground)
        trouble: LabError | None = None
        well = True
        for run_id in left:
            try:
                seen = recover.tend(ground, run_id, silences, wait=True)
                well = well and _well(seen, begun)
            except LabError as error:
                trouble = trouble or error
        if trouble:
            raise trouble
        if well and any(not _over(ground, run_id) for run_id in left):
            kept_disks.remove_expired(ground)
            return
        if not well:
            pause(LOOK_S * random.uniform(0.8, 1.2))
    sweep(ground)
    kept_disks.remove_expired(ground)  # also where a server lives, which the sweep leaves alone


def _over(ground: Ground, run_id: str) -> bool:
    run = ground.state.run(ground.lab_id, run_id)
    return run is not None and kept_labs.is_over(run)


def _well(run: Run, since: float) -> bool:
    """Whether its server has told of it just now; a lost one waits for somebody's recovery."""
    return kept_labs.is_over(run) or (run.seen_at >= since and run.state != "lost")


def _let_in(ground: Ground) -> None:
    """Its provider's gate, opened again where this machine's address has changed."""
    server = ground.state.server_of_lab(ground.lab_id)
    if server is not None and server.state == "running":
        try:
            let_in(ground, server)
        except LabError as error:
            text = f"whether the way to {server.id} is open is not known: {error.what}"
            ground.reporter.emit(Note(text=text, level="warning"))


def sweep(ground: Ground) -> None:
    """Take away what an ended server has left at its provider. A server that lives is left alone.

    Its own watchdog ends it: by its ttl, its idle time, its budget.
    """
    server = adopt(ground)
    alive = [
        one.id
        for one in ground.provider.servers()
        if one.lab_id == ground.lab_id and one.state not in ENDED
    ]
    if len(alive) > 1:
        text = f"more than one server bills for this lab: {', '.join(sorted(alive))}"
        ground.reporter.emit(Note(text=f"{text}; labctl orphans ends them", level="warning"))
    if server is not None or alive:
        return
    end_server.swept(ground)
    kept_disks = len(list_kept_disks(ground.state, ground.lab_id))
    ground.state.record(SWEPT, lab_id=ground.lab_id, detail={"kept": kept_disks})
    ended = "its server has ended, and nothing that costs is left"
    text = f"its server has ended; {kept_disks} kept disks stay until their time is over"
    ground.reporter.emit(Note(text=text if kept_disks else ended))
