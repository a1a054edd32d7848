"""The record of a run: a line about its container every 10 s in its logs/telemetry.jsonl.

A process of the lab's own account does this while a run lives. A run's start begins it, and the
watchdog sees to it that there is one (recorder.py), but is not it: a hanging driver or a
crashing library of the GPU's maker does not touch the watchdog, and root writes nothing into a
directory that a container writes into.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..reply import Failure
from ..watchdog.activity import Account
from ..watchdog.notify import tell
from . import engine
from .container_usage import Gauges
from .gpu_access import Probe
from .gpus import Gpu, Gpus, given
from .paths import home

NAME = "telemetry.jsonl"
LOCKS = Path("/var/tmp")
EVERY_S, LATER_S = 10.0, 60.0
LATER_AFTER_S = 6 * 3600.0
MOST_BYTES = 8 * 1024**2
# How often the engine is asked which runs there are.
LOOK_S = 5.0
# Looks without a run before this process ends.
PATIENCE = 3
OF_A_GPU = (
    "uuid",
    "name",
    "use_percent",
    "memory_bytes",
    "memory_total_bytes",
    "power_w",
    "power_limit_w",
    "temperature_c",
    "sm_clock_mhz",
    "sm_clock_max_mhz",
    "throttle",
    "energy_j",
)
OF_AN_INSTANCE = ("uuid", "name", "memory_bytes", "memory_total_bytes")


class Recorded:
    """One run's container, and when it is looked at next."""

    def __init__(self, container: dict[str, Any]) -> None:
        mounts = {one["Destination"]: one.get("Source", "") for one in container["Mounts"]}
        self.directory = Path(mounts["/lab/run"])
        self.gauges = Gauges(container)
        self.attempt = int(container["Name"].rpartition("-")[2])
        self.began_s = self.due_s = time.monotonic()
        has_gpu = bool((container.get("HostConfig") or {}).get("DeviceRequests"))
        self.probe = Probe(container, self.directory) if has_gpu else None

    def line(self, gpus: list[Gpu]) -> dict[str, Any]:
        """{} once it has ended."""
        found = self.gauges.read()
        if not found:
            return {}
        own = [told(gpu, gpus) for gpu in given(gpus, self.gauges.container)]
        about = {"at": round(time.time(), 3), "attempt": self.attempt}
        return {**about, **found, **({"gpus": own} if own else {})}


def told(gpu: Gpu, gpus: list[Gpu]) -> Gpu:
    """What is recorded of a GPU. An instance's card tells what the instance itself does not."""
    parent = gpu.get("parent")
    if not parent:
        return {key: gpu[key] for key in OF_A_GPU if key in gpu}
    card: Gpu = next((one for one in gpus if one.get("uuid") == parent), {})
    shared = ("temperature_c", "sm_clock_mhz", "sm_clock_max_mhz", "throttle")
    found = {key: card[key] for key in shared if key in card}
    return {**{key: gpu[key] for key in OF_AN_INSTANCE if key in gpu}, **found}


def record(request: dict[str, Any]) -> None:
    """Until no run lives any more. A second one of the same home ends at once.

    A run that begins while the first one ends has its own recorder find the lock taken; so whoever
    lets go of it looks once more.
    """
    home().mkdir(exist_ok=True)
    alive = True
    while alive:
        with claimed(os.getuid(), home()) as mine:
            if not mine:
                return
            _record()
        alive = bool(look({}))


def _record() -> None:
    gpus = Gpus()
    recorded: dict[str, Recorded] = {}
    empty = 0
    while True:
        began = time.monotonic()
        recorded = look(recorded)
        empty = 0 if recorded else empty + 1
        if empty == PATIENCE:
            return
        write_due(recorded, gpus)
        probe_gpus(recorded)
        time.sleep(max(0.1, LOOK_S - (time.monotonic() - began)))


@contextmanager
def claimed(uid: int, place: Path) -> Iterator[bool]:
    """Whether nobody else records the runs below `place`; then nobody else does meanwhile.

    The lock is on this machine's own disk: a home may be on a network, and another machine's.
    """
    name = hashlib.sha256(str(place).encode()).hexdigest()[:16]
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    path = LOCKS / f"labctl-telemetry-{uid}-{name}"
    try:
        file = os.open(path, flags | (os.O_CREAT if os.getuid() == uid else 0), 0o600)
    except FileNotFoundError:
        yield True
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(file)


def look(before: dict[str, Recorded]) -> dict[str, Recorded]:
    """Every run of this account that lives, by its container's id."""
    try:
        ids = running()
    except Failure:  # the engine is being restarted; its containers may live on
        return before
    found = {}
    for one in ids:
        known = before.get(one)
        if known is None:
            with suppress(Failure, KeyError, ValueError):
                container = json.loads(engine.ask("GET", f"/containers/{one}/json"))
                known = Recorded(container)
        if known is not None and home() in known.directory.parents:
            found[one] = known
    return found


def running() -> list[str]:
    filters = quote(json.dumps({"label": ["labctl.run"]}))
    found = json.loads(engine.ask("GET", f"/containers/json?filters={filters}"))
    return [one["Id"] for one in found]


def write_due(recorded: dict[str, Recorded], gpus: Gpus) -> None:
    now = time.monotonic()
    due = [one for one in recorded.values() if one.due_s <= now + LOOK_S / 2]
    if not due:
        return
    seen = gpus.read(wait=True)
    for one in due:
        line = one.line(seen)
        every_s = LATER_S if now - one.began_s > LATER_AFTER_S else EVERY_S
        # A machine that slept does not make up for it.
        one.due_s = one.due_s + every_s if one.due_s + every_s > now else now + every_s
        if line:
            append(one.directory / "logs", line)


def probe_gpus(recorded: dict[str, Recorded]) -> None:
    """See whether containers still have their GPUs; say it where somebody reads if not."""
    for one in recorded.values():
        # The run may have ended by now, or the engine be busy: the next round asks again.
        with suppress(Failure, OSError, ValueError, KeyError):
            if one.probe and one.probe.advance():
                text = f"the container of run {one.directory.name} has lost access to its GPU"
                text += f"; next: labctl explain {one.directory.name}"
                logs = [one.directory / "logs" / "run.log"]
                tell(Account(os.getuid(), os.getgid()), text, logs)


def append(logs: Path, body: dict[str, Any]) -> bool:
    """Add a line. False where it has no room, or the run has put something else in its place.

    The run writes into this directory too: no link is followed, nothing but a file is written.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        folder = os.open(logs, os.O_RDONLY | os.O_DIRECTORY | flags)
        try:
            file = os.open(NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT | flags, 0o644, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError:
        return False
    try:
        found = os.fstat(file)
        line = json.dumps(body, separators=(",", ":")).encode() + b"\n"
        if not stat.S_ISREG(found.st_mode) or found.st_size + len(line) > MOST_BYTES:
            return False
        if found.st_size and os.pread(file, 1, found.st_size - 1) != b"\n":
            line = b"\n" + line  # the disk was full in the middle of the last one
        return os.write(file, line) == len(line)
    except OSError:
        return False
    finally:
        os.close(file)
