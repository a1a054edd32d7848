"""What the whole server does, by psutil: cores, memory, disks, network, processes, people.

Rates are per second since the reading before; the first reading has none. What cannot be read is
absent.
"""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from .container_usage import text

PACKAGES = "/usr/lib/python3/dist-packages"
# Earlier ones, such as Ubuntu 20.04's, do not understand what newer kernels report of disks.
OLDEST_PSUTIL = (5, 7)
NO_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "nbd")
# What leaves the server counts once, where it leaves.
NO_WIRES = ("lo", "veth", "docker", "br-", "virbr", "cni", "tap")
CONTAINER = re.compile(r"[0-9a-f]{64}")
BUSY_CORES = 0.05
MOST_PROCESSES = 12
COMMAND_CHARACTERS = 160


def load_psutil(packages: str = PACKAGES) -> Any:
    """The distribution's psutil, which `python3 -S` does not see, or proc.py in its stead."""
    from . import proc

    sys.path.append(packages)
    try:
        import psutil
    except ImportError:
        return proc
    finally:
        sys.path.remove(packages)
    return psutil if psutil.version_info >= OLDEST_PSUTIL else proc


class Machine:
    """Compares each reading with the one before."""

    def __init__(self, disk: Path, psutil: Any) -> None:
        self.disk = disk
        self._psutil = psutil
        self._before: dict[str, float] = {}
        self._at_s = 0.0

    def read(self) -> dict[str, Any]:
        memory = self._psutil.virtual_memory()
        disk = os.statvfs(self.disk)
        now = time.monotonic()
        counts = self._count()
        span, before = now - self._at_s, self._before
        rates = {key: (counts[key] - before[key]) / span for key in counts if key in before}
        self._before, self._at_s = counts, now
        busy = rates.pop("cpu_cores", None)
        return {
            "cores": os.cpu_count() or 1,
            "load": round(os.getloadavg()[0], 2),
            "memory_bytes": memory.total - memory.available,
            "memory_total_bytes": memory.total,
            "disk_free_bytes": disk.f_bavail * disk.f_frsize,
            "disk_total_bytes": disk.f_blocks * disk.f_frsize,
            **({} if busy is None else {"cpu_cores": round(max(0.0, busy), 3)}),
            **{key: round(max(0.0, rate)) for key, rate in rates.items()},
        }

    def _count(self) -> dict[str, float]:
        """Totals since the server started."""
        counts: dict[str, float] = {}
        with suppress(OSError, NotImplementedError):
            times = self._psutil.cpu_times()
            # All but idle, waiting for a disk, and what a hypervisor gave away.
            busy = times.user + times.nice + times.system + times.irq + times.softirq
            counts["cpu_cores"] = busy
        with suppress(OSError, NotImplementedError):
            disks = self._psutil.disk_io_counters(perdisk=True, nowrap=False)
            used = [disks[name] for name in disks if is_whole_disk(name)]
            counts["disk_read_bytes_per_s"] = sum(one.read_bytes for one in used)
            counts["disk_write_bytes_per_s"] = sum(one.write_bytes for one in used)
        with suppress(OSError, NotImplementedError):
            links = self._psutil.net_io_counters(pernic=True, nowrap=False)
            wires = [links[name] for name in links if not name.startswith(NO_WIRES)]
            counts["net_in_bytes_per_s"] = sum(one.bytes_recv for one in wires)
            counts["net_out_bytes_per_s"] = sum(one.bytes_sent for one in wires)
        return counts


def is_whole_disk(name: str) -> bool:
    """Neither a partition nor made of other disks: each byte counts once."""
    return not name.startswith(NO_DISKS) and Path("/sys/block", name.replace("/", "!")).exists()


class Processes:
    """Who computes. A look reads one small file a process, so it is made every few seconds."""

    def __init__(self, psutil: Any) -> None:
        self._psutil = psutil
        self._cpu_s: dict[tuple[int, float], float] = {}
        self._at_s = 0.0
        self.busy: dict[int, float] = {}

    def look(self) -> None:
        """`busy`: pid -> cores since the last look, the busiest only."""
        now = time.monotonic()
        span, first = now - self._at_s, not self._at_s
        before, self._cpu_s, self._at_s = self._cpu_s, {}, now
        rows = []
        for process in self._psutil.process_iter():
            try:
                key, times = (process.pid, process.create_time()), process.cpu_times()
            except self._psutil.Error:
                continue
            self._cpu_s[key] = cpu_s = times.user + times.system
            cores = 0.0 if first else (cpu_s - before.get(key, 0.0)) / span
            if cores >= BUSY_CORES and process.pid != os.getpid():
                rows.append((cores, process.pid))
        self.busy = {pid: cores for cores, pid in sorted(rows, reverse=True)[:MOST_PROCESSES]}

    def describe(self, pid: int) -> dict[str, Any]:
        """{"pid", "person", "command", "container", "cpu_cores", "memory_bytes"}; {} where it has
        ended. "container" may be ""."""
        try:
            process = self._psutil.Process(pid)
            command = " ".join(process.cmdline()) or process.name()
            person, memory = process.username(), process.memory_info()
        except self._psutil.Error:
            return {}
        containers = CONTAINER.findall(text(Path(f"/proc/{pid}/cgroup")))
        return {
            "pid": pid,
            "person": person,
            "command": command[:COMMAND_CHARACTERS],
            "container": containers[-1] if containers else "",
            "cpu_cores": round(self.busy.get(pid, 0.0), 3),
            "memory_bytes": memory.rss,
        }

    def find_person(self, pid: int) -> str:
        """The account that a process runs as; "" where it has ended."""
        try:
            return str(self._psutil.Process(pid).username())
        except self._psutil.Error:
            return ""
