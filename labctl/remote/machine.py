"""What the whole server does, from /proc: cores, memory, disks, network, processes, people.

Rates are per second since the reading before; the first reading has none.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from .gauges import rows, text

SECTOR_BYTES = 512
TICKS_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NO_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "nbd")
NO_WIRES = ("lo", "veth", "docker", "br-", "virbr", "cni", "tap")
"""What leaves the server counts once, where it leaves."""
CONTAINER = re.compile(r"[0-9a-f]{64}")
BUSY_CORES = 0.05
MOST_PROCESSES = 12
COMMAND_CHARACTERS = 160


class Machine:
    """Compares each reading with the one before."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self.disks = [name for name in _names("/sys/block") if not name.startswith(NO_DISKS)]
        self._before: dict[str, float] = {}
        self._at_s = 0.0

    def read(self) -> dict[str, Any]:
        memory = rows(Path("/proc/meminfo"))
        total, free = memory.get("MemTotal:", 0) * 1024, memory.get("MemAvailable:", 0) * 1024
        place = os.statvfs(self.disk)
        now = time.monotonic()
        counted = {**_processor(), **self._moved(), **_wires()}
        span, before = now - self._at_s, self._before
        rates = {key: (counted[key] - before[key]) / span for key in counted if key in before}
        self._before, self._at_s = counted, now
        busy = rates.pop("cpu_cores", None)
        found: dict[str, Any] = {} if busy is None else {"cpu_cores": round(max(0.0, busy), 3)}
        return {
            "cores": os.cpu_count() or 1,
            "load": float((text(Path("/proc/loadavg")).split() or ["0"])[0]),
            "memory_bytes": total - free,
            "memory_total_bytes": total,
            "disk_free_bytes": place.f_bavail * place.f_frsize,
            "disk_total_bytes": place.f_blocks * place.f_frsize,
            **found,
            **{key: round(max(0.0, rate)) for key, rate in rates.items()},
        }

    def _moved(self) -> dict[str, float]:
        read = written = 0
        for name in self.disks:
            counts = text(Path(f"/sys/block/{name}/stat")).split()
            if len(counts) > 6:
                read += int(counts[2])
                written += int(counts[6])
        return {
            "disk_read_bytes_per_s": read * SECTOR_BYTES,
            "disk_write_bytes_per_s": written * SECTOR_BYTES,
        }


def _processor() -> dict[str, float]:
    """Seconds of all cores: all but idle, waiting for a disk, and what a hypervisor gave away."""
    words = text(Path("/proc/stat")).split("\n", 1)[0].split()[1:8]
    if len(words) < 7:
        return {}
    user, nice, system, _, _, interrupts, soft = map(int, words)
    return {"cpu_cores": (user + nice + system + interrupts + soft) / TICKS_S}


def _wires() -> dict[str, float]:
    came = went = 0
    for row in text(Path("/proc/net/dev")).splitlines()[2:]:
        name, _, counts = row.partition(":")
        if not name.strip().startswith(NO_WIRES):
            came += int(counts.split()[0])
            went += int(counts.split()[8])
    return {"net_in_bytes_per_s": came, "net_out_bytes_per_s": went}


class Processes:
    """Who computes. A look reads one small file a process, so it is made every few seconds."""

    def __init__(self) -> None:
        self._cpu_s: dict[tuple[int, int], float] = {}
        self._at_s = 0.0
        self.busy: dict[int, tuple[float, int]] = {}

    def look(self) -> None:
        """`busy`: pid -> (cores since the last look, memory in bytes), the busiest only."""
        now = time.monotonic()
        span, first = now - self._at_s, not self._at_s
        before, self._cpu_s, self._at_s = self._cpu_s, {}, now
        found = []
        own = os.getpid()
        for pid in _pids():
            fields = text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
            if len(fields) < 22:
                continue
            key, cpu_s = (pid, int(fields[19])), (int(fields[11]) + int(fields[12])) / TICKS_S
            self._cpu_s[key] = cpu_s
            cores = 0.0 if first else (cpu_s - before.get(key, 0.0)) / span
            if cores >= BUSY_CORES and pid != own:
                found.append((cores, int(fields[21]) * PAGE_BYTES, pid))
        found.sort(reverse=True)
        self.busy = {pid: (cores, size) for cores, size, pid in found[:MOST_PROCESSES]}


def about(pid: int) -> dict[str, Any]:
    """{"pid", "person", "command", "container"}; {} where it has ended. "container" may be ""."""
    words = text(Path(f"/proc/{pid}/cmdline")).rstrip("\0").replace("\0", " ")
    words = words or text(Path(f"/proc/{pid}/comm")).strip()
    if not words:
        return {}
    inside = CONTAINER.findall(text(Path(f"/proc/{pid}/cgroup")))
    return {
        "pid": pid,
        "person": person_of(pid),
        "command": words[:COMMAND_CHARACTERS],
        "container": inside[-1] if inside else "",
    }


def person_of(pid: int) -> str:
    """The account that a process runs as; "" where it has ended."""
    try:
        return person(Path(f"/proc/{pid}").stat().st_uid)
    except OSError:
        return ""


@lru_cache(maxsize=256)
def person(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def memory_of(pid: int) -> int:
    return rows(Path(f"/proc/{pid}/status")).get("VmRSS:", 0) * 1024


def _pids() -> list[int]:
    return [int(name) for name in _names("/proc") if name.isdigit()]


def _names(folder: str) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder)]
    except OSError:
        return []
