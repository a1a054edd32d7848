"""What the broker looks after: services' sockets, binds that nobody needs, leases that end.

Each thing is looked after by itself: what fails for one container is reported, and the others have
theirs all the same. Nothing here may keep a lease from ending.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable, Iterator

from ..host import engine
from ..reply import Failure
from . import mounts
from .account_containers import Container, list_rows, read_containers
from .claims import ENDED_KEPT, Claims
from .detection import LEASE
from .gpu_leases import boottime_s, leases
from .networks import MOST_CARRIED, PLACE, Relay
from .rules import GPUS, SOCKET
from .settings import Settings

NEVER_STARTED_S = 600.0
GRACE_S = 60
NOTE_S = 5.0
NOTE = 'printf \'{"by":"%s","at":%s}\' "$1" "$(date +%s)" > /lab/run/.labctl/limit.json'


class Problems:
    """What failed in one round: what is the same for as long as it lasts, and the whole line."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Note whatever is raised inside, and go on."""
        try:
            yield
        except Exception as error:
            same = f"{what}: {type(error).__name__}"
            self.lines[same] = f"{what} failed: {describe_error(error)}"


def describe_error(error: Exception) -> str:
    why = f": {error.body['why']}" if isinstance(error, Failure) else ""
    return f"{type(error).__name__}: {error}{why}"


class Keeping:
    """`look` is called by one thread, `relay` by any."""

    def __init__(self, settings: Settings, claims: Claims, report: Callable[[str], None]) -> None:
        self.claims = claims
        self._settings = settings
        self._report = report
        self._relay_lock = threading.Lock()
        self._relays: dict[str, Relay] = {}
        self._slots: dict[int, threading.BoundedSemaphore] = {}
        self._ending: set[str] = set()
        self._failed_ends: dict[str, str] = {}
        self._created_since_s: dict[str, float] = {}
        self._reported: set[str] = set()

    def look(self) -> None:
        """Do all that is due now. Raises nothing: what fails is reported, once while it lasts."""
        problems = Problems()
        with problems.guard("looking after the containers"):
            began_s = time.monotonic()
            found, unread = read_containers(list_rows())
            problems.lines.update(zip(unread, unread))
            self._end_leases(problems, found)
            self._keep_relays(problems, found)
            self._remove_ended(problems, found)
            self._remove_unstarted(problems, found)
            with problems.guard("letting go of mounts"):
                self._release_mounts(found, began_s)
            with problems.guard("keeping the queue for GPUs"):
                self.claims.keep_queue(found, began_s)
        for same in sorted(problems.lines.keys() - self._reported):
            self._report(problems.lines[same])
        self._reported = set(problems.lines)

    def relay(self, container: str, owner: int, labels: dict[str, str]) -> None:
        """Have a service's socket there; one that is there stays."""
        with self._relay_lock:
            if not labels.get(SOCKET) or container in self._relays:
                return
            place = Path(labels[SOCKET])
            if place.parent != PLACE / str(owner):
                return  # not a place that this broker would have said
            port = int(labels["labctl.service-port"])
            slots = self._slots.setdefault(owner, threading.BoundedSemaphore(MOST_CARRIED))
            self._relays[container] = Relay(owner, place, container, port, slots)

    def _keep_relays(self, problems: Problems, found: list[Container]) -> None:
        running = [one for one in found if one.state == "running"]
        with self._relay_lock:
            gone = set(self._relays) - {one.id for one in running}
            closing = [self._relays.pop(one) for one in gone]
        for relay in closing:
            with problems.guard(f"closing {relay.place}"):
                relay.close()
        for one in running:
            with problems.guard(f"the socket of {one.name or one.id}"):
                self.relay(one.id, one.uid, one.labels)

    def _remove_ended(self, problems: Problems, found: list[Container]) -> None:
        ended: dict[int, list[Container]] = {}
        for one in sorted(found, key=lambda one: -one.created_s):
            if one.state in ("exited", "dead"):
                ended.setdefault(one.uid, []).append(one)
        for mine in ended.values():
            for old in mine[ENDED_KEPT:]:
                with problems.guard(f"removing {old.name or old.id}"):
                    engine.remove(old.id)

    def _remove_unstarted(self, problems: Problems, found: list[Container]) -> None:
        """Counted from when this broker first saw it, whatever the clocks say."""
        now_s = time.monotonic()
        created = [one for one in found if one.state == "created"]
        seen = self._created_since_s
        self._created_since_s = {one.id: seen.get(one.id, now_s) for one in created}
        for one in created:
            has_gpu = bool(one.labels.get(GPUS))
            most_s = self._settings.gpu_claim_s if has_gpu else NEVER_STARTED_S
            if now_s - self._created_since_s[one.id] > most_s:
                with problems.guard(f"removing {one.name or one.id}"):
                    _remove_unless_started(one.id)

    def _release_mounts(self, found: list[Container], began_s: float) -> None:
        waiting = {one.name for one in found if one.state == "created"}
        with self.claims.lock:
            waiting |= self.claims.names_since(began_s)
            for name in mounts.held():
                if name not in waiting:
                    mounts.release(name)

    def _end_leases(self, problems: Problems, found: list[Container]) -> None:
        now_s = boottime_s()
        over = {one.container for one in leases(found) if one.ends_s <= now_s}
        self._ending &= over
        for one in found:
            if one.id in over - self._ending:
                with problems.guard(f"ending the lease of {one.name or one.id}"):
                    self._begin_end(one)
        self._failed_ends = {key: self._failed_ends[key] for key in over & set(self._failed_ends)}
        problems.lines.update(self._failed_ends)

    def _begin_end(self, container: Container) -> None:
        self._ending.add(container.id)
        try:
            threading.Thread(target=self._end, args=(container,), daemon=True).start()
        except RuntimeError:  # no more threads
            self._ending.discard(container.id)
            raise

    def _end(self, container: Container) -> None:
        """SIGTERM, and a while to write a checkpoint. A run is told why, by its own account's hand:
        that hand may do nothing, or never end, and the lease ends all the same."""
        with suppress(Exception):
            if "labctl.run" in container.labels:
                _note(container)
        try:
            path = f"/containers/{container.id}/stop?t={GRACE_S}"
            engine.ask("POST", path, timeout_s=GRACE_S + engine.ANSWER_S)
        except Exception as error:
            name = container.name or container.id
            said = f"ending the lease of {name} failed: {describe_error(error)}"
            self._failed_ends[container.id] = said
            self._ending.discard(container.id)  # and is ended at the next look


def _remove_unless_started(container: str) -> None:
    """The engine decides which was first, this or a start: so nothing that runs loses its GPU."""
    try:
        engine.ask("DELETE", f"/containers/{container}")
    except engine.Refused as refused:
        if refused.status not in (404, 409):
            raise


def _note(container: Container) -> None:
    words = ["/bin/sh", "-c", NOTE, "sh", LEASE]
    body = {"Cmd": words, "User": str(container.uid)}
    path = f"/containers/{container.id}/exec"
    made = json.loads(engine.ask("POST", path, body, NOTE_S))["Id"]
    engine.ask("POST", f"/exec/{made}/start", {"Detach": True}, NOTE_S)
    end = time.monotonic() + NOTE_S
    while time.monotonic() < end:
        if not json.loads(engine.ask("GET", f"/exec/{made}/json", timeout_s=NOTE_S))["Running"]:
            return
        time.sleep(0.05)
