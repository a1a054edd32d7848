"""The end of a server. Nothing here destroys the only copy of a run's outputs."""

from __future__ import annotations

import time
from contextlib import suppress

from labctl.errors import EngineError, HostKeyError, LabError, PolicyError, ProviderError
from labctl.events import Decision, Note, Step
from labctl.lifecycle import reconcile, up
from labctl.lifecycle.server_loss import PUT_DOWN
from labctl.model import Resource, Server, Value
from labctl.providers import Keep, Lease, Stoppable
from labctl.runs import outputs, runs
from labctl.servers import adoption, attempts, deadlines, end_server, held_disks, kept_disks
from labctl.servers.context import Ground
from labctl.servers.open_costs import told_what_bills
from labctl.services import lab_services
from labctl.stores import lab_store
from labctl.sync import lab_files
from labctl.sync.local_results import Missing

GRACE_S = 60
DAY_S = 86_400
# As the watchdog has it.
KEPT_S = 30 * DAY_S
NAMED_AT_MOST = 20
PULL_AGAIN = "labctl up && labctl pull, or labctl down --discard to lose what is there"
LOOK_THERE = (
    "labctl up && labctl ssh   # rename them or make them readable, then labctl down; "
    "or labctl down --discard to lose them"
)


class Ending(Value, frozen=True):
    """What `down` did and what is left. `servers_left` empty means that nothing bills."""

    removed: str = ""
    pulled_files: int = 0
    saved_edits: int = 0
    servers_left: tuple[Server, ...] = ()
    leftovers: tuple[Resource, ...] = ()


def down(ground: Ground, *, discard: bool) -> Ending:
    """Pull what is not here, remove the lab's server, ask the provider what is left.

    PolicyError where the person says no, or where results could not be saved: compute ends then
    and the disk stays.
    """
    with ground.state.exclusive(ground.lab_id, "down"), told_what_bills(ground):
        reconcile.hear(ground)
        server = _ours(ground, discard) or _unheard(ground)
        if server is None:
            reconcile.released(ground, discard=discard)
            ending = ground.state.server_of_lab(ground.lab_id)
            rest = end_server.swept(ground, ending.id if ending else "")
            return Ending(
                removed=rest.server_id, servers_left=rest.survivors, leftovers=rest.leftovers
            )
        discard = discard or adoption.is_fresh(ground, server)
        running = [] if server.state == "stopped" else _running(ground, server, discard)
        _agree(ground, server, running, discard)
        # Whoever follows a run of it must not take this end for a loss.
        ground.state.record(PUT_DOWN, lab_id=ground.lab_id, server_id=server.id)
        lab_services.stop_forwards(ground, server)
        files = edits = 0
        if not discard:
            files, edits = _save(ground, server, running)
        reconcile.released(ground, discard=discard)
        rest = end_server.remove(ground, server)
        _close_store(ground)
        return Ending(
            removed=rest.server_id,
            pulled_files=files,
            saved_edits=edits,
            servers_left=rest.survivors,
            leftovers=rest.leftovers,
        )


def emptied(ground: Ground, server: Server, *, discard: bool) -> tuple[int, int]:
    """Everything of `down` but the removal: what runs is stopped, all of it is here, verified.

    (files pulled, edits saved). Nobody is asked. PolicyError where not everything could be saved:
    compute ends then and the disk stays.
    """
    discard = discard or adoption.is_fresh(ground, server)
    running = [] if server.state == "stopped" else _running(ground, server, discard)
    ground.state.record(PUT_DOWN, lab_id=ground.lab_id, server_id=server.id)
    lab_services.stop_forwards(ground, server)
    return (0, 0) if discard else _save(ground, server, running)


def _close_store(ground: Ground) -> None:
    """The key of the server that has gone opens the lab's store no more; what is there stays."""
    try:
        lab_store.forget_store(ground)
    except LabError as error:
        said = f"the server's key is still let into {ground.config.store}: {error.what}"
        text = f"{said}; the next `labctl up` replaces it"
        ground.reporter.emit(Note(text=text, level="warning"))


def _ours(ground: Ground, discard: bool) -> Server | None:
    """The lab's server. One with a foreign host key can be removed, but only unsaved."""
    try:
        return adoption.adopt(ground)
    except HostKeyError:
        if not discard:
            raise
        return ground.state.server_of_lab(ground.lab_id)


def _unheard(ground: Ground) -> Server | None:
    """The server of an attempt whose answer was lost, which may take a while to be shown."""
    if attempts.unheard(ground):
        ground.reporter.emit(Step(name="waiting whether an interrupted `up` has made a server"))
    while attempts.unheard(ground):
        time.sleep(min(1.0, ground.provider.settle_s))
        if found := adoption.adopt(ground):
            return found
    for attempt in ground.state.open_attempts(ground.lab_id):
        if attempt.provider == ground.provider.name:
            ground.state.end_attempt(attempt.token, "never seen")
    return None


def _running(ground: Ground, server: Server, discard: bool) -> list[str]:
    try:
        runs.refresh(ground, server)
    except LabError as error:
        if discard:
            return []
        if isinstance(error, HostKeyError):
            raise
        raise kept_there(ground, server, error) from error
    known = ground.state.runs(ground.lab_id)
    return [run.id for run in known if run.state == "running" and run.server_id == server.id]


def _agree(ground: Ground, server: Server, running: list[str], discard: bool) -> None:
    going = f"{', '.join(running)} still runs there and would be cancelled. " if running else ""
    lost = "Results that are not here will be LOST. " if discard else ""
    question = f"{lost}{going}remove the server {server.alias} ({server.provider})?"
    if not ground.reporter.ask(Decision(question=question)):
        raise PolicyError(
            "nothing was removed",
            why=f"{server.alias} goes on, at {server.offer.price_usd_per_hour:.2f} dollars an hour",
            hint="labctl down --yes",
        )


def _save(ground: Ground, server: Server, running: list[str]) -> tuple[int, int]:
    """Stop what runs, bring everything home and verify it; (files pulled, edits saved)."""
    if server.state == "stopped":
        server = up.make_ready(ground, server)
    try:
        for run_id in running:
            run, _ = runs.cancel(ground, server, run_id, GRACE_S)
            ground.reporter.emit(Note(text=f"{run.id}: {run.told}"))
        # What a notebook saves after it was looked at would go with the server.
        _stop_services(ground, server)
        pulled = outputs.pull(ground, server, [], everything=True)
        edits = lab_files.save_edits(ground, server)
        unsaved = [
            *(_told_missing(one) for one in outputs.list_missing(ground, server)),
            *(f"code/{skipped}" for skipped in edits.skipped),
        ]
    except LabError as error:
        raise kept_there(ground, server, error) from error
    if unsaved:
        raise kept_there(ground, server, _only_there(unsaved), hint=LOOK_THERE)
    kept_disks.note_saved(ground, server)
    try:
        lab_services.remove_containers(ground, server)
    except EngineError:
        # A machine that goes takes its containers along; one that others get next must not.
        if isinstance(ground.provider, Lease):
            raise
    return sum(one.files for one in pulled), len(edits.saved)


def _stop_services(ground: Ground, server: Server) -> None:
    """Without an engine none runs; whether that matters at the end, `_save` knows."""
    with suppress(EngineError):
        lab_services.stop_services(ground, server)


def _told_missing(one: Missing) -> str:
    return f"runs/{one.run}/{one.path}" + (f": {one.reason}" if one.reason else "")


def _only_there(names: list[str]) -> LabError:
    shown = "\n".join(f"  {name}" for name in names[:NAMED_AT_MOST])
    more = f"\n  and {len(names) - NAMED_AT_MOST} more" * (len(names) > NAMED_AT_MOST)
    count = "1 file exists" if len(names) == 1 else f"{len(names)} files exist"
    return LabError(f"{count} only on the server:\n{shown}{more}")


def kept_there(
    ground: Ground, server: Server, error: LabError, *, hint: str = PULL_AGAIN
) -> PolicyError:
    """Compute ends, the disk stays, and the person knows both."""
    ground.connections.close(server)
    what = _stopped(ground, server) or _disk_kept(ground, server) or "it goes on as it is"
    return PolicyError(
        f"{server.alias} was not removed: not everything on it could be saved",
        why="\n".join(filter(None, [error.what, error.why, what])),
        hint=hint,
    )


def _stopped(ground: Ground, server: Server) -> str:
    """What was done, in words; "" where such a server cannot be stopped."""
    if not isinstance(ground.provider, Stoppable):
        return ""
    try:
        ground.provider.stop(server.id)
    except ProviderError as error:
        # Spot machines mostly cannot; trouble of any other kind is no reason to end it.
        if type(error) is not ProviderError:
            raise
        return ""
    found = ground.provider.find(server.id)
    if found is not None:
        ground.state.save_server(ground.as_ours(found, server))
    ground.state.record("stopped", lab_id=ground.lab_id, server_id=server.id)
    # Its disk holds the only copy: what would end the server must not take it along.
    deadlines.postpone(ground, server, time.time() + KEPT_S)
    if held_disks.is_held(ground, server):
        held_disks.keep_until(ground, server, time.time() + KEPT_S)
    return "it was stopped and its disk kept"


def _disk_kept(ground: Ground, server: Server) -> str:
    """End the server, but not its disk: what was done, in words; "" where disks cannot stay."""
    if not isinstance(ground.provider, Keep):
        return ""
    disks = ground.provider.keep_disk(server.id, time.time() + KEPT_S)
    if not disks:
        return ""
    end_server.remove(ground, server, keep_disks=True)
    said = [f"{one.id} at {one.price_usd_per_month:.2f} dollars a month" for one in disks]
    return f"it was ended and its disk kept for {KEPT_S // DAY_S} days: {', '.join(said)}"
