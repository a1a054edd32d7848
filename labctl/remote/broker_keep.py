"""What the broker looks after: services' sockets, binds that nobody needs, leases that end."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from . import broker_mounts, engine
from .broker_gpus import boottime_s, leases
from .broker_net import MOST_CARRIED, PLACE, Relay
from .broker_rules import OWNER, SOCKET
from .broker_settings import Settings
from .reply import Failure
from .shared import LEASE

NEVER_STARTED_S = 600.0
ENDED_KEPT = 64
"""Of one account's containers that have ended: each has its log on the server's disk. How a run
ended lies in its own files."""
GRACE_S = 60
NOTE_S = 5.0
NOTE = 'printf \'{"by":"%s","at":%s}\' "$1" "$(date +%s)" > /lab/run/.labctl/limit.json'


def containers(uid: int | None = None) -> list[dict[str, Any]]:
    """Those of one account, or of all, as the engine lists them, stopped ones too."""
    label = OWNER if uid is None else f"{OWNER}={uid}"
    filters = quote(json.dumps({"label": [label]}))
    found: list[dict[str, Any]] = json.loads(
        engine.ask("GET", f"/containers/json?all=1&filters={filters}")
    )
    return found


class Keeping:
    """`making` is held while a container is made, so that nothing of it is swept half-way."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.making = threading.Lock()
        self._relays: dict[str, Relay] = {}
        self._slots: dict[int, threading.BoundedSemaphore] = {}
        self._ending: set[str] = set()

    def look(self) -> None:
        """All that is due now. What one account spoils for itself is spoilt for nobody else.

        OSError at the end, with the first service that has no socket.
        """
        with self.making:
            found = containers()
            self._sweep(found)
        self._end_leases(found)
        living = {one["Id"] for one in found if one["State"] == "running"}
        for gone in set(self._relays) - living:
            self._relays.pop(gone).close()
        failed: list[OSError] = []
        for one in found:
            if one["State"] == "running":
                try:
                    self.relay(one)
                except OSError as error:
                    failed.append(error)
        if failed:
            raise failed[0]

    def relay(self, container: dict[str, Any]) -> None:
        """Have a service's socket there; one that is there stays."""
        labels = container.get("Labels") or {}
        with self.making:
            if not labels.get(SOCKET) or container["Id"] in self._relays:
                return
            owner, port = int(labels[OWNER]), int(labels["labctl.service-port"])
            place = Path(labels[SOCKET])
            if place.parent != PLACE / str(owner):
                return  # not a place that this broker would have said
            slots = self._slots.setdefault(owner, threading.BoundedSemaphore(MOST_CARRIED))
            self._relays[container["Id"]] = Relay(owner, place, container["Id"], port, slots)

    def _sweep(self, found: list[dict[str, Any]]) -> None:
        waiting = set()
        ended: dict[str, list[str]] = {}
        for one in sorted(found, key=lambda one: -float(one["Created"])):
            if one["State"] in ("exited", "dead"):
                ended.setdefault(one["Labels"][OWNER], []).append(one["Id"])
        for mine in ended.values():
            for old in mine[ENDED_KEPT:]:
                engine.remove(old)
        for one in found:
            name = one["Names"][0].lstrip("/")
            if one["State"] != "created":
                continue
            if time.time() - float(one["Created"]) > NEVER_STARTED_S:
                engine.remove(one["Id"])
            else:
                waiting.add(name)
        for name in broker_mounts.held():
            if name not in waiting:
                broker_mounts.release(name)

    def _end_leases(self, found: list[dict[str, Any]]) -> None:
        now_s = boottime_s()
        over = {one.container for one in leases(found) if one.ends_s <= now_s}
        runs = {one["Id"]: "labctl.run" in one["Labels"] for one in found}
        owners = {one["Id"]: one["Labels"][OWNER] for one in found}
        self._ending &= over
        for container in over - self._ending:
            self._ending.add(container)
            words = (container, owners[container] if runs[container] else "")
            threading.Thread(target=self._end, args=words, daemon=True).start()

    def _end(self, container: str, owner: str) -> None:
        """SIGTERM, and a while to write a checkpoint. A run is told why, by its own account's hand:
        that hand may do nothing, or never end, and the lease ends all the same."""
        try:
            if owner:
                _note(container, owner)
            engine.ask("POST", f"/containers/{container}/stop?t={GRACE_S}")
        except (Failure, OSError, ValueError, KeyError):
            self._ending.discard(container)  # and is ended at the next look


def _note(container: str, owner: str) -> None:
    with suppress(engine.Refused):
        words = ["/bin/sh", "-c", NOTE, "sh", LEASE]
        body = {"Cmd": words, "User": owner}
        made = json.loads(engine.ask("POST", f"/containers/{container}/exec", body))["Id"]
        engine.ask("POST", f"/exec/{made}/start", {"Detach": True})
        end = time.monotonic() + NOTE_S
        while time.monotonic() < end:
            if not json.loads(engine.ask("GET", f"/exec/{made}/json"))["Running"]:
                return
            time.sleep(0.05)
