"""The worker for one lab that needs more than a check: recovers its runs, or sweeps leftovers.

It is a process of its own beside the keeper: a recovery takes minutes and AWS's library much
memory, and a problem of one lab must not affect another.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from labctl.errors import BusyError, LabError
from labctl.events import Note
from labctl.lifecycle import gang, gang_recovery, kept_labs, power_off, recover
from labctl.lifecycle.kept_labs import KeptLab
from labctl.lifecycle.recovery_wait import is_drop_requested, report_activity
from labctl.lifecycle.server_loss import DEAD_S, FailedChecks
from labctl.model import Run
from labctl.servers import end_server, former_providers, kept_disks
from labctl.servers.accounts import ENDED
from labctl.servers.adoption import adopt
from labctl.servers.context import LabContext
from labctl.servers.firewall import admit_if_unreachable
from labctl.servers.members import list_servers
from labctl.servers.provider_choice import is_market, use_recorded_provider
from labctl.state.disks import list_kept_disks
from labctl.text import list_text

POLL_S = 10.0
# By then, a silent server counts as dead, unless it may hold the only copy of results.
LONGEST_S = DEAD_S + 120.0
SWEPT = "swept"


def recover_lab(
    context: LabContext, kept_lab: KeptLab, *, pause: Callable[[float], None] = time.sleep
) -> None:
    """Recover the lab's runs until each is healthy or over; then sweep, if all are over.

    The first error of a run is raised after all other runs were handled: a later try may succeed.
    """
    has_several = gang.has_several_servers(context)
    recover_runs = _recover_on_several if has_several else _recover_on_one
    with report_activity(context, "recovering its runs"):
        recover_runs(context, kept_lab, pause)
    # That of the first server goes last: what the servers share goes with it.
    for one in reversed(kept_labs.build_members(context)):
        if not kept_labs.list_open_runs(context, kept_lab):
            power_off.end_powered_off(one, pause)
            sweep(one)
        # Even if a server is running, which the sweep leaves alone.
        kept_disks.remove_expired(one)


def _recover_on_one(context: LabContext, kept_lab: KeptLab, pause: Callable[[float], None]) -> None:
    """Recover the runs until their server answers; until somebody waits to drop the lab, at most.

    BusyError if the server neither answers nor is gone for LONGEST_S.
    """
    silences = FailedChecks()
    end_s = time.monotonic() + LONGEST_S
    while open_runs := kept_labs.list_open_runs(context, kept_lab):
        started_at = time.time()
        _open_firewall(context)
        first_error: LabError | None = None
        all_healthy = True
        for run_id in open_runs:
            try:
                run = recover.check_and_recover(context, run_id, silences, wait=True)
                is_over = kept_labs.is_over(context, run_id)
                all_healthy = all_healthy and (is_over or _is_healthy(run, started_at))
            except LabError as error:
                first_error = first_error or error
        if first_error:
            raise first_error
        if all_healthy or is_drop_requested(context):
            return
        if time.monotonic() >= end_s:
            raise BusyError(
                f"the server of {context.name} does not answer",
                why="its runs are recovered when it answers, or is gone at its provider",
                hint="labctl down --discard   # instead, to remove it",
            )
        pause(POLL_S * random.uniform(0.8, 1.2))


def _recover_on_several(
    context: LabContext, kept_lab: KeptLab, pause: Callable[[float], None]
) -> None:
    """Recover each run of a lab with several servers once; the next check sees the outcome."""
    for one in kept_labs.build_members(context):
        _open_firewall(one)
    first_error: LabError | None = None
    for run_id in kept_labs.list_open_runs(context, kept_lab):
        try:
            gang_recovery.check_and_recover(context, run_id, pause=pause)
        except LabError as error:
            first_error = first_error or error
    if first_error:
        raise first_error


def _is_healthy(run: Run, since: float) -> bool:
    """Tell whether the run's server has just reported it as not lost."""
    return run.seen_at >= since and run.state != "lost"


def _open_firewall(context: LabContext) -> None:
    """Open the provider's firewall for this machine again if its address has changed."""
    context = use_recorded_provider(context)
    server = context.state.get_lab_server(context.lab_id)
    if server is not None and server.state == "running":
        try:
            admit_if_unreachable(context, server)
        except LabError as error:
            text = f"cannot check whether the firewall of {server.id} is open: {error.what}"
            context.reporter.emit(Note(text=text, level="warning"))


def sweep(context: LabContext) -> None:
    """Remove the leftovers of an ended server at its provider. A running server is left alone.

    Its own watchdog ends it, by its ttl, its idle time or its budget (see also power_off.py).
    """
    context = use_recorded_provider(context)
    server = adopt(context)
    listed = list_servers(context)
    running = [
        other.id for other in listed if other.lab_id == context.lab_id and other.state not in ENDED
    ]
    if len(running) > 1:
        text = f"more than one server bills for this lab: {', '.join(sorted(running))}"
        context.reporter.emit(Note(text=f"{text}; labctl orphans ends them", level="warning"))
    if server is not None or running:
        return
    if context.rank == 0 and end_server.has_siblings(context, listed):
        return  # a later check sweeps what it shares with them
    if not is_market(context.provider.name):
        end_server.sweep(context)
    former = former_providers.sweep_former_providers(context)
    if former.failures:
        raise BusyError(
            f"what the lab may have left at {list_text(list(former.failures))} is not known",
            why="\n".join(f"{name}: {why}" for name, why in former.failures.items()),
            hint="labctl orphans",
        )
    kept_disks = len(list_kept_disks(context.state, context.lab_id))
    context.state.record(SWEPT, lab_id=context.lab_id, detail={"kept": kept_disks})
    ended = "its server has ended, and nothing is left that costs money"
    text = f"its server has ended; {kept_disks} kept disks stay until they expire"
    context.reporter.emit(Note(text=text if kept_disks else ended))
