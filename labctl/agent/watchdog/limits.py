"""limits.json: the limits that the watchdog enforces, read again whenever the file changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..host.paths import read_json
from .activity import Account
from .decisions import Limits
from .shutdown import GRACE_S, Plan
from .state_files import alone, keep


class Told:
    """The file: its `body`, and the `limits` and the `plan` that it defines."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "limits.json"
        self.body: dict[str, Any] = {}
        self.limits = Limits()
        self._read_mtime_ns = 0

    def changed(self) -> bool:
        """Read the file if it has changed; return whether it did. A damaged one changes nothing."""
        try:
            stamp = self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        body = read_json(self.path) if stamp != self._read_mtime_ns else {}
        if not body:
            return False
        self._read_mtime_ns, self.body = stamp, body
        self.limits = Limits(**{k: v for k, v in body["limits"].items() if k in Limits._fields})
        return True

    @contextmanager
    def changing(self) -> Iterator[dict[str, Any]]:
        """Change the limits while no other process does."""
        with alone(self.path.parent):
            self.changed()
            yield self.body["limits"]
            keep(self.path.parent, self.path.name, self.body)
        self.changed()

    @property
    def plan(self) -> Plan:
        ending = self.body["ending"]
        return Plan(
            account=Account(self.body["uid"], self.body["gid"]),
            lab_id=self.body["lab_id"],
            kind=ending["kind"],
            disk=ending["disk"],
            store=self.body["store"],
            lease=ending.get("lease") or "",
            grace_s=float(ending.get("grace_s") or GRACE_S),
            saver_s=float(ending.get("saver_s") or 0.0),
        )
