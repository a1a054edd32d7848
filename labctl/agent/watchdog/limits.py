"""limits.json: the limits that the watchdog enforces, read again whenever the file changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..host.paths import read_json
from .activity import LabAccount
from .decisions import ServerLimits
from .shutdown import GRACE_S, ShutdownPlan
from .state_files import lock_limits, write_state


class LimitsFile:
    """The file: its `body`, and the `limits` and the `plan` that it defines."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "limits.json"
        self.body: dict[str, Any] = {}
        self.limits = ServerLimits()
        self._read_mtime_ns = 0

    def reload(self) -> bool:
        """Read the file if it has changed; return whether it did. A damaged one changes nothing."""
        try:
            stamp = self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        body = read_json(self.path) if stamp != self._read_mtime_ns else {}
        if not body:
            return False
        self._read_mtime_ns, self.body = stamp, body
        self.limits = ServerLimits(
            **{k: v for k, v in body["limits"].items() if k in ServerLimits._fields}
        )
        return True

    @contextmanager
    def change_limits(self) -> Iterator[dict[str, Any]]:
        """Change the limits while no other process does."""
        with lock_limits(self.path.parent):
            self.reload()
            yield self.body["limits"]
            write_state(self.path.parent, self.path.name, self.body)
        self.reload()

    @property
    def plan(self) -> ShutdownPlan:
        ending = self.body["ending"]
        return ShutdownPlan(
            account=LabAccount(self.body["uid"], self.body["gid"]),
            lab_id=self.body["lab_id"],
            kind=ending["kind"],
            disk=ending["disk"],
            store=self.body["store"],
            lease=ending.get("lease") or "",
            grace_s=float(ending.get("grace_s") or GRACE_S),
            saver_s=float(ending.get("saver_s") or 0.0),
        )
