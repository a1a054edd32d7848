"""Whether a server is lost to its runs: gone, taken back, or dead; and the way for the next one."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from labctl.errors import ConnectError, LabError, PolicyError
from labctl.events import Note, Step
from labctl.model import Server, Value
from labctl.providers import Keep
from labctl.runs import outputs
from labctl.servers import accounts, adoption, attempts, end_server
from labctl.servers.connections import answers
from labctl.servers.context import Ground
from labctl.servers.held_disks import KEPT_S
from labctl.sync import lab_files

# Kind of the ledger's line that `labctl down` writes before it ends a server.
PUT_DOWN = "down"
DEAD_S = 600.0
# So often, over DEAD_S at least, must a server fail to answer while its provider says it runs.
DEAD_LOOKS = 12
# Looks further apart are two silences: this machine may have slept in between.
PAUSE_S = 240.0
ANSWER_S = 5.0
LOOK_S = 1.0


class GoneError(ConnectError):
    """The server that a run was on does not exist any more, or is dead."""


class _Silence(Value, frozen=True):
    since_s: float
    last_s: float
    looks: int


class Silences:
    """For how long servers have not answered, by the looks of this process alone."""

    def __init__(self) -> None:
        self._of: dict[str, _Silence] = {}

    def dead(self, server_id: str, now_s: float) -> bool:
        """Count one more failed look; whether it was silent for long enough."""
        before = self._of.get(server_id)
        if before is None or now_s - before.last_s > PAUSE_S:
            before = _Silence(since_s=now_s, last_s=now_s, looks=0)
        found = _Silence(since_s=before.since_s, last_s=now_s, looks=before.looks + 1)
        self._of[server_id] = found
        return found.looks >= DEAD_LOOKS and now_s - found.since_s >= DEAD_S

    def answered(self, server_id: str) -> None:
        self._of.pop(server_id, None)


class PutDownError(PolicyError):
    """A person has ended the server that a run was on."""


def not_put_down(ground: Ground, server: Server | None) -> None:
    """PutDownError where the server, None for the lab's last one, was ended by `labctl down`."""
    said = ground.state.events(lab_id=ground.lab_id, kind=PUT_DOWN, limit=1)
    made = ground.state.events(lab_id=ground.lab_id, kind="created", limit=1)
    if not said or (server is not None and said[0].server_id != server.id):
        return
    if server is not None or not made or made[0].at < said[0].at:
        raise PutDownError(
            f"the server {said[0].server_id} was ended by `labctl down`",
            why="a run is not recovered against a person's will",
            hint="labctl up && labctl run --recover --id RUN   # goes on with what is saved",
        )


def check_there(ground: Ground, server: Server, silences: Silences) -> None:
    """GoneError where the provider says that the server has ended, or where it is dead.

    Nothing is concluded while the provider itself cannot be asked: this machine may be offline.
    PolicyError where it is asked with another account's credentials.
    """
    try:
        found = ground.provider.find(server.id)
        if found is None and not accounts.is_gone(ground, server):
            return
    except PolicyError:
        raise
    except LabError:
        return
    if found is None or found.state in accounts.ENDED:
        raise GoneError(f"the server {server.id} is gone")
    if found.state != "running" or answers(found.endpoint, ANSWER_S):
        silences.answered(server.id)
        return
    if silences.dead(server.id, time.monotonic()) and _ended(ground, server):
        raise GoneError(f"the server {server.id} was dead: it had not answered for 10 minutes")


def _ended(ground: Ground, server: Server) -> bool:
    """End a dead server, which bills on; False where what lies on it may be nowhere else."""
    provider = ground.provider
    is_kept = isinstance(provider, Keep) and provider.keep_disk(server.id, time.time() + KEPT_S)
    if not (is_kept or ground.config.store):
        why = "its disk cannot be kept, and " if isinstance(provider, Keep) else ""
        text = f"{server.id} does not answer; it is not ended, since {why}the lab has no store. "
        ground.reporter.emit(Note(text=text + "`labctl down --discard` ends it", level="warning"))
        return False
    ground.state.record("dead", lab_id=ground.lab_id, server_id=server.id)
    end_server.end(ground, [server], keep_disks=True)
    return True


def clear_away(ground: Ground, run_id: str) -> None:
    """The way is free for another server: one that is being taken back is saved, then ended.

    The zone that has just taken a server back is asked last for the next.
    """
    known = ground.state.server_of_lab(ground.lab_id)
    server = adoption.adopt(ground)
    if server is None or server.state in accounts.ENDED:
        _leave_zone(ground, known)
        return
    taken = _taken_back(ground, server)
    if not taken:
        return
    is_saved = False
    with suppress(ConnectError):  # it went before its time: what is saved is saved
        is_saved = _wind_down(ground, server, run_id, taken)
    _leave_zone(ground, server)
    end_server.end(ground, [server], keep_disks=not is_saved)


def _leave_zone(ground: Ground, server: Server | None) -> None:
    if server is not None and server.offer.zone:
        detail = {"zone": server.offer.zone}
        ground.state.record(attempts.LEFT, lab_id=ground.lab_id, server_id=server.id, detail=detail)


def _taken_back(ground: Ground, server: Server) -> dict[str, Any]:
    """What the server's watchdog says of an interruption that is under way, {} for none."""
    about = {"lab": ground.config.name, "lab_id": ground.lab_id, "runs": []}
    try:
        watch = ground.remote(server).call("status", about).get("watch") or {}
    except ConnectError:
        return {}
    taken: dict[str, Any] = watch.get("reclaim") or {}
    return taken if taken.get("kind") == "interruption" else {}


def _wind_down(ground: Ground, server: Server, run_id: str, taken: dict[str, Any]) -> bool:
    """Wait until the server's runs have ended and are mirrored; without a store, pull the run.

    Whether all that the server has is here. What is in a store is not known here: a disk that was
    kept all the same was kept by the server, since not everything could be sent.
    """
    name = "the server is being taken back; its runs wind down"
    ground.reporter.emit(Step(name=name))
    while taken and not taken.get("ready_at") and time.time() < taken["ends_at"]:
        time.sleep(LOOK_S)
        taken = _taken_back(ground, server)
    is_saved = False
    if not ground.config.store:
        try:
            outputs.pull(ground, server, [run_id])
            edits = lab_files.save_edits(ground, server)
            is_saved = not (edits.skipped or outputs.list_missing(ground, server))
        except LabError as error:
            text = f"not all of {run_id} could be pulled: {error.what}"
            ground.reporter.emit(Note(text=text, level="warning"))
    ground.reporter.emit(Step(name=name, done=True))
    return is_saved
