"""limits.json: the limits that the watchdog enforces, read again whenever the file changes."""

from __future__ import annotations

from pathlib import Path

from ...wire.verbs import UP_COMMAND
from ...wire.watchdog import LimitsRecord, ServerLimits
from ..host.paths import read_json, write_json
from ..reply import Failure
from .activity import LabAccount
from .shutdown import GRACE_S, ShutdownPlan
from .state_files import encode_limits, lock_limits, read_limits, report_unwritten


class LimitsFile:
    """The file: its `record`, and the `limits` and the `plan` that it defines."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "limits.json"
        self._record: LimitsRecord | None = None
        self._read_mtime_ns = 0

    def reload(self) -> bool:
        """Read the file if it has changed; return whether it did. A damaged one changes nothing."""
        try:
            stamp = self.path.stat().st_mtime_ns
            record = read_limits(self.path.parent) if stamp != self._read_mtime_ns else None
        except (FileNotFoundError, Failure):
            return False
        if record is None:
            return False
        self._read_mtime_ns, self._record = stamp, record
        return True

    @property
    def record(self) -> LimitsRecord:
        """What was read last. Failure if the file has never been readable."""
        if self._record is None:
            what = f"the watchdog's limits in {self.path} cannot be read"
            raise Failure("server", what, "", UP_COMMAND)
        return self._record

    @property
    def limits(self) -> ServerLimits:
        return self.record.limits

    def write(self, record: LimitsRecord, mode: int = 0o644) -> None:
        """Write the file. What only a newer labctl knows of it stays."""
        write_json(self.path, keep_unknown(read_json(self.path), encode_limits(record)), mode)

    def restart_ttl(self, elapsed_s: float) -> None:
        """Have the ttl begin now, without extensions."""
        with lock_limits(self.path.parent):
            self.reload()
            limits = self.limits._replace(from_s=elapsed_s, extended_s=0.0, held_until_s=0.0)
            with report_unwritten(self.path.name):
                self.write(self.record._replace(limits=limits))
        self.reload()

    @property
    def plan(self) -> ShutdownPlan:
        ending = self.record.ending
        return ShutdownPlan(
            account=LabAccount(self.record.uid, self.record.gid),
            lab_id=self.record.lab_id,
            kind=ending.kind,
            disk=ending.disk,
            store=self.record.store,
            lease=ending.lease,
            grace_s=ending.grace_s or GRACE_S,
            saver_s=ending.saver_s,
        )


def keep_unknown(before: object, now: object) -> object:
    """Return the JSON value `now`, and in its objects also the keys that only `before` has."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return now
    known = {key: keep_unknown(before.get(key), value) for key, value in now.items()}
    return {**before, **known}
