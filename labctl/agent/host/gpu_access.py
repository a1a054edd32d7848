"""Detection of containers that have lost access to their GPUs.

A reload of systemd on the server applies the device rules of containers again, and drops those that
NVIDIA's hook has set without systemd's knowledge. A program that opens a GPU after that fails
("Failed to initialize NVML: Unknown Error"), while programs that have it open keep working. Only a
process in the container can see this, so one is started there through the engine.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ...wire.codec import to_json
from ...wire.runs import GpuAccessRecord
from . import engine
from .engine_objects import Container, CreatedObject, ExecState, NewExec, StartExec
from .paths import read_record, write_json

# The GpuAccessRecord below a run's .labctl.
STATE = "gpu-access.json"
FIRST_S, EVERY_S = 10.0, 60.0
# A loss counts once a second probe, this many seconds later, confirms it.
CONFIRM_S = 5.0
# seconds after which a probe counts as hung in the driver: that proves nothing about device rules
GIVE_UP_S = 60.0
OPENED, REFUSED = 0, 20
NO_NODES = 21
# Shell built-ins only, since the image may lack any program. Every run has a shell.
PROBE = f"""\
found=
for node in /dev/nvidiactl /dev/nvidia[0-9]*; do
  [ -c "$node" ] || continue
  found=yes
  true 2>/dev/null <"$node" || exit {REFUSED}
done
[ "$found" ] || exit {NO_NODES}
"""


def update_access(before: GpuAccessRecord, code: int | None, now: float) -> GpuAccessRecord:
    """Return what is known after a probe with the exit code `code` (None: no result).

    Only a container that has opened its GPUs before can lose them: one that never could has
    another problem, which its own program reports.
    """
    if code == OPENED:
        return GpuAccessRecord(before.container, opened_at=now)
    if code != REFUSED or before.opened_at is None:
        return before
    if before.refused_at is None:
        return before._replace(refused_at=now)
    return before._replace(lost_at=before.lost_at or before.refused_at)


class GpuProbe:
    """Repeated probes of one container. No call waits for a probe to end."""

    def __init__(self, container: Container, directory: Path) -> None:
        self.container_id = container.Id
        self.name = container.Name.lstrip("/")
        self.path = directory / ".labctl" / STATE
        self.access = _read(self.path, self.name)
        self._exec_id = ""
        self._due_s = time.monotonic() + FIRST_S
        self._began_s = 0.0

    def advance(self) -> bool:
        """Start the probe that is due, or take the last result; return True for a new loss."""
        now_s = time.monotonic()
        if not self._exec_id:
            if now_s >= self._due_s:
                self._start_probe(now_s)
            return False
        try:
            inspected = json.loads(engine.call("GET", f"/exec/{self._exec_id}/json"))
        except engine.EngineRequestError:
            self._exec_id = ""  # the engine has restarted since
            return False
        state = engine.convert_object(ExecState, inspected)
        if state.Running:
            if now_s - self._began_s > GIVE_UP_S:
                self._exec_id = ""
            return False
        self._exec_id = ""
        return self._conclude(state.ExitCode, now_s)

    def _start_probe(self, now_s: float) -> None:
        self._began_s, self._due_s = now_s, now_s + EVERY_S
        probe = NewExec(Cmd=("/bin/sh", "-c", PROBE), User=f"{os.getuid()}:{os.getgid()}")
        content = engine.call("POST", f"/containers/{self.container_id}/exec", probe)
        exec_id = engine.convert_object(CreatedObject, json.loads(content)).Id
        engine.call("POST", f"/exec/{exec_id}/start", StartExec(Detach=True))
        self._exec_id = exec_id

    def _conclude(self, code: int | None, now_s: float) -> bool:
        before, self.access = self.access, update_access(self.access, code, time.time())
        if self.access.refused_at and not self.access.lost_at:
            self._due_s = now_s + CONFIRM_S
        with suppress(OSError):  # full disk: the next probe writes it
            write_json(self.path, to_json(self.access))
        return self.access.lost_at is not None and before.lost_at is None


def _read(path: Path, container: str) -> GpuAccessRecord:
    """Return what is known of this container; an earlier attempt had another one."""
    access = read_record(GpuAccessRecord, path)
    if access is None or access.container != container:
        return GpuAccessRecord(container)
    return access


def find_loss_time(directory: Path, container: str) -> float | None:
    """Return when the container of a run was first seen without its GPUs; None if it has them."""
    return _read(directory / ".labctl" / STATE, container).lost_at
