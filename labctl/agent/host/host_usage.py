"""Usage of the whole server, by psutil: cores, memory, disks, network, processes, people.

Rates are per second since the previous reading; the first reading has no rates. Values that cannot
be read are None.
"""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...wire.telemetry import HostUsageRecord
from .container_usage import read_kernel_text

PACKAGES = "/usr/lib/python3/dist-packages"
# Earlier versions, such as Ubuntu 20.04's, cannot parse the disk statistics of newer kernels.
OLDEST_PSUTIL = (5, 7)
NO_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "nbd")
# Traffic counts once, at the interface by which it leaves the server.
NO_WIRES = ("lo", "veth", "docker", "br-", "virbr", "cni", "tap")
CONTAINER = re.compile(r"[0-9a-f]{64}")
BUSY_CORES = 0.05
MOST_PROCESSES = 12
COMMAND_CHARACTERS = 160
SESSION = "session-"


def load_psutil(packages: str = PACKAGES) -> Any:
    """Return the distribution's psutil, which `python3 -S` does not find, or proc.py instead."""
    from . import proc

    sys.path.append(packages)
    try:
        import psutil
    except ImportError:
        return proc
    finally:
        sys.path.remove(packages)
    return psutil if psutil.version_info >= OLDEST_PSUTIL else proc


class HostUsageReader:
    """Readings of the server, each compared with the previous one."""

    def __init__(self, disk: Path, psutil: Any) -> None:
        self.disk = disk
        self._psutil = psutil
        self._before: dict[str, float] = {}
        self._at_s = 0.0

    def read(self) -> HostUsageRecord:
        memory = self._psutil.virtual_memory()
        disk = os.statvfs(self.disk)
        now = time.monotonic()
        counts = self._count()
        span, previous = now - self._at_s, self._before
        rates = {key: (counts[key] - previous[key]) / span for key in counts if key in previous}
        self._before, self._at_s = counts, now
        cpu_cores = rates.pop("cpu_cores", None)
        usage = HostUsageRecord(
            cores=os.cpu_count() or 1,
            load=round(os.getloadavg()[0], 2),
            memory_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            disk_free_bytes=disk.f_bavail * disk.f_frsize,
            disk_total_bytes=disk.f_blocks * disk.f_frsize,
            cpu_cores=None if cpu_cores is None else round(max(0.0, cpu_cores), 3),
        )
        return usage._replace(**{key: round(max(0.0, rate)) for key, rate in rates.items()})

    def _count(self) -> dict[str, float]:
        """Return totals since the server started, by the field of the rate that they make."""
        counts: dict[str, float] = {}
        with suppress(OSError, NotImplementedError):
            times = self._psutil.cpu_times()
            # Everything except idle time, waiting for a disk, and time stolen by a hypervisor.
            busy = times.user + times.nice + times.system + times.irq + times.softirq
            counts["cpu_cores"] = busy
        with suppress(OSError, NotImplementedError):
            disks = self._psutil.disk_io_counters(perdisk=True, nowrap=False)
            whole_disks = [disks[name] for name in disks if is_whole_disk(name)]
            counts["disk_read_bytes_per_s"] = sum(counter.read_bytes for counter in whole_disks)
            counts["disk_write_bytes_per_s"] = sum(counter.write_bytes for counter in whole_disks)
        with suppress(OSError, NotImplementedError):
            links = self._psutil.net_io_counters(pernic=True, nowrap=False)
            wires = [links[name] for name in links if not name.startswith(NO_WIRES)]
            counts["net_in_bytes_per_s"] = sum(counter.bytes_recv for counter in wires)
            counts["net_out_bytes_per_s"] = sum(counter.bytes_sent for counter in wires)
        return counts


def is_whole_disk(name: str) -> bool:
    """Return whether it is neither a partition nor made of other disks: each byte counts once."""
    return not name.startswith(NO_DISKS) and Path("/sys/block", name.replace("/", "!")).exists()


class ProcessDescription(NamedTuple):
    """A process: the account that it runs as, and the id of its container, or "".

    `session` is the name of its session, which identifies a run without a container.
    """

    pid: int
    person: str
    command: str
    container: str
    cpu_cores: float
    memory_bytes: int
    session: str = ""

    def belongs_to(self, owner: str) -> bool:
        """Return whether it is in this container or session."""
        return owner in (self.container, self.session)


def name_session(session: int) -> str:
    """Return the id of a session, beside the ids of containers."""
    return f"{SESSION}{session}"


class ProcessUsage:
    """Processes by CPU use.

    An update reads one small file a process, so it runs every few seconds.
    """

    def __init__(self, psutil: Any) -> None:
        self._psutil = psutil
        self._cpu_s: dict[tuple[int, float], float] = {}
        self._at_s = 0.0
        self.busy: dict[int, float] = {}

    def refresh(self) -> None:
        """Set `busy`: pid -> cores since the last call, only the busiest MOST_PROCESSES."""
        now = time.monotonic()
        span, is_first = now - self._at_s, not self._at_s
        previous, self._cpu_s, self._at_s = self._cpu_s, {}, now
        rows = []
        for process in self._psutil.process_iter():
            try:
                key, times = (process.pid, process.create_time()), process.cpu_times()
            except self._psutil.Error:
                continue
            self._cpu_s[key] = cpu_s = times.user + times.system
            cores = 0.0 if is_first else (cpu_s - previous.get(key, 0.0)) / span
            if cores >= BUSY_CORES and process.pid != os.getpid():
                rows.append((cores, process.pid))
        self.busy = {pid: cores for cores, pid in sorted(rows, reverse=True)[:MOST_PROCESSES]}

    def describe(self, pid: int) -> ProcessDescription | None:
        """Describe a process; None if it has ended."""
        try:
            process = self._psutil.Process(pid)
            command = " ".join(process.cmdline()) or process.name()
            person, memory = process.username(), process.memory_info()
        except self._psutil.Error:
            return None
        containers = CONTAINER.findall(read_kernel_text(Path(f"/proc/{pid}/cgroup")))
        return ProcessDescription(
            pid=pid,
            person=person,
            command=command[:COMMAND_CHARACTERS],
            container=containers[-1] if containers else "",
            cpu_cores=round(self.busy.get(pid, 0.0), 3),
            memory_bytes=memory.rss,
            session=_find_session(pid),
        )

    def find_person(self, pid: int) -> str:
        """Return the account that a process runs as; "" if it has ended."""
        try:
            return str(self._psutil.Process(pid).username())
        except self._psutil.Error:
            return ""


def _find_session(pid: int) -> str:
    try:
        return name_session(os.getsid(pid))
    except OSError:
        return ""
