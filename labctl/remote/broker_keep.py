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
from .broker_net import Relay
from .broker_rules import OWNER, SOCKET
from .broker_settings import Settings
from .shared import LEASE

NEVER_STARTED_S = 600.0
GRACE_S = 60
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
        self._ending: set[str] = set()

    def look(self) -> None:
        """All that is due now."""
        with self.making:
            found = containers()
            self._sweep(found)
        for one in found:
            if one["State"] == "running":
                self.relay(one)
        living = {one["Id"] for one in found if one["State"] == "running"}
        for gone in set(self._relays) - living:
            self._relays.pop(gone).close()
        self._end_leases(found)

    def relay(self, container: dict[str, Any]) -> None:
        """Have a service's socket there; one that is there stays."""
        labels = container.get("Labels") or {}
        with self.making:
            if not labels.get(SOCKET) or container["Id"] in self._relays:
                return
            owner, port = int(labels[OWNER]), int(labels["labctl.service-port"])
            place = Path(labels[SOCKET])
            self._relays[container["Id"]] = Relay(owner, place, container["Id"], port)

    def _sweep(self, found: list[dict[str, Any]]) -> None:
        waiting = set()
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
            threading.Thread(target=_end, args=words, daemon=True).start()


def _end(container: str, owner: str) -> None:
    """SIGTERM, and a while to write a checkpoint. A run is told why, by its own account's hand."""
    with suppress(engine.Refused):
        if owner:
            words = ["/bin/sh", "-c", NOTE, "sh", LEASE]
            body = {"Cmd": words, "User": owner}
            made = json.loads(engine.ask("POST", f"/containers/{container}/exec", body))
            engine.ask("POST", f"/exec/{made['Id']}/start", {"Detach": False})
        engine.ask("POST", f"/containers/{container}/stop?t={GRACE_S}")
