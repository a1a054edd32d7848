"""Usage of a container, read from its control group (v1 and v2) and its first process's files.

A container's own files are read through /proc, since a request to the Docker Engine takes some
20 ms. Values that cannot be read are None.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from ...wire.telemetry import ContainerUsageRecord
from .engine_objects import Container

GROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "cpuacct", "blkio")
# Control groups v1 write about this number if there is no limit.
NO_LIMIT = 2**60


class DiskTraffic(NamedTuple):
    """Bytes read and written in total."""

    read_bytes: int | None = None
    write_bytes: int | None = None


class NetworkTraffic(NamedTuple):
    """Bytes received and sent in total."""

    in_bytes: int | None = None
    out_bytes: int | None = None


class GroupUsage(NamedTuple):
    """What a control group reports. `processes` is None for a version 2 group without any."""

    cpu_s: float | None
    memory_bytes: int | None
    memory_limit_bytes: int | None
    disk: DiskTraffic
    processes: int | None


class ContainerUsageReader:
    """A running container. `read` is cheap; None once it has ended.

    `cpu_cores` needs two readings.
    """

    def __init__(self, container: Container) -> None:
        self.container = container
        self.pid = container.State.Pid
        self.proc = Path(f"/proc/{self.pid}")
        self.group = find_group(self.proc)
        cpus = container.HostConfig.NanoCpus / 1e9
        self.cores = cpus or count_usable_cores(self.pid)
        self._cpu_s: float | None = None
        self._at_s = 0.0

    def read(self) -> ContainerUsageRecord | None:
        if self.group is None or not self.group.is_alive():
            return None
        group = self.group.read()
        cpu_cores = self._measure_cores(group.cpu_s)
        shm_bytes, shm_limit_bytes = self._measure_shm()
        network = parse_network(self.proc / "net/dev")
        return ContainerUsageRecord(
            cores=self.cores,
            cpu_cores=cpu_cores,
            memory_bytes=group.memory_bytes,
            memory_limit_bytes=group.memory_limit_bytes,
            shm_bytes=shm_bytes,
            shm_limit_bytes=shm_limit_bytes,
            disk_read_bytes=group.disk.read_bytes,
            disk_write_bytes=group.disk.write_bytes,
            net_in_bytes=network.in_bytes,
            net_out_bytes=network.out_bytes,
            processes=group.processes,
        )

    def _measure_cores(self, cpu_s: float | None) -> float | None:
        """Return the cores that were busy since the last call; None for the first one."""
        if cpu_s is None:
            return None
        now = time.monotonic()
        cpu_cores = None
        if self._cpu_s is not None and now > self._at_s:
            cpu_cores = round(max(0.0, cpu_s - self._cpu_s) / (now - self._at_s), 3)
        self._cpu_s, self._at_s = cpu_s, now
        return cpu_cores

    def _measure_shm(self) -> tuple[int | None, int | None]:
        """Return the bytes used in /dev/shm, and its size."""
        try:
            shm = os.statvfs(self.proc / "root/dev/shm")
        except OSError:
            return None, None
        return (shm.f_blocks - shm.f_bfree) * shm.f_frsize, shm.f_blocks * shm.f_frsize


class CgroupV1:
    """Control groups v1: a folder for each controller."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders

    def is_alive(self) -> bool:
        return bool(read_kernel_text(self.folders["memory"] / "cgroup.procs"))

    def read(self) -> GroupUsage:
        memory = self.folders["memory"]
        cpu_ns, disk = None, DiskTraffic()
        if "cpuacct" in self.folders:
            cpu_ns = read_kernel_number(self.folders["cpuacct"] / "cpuacct.usage")
        if "blkio" in self.folders:
            disk = parse_disk_v1(
                read_kernel_text(self.folders["blkio"] / "blkio.throttle.io_service_bytes")
            )
        return GroupUsage(
            cpu_s=None if cpu_ns is None else cpu_ns / 1e9,
            memory_bytes=parse_memory(
                read_kernel_number(memory / "memory.usage_in_bytes"),
                read_kernel_rows(memory / "memory.stat"),
                ("total_inactive_file", "total_active_file"),
            ),
            memory_limit_bytes=parse_memory_limit(
                read_kernel_number(memory / "memory.limit_in_bytes")
            ),
            disk=disk,
            processes=len(read_kernel_text(memory / "cgroup.procs").split()),
        )


class CgroupV2:
    """Control groups v2: one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def is_alive(self) -> bool:
        return "populated 1" in read_kernel_text(self.folder / "cgroup.events")

    def read(self) -> GroupUsage:
        cpu_us = read_kernel_rows(self.folder / "cpu.stat").get("usage_usec")
        return GroupUsage(
            cpu_s=None if cpu_us is None else cpu_us / 1e6,
            memory_bytes=parse_memory(
                read_kernel_number(self.folder / "memory.current"),
                read_kernel_rows(self.folder / "memory.stat"),
                ("inactive_file", "active_file"),
            ),
            memory_limit_bytes=parse_memory_limit(read_kernel_number(self.folder / "memory.max")),
            disk=parse_disk_v2(read_kernel_text(self.folder / "io.stat")),
            processes=len(read_kernel_text(self.folder / "cgroup.procs").split()) or None,
        )


def find_group(proc: Path, groups: Path = GROUPS) -> CgroupV1 | CgroupV2 | None:
    """Return the cgroup (v1 or v2) of a process; None if neither can be read.

    Paths as this machine sees them are tried first, then paths as the container sees them: a lab
    server that is itself a container may not see the whole tree.
    """
    paths = {}
    for row in read_kernel_text(proc / "cgroup").splitlines():
        _, controllers, path = row.split(":", 2)
        for controller in controllers.split(",") if controllers else [""]:
            paths[controller] = path.lstrip("/")
    container_root = proc / "root" / str(groups).lstrip("/")
    for folder in (groups / paths.get("", ""), container_root):
        if read_kernel_number(folder / "memory.current") is not None:
            return CgroupV2(folder)
    host_folders = {name: groups / name / paths.get(name, "-") for name in CONTROLLERS}
    for folders in (host_folders, {name: container_root / name for name in CONTROLLERS}):
        if read_kernel_number(folders["memory"] / "memory.usage_in_bytes") is not None:
            return CgroupV1({name: path for name, path in folders.items() if path.is_dir()})
    return None


def parse_memory(
    usage: int | None, stat: dict[str, int], file_pages: tuple[str, ...]
) -> int | None:
    """Return the memory in use without file caches, which the kernel drops when it needs room."""
    if usage is None:
        return None
    return max(0, usage - sum(stat.get(name, 0) for name in file_pages))


def parse_memory_limit(own_limit: int | None) -> int | None:
    """Return the container's own limit, or all of the machine's memory."""
    machine_total = read_kernel_rows(Path("/proc/meminfo")).get("MemTotal:", 0) * 1024
    limits = [size for size in (own_limit, machine_total) if size and size < NO_LIMIT]
    return min(limits) if limits else None


def parse_disk_v1(content: str) -> DiskTraffic:
    """Parse lines `8:0 Read 4096` and a total, which is the only line if no disk was used."""
    words = [row.split() for row in content.splitlines()]
    if not words:
        return DiskTraffic()
    read = sum(int(row[2]) for row in words if len(row) == 3 and row[1] == "Read")
    written = sum(int(row[2]) for row in words if len(row) == 3 and row[1] == "Write")
    return DiskTraffic(read, written)


def parse_disk_v2(content: str) -> DiskTraffic:
    """Parse lines `8:0 rbytes=4096 wbytes=0 ...`."""
    pairs = [word.partition("=") for row in content.splitlines() for word in row.split()[1:]]
    read = sum(int(value) for key, _, value in pairs if key == "rbytes")
    written = sum(int(value) for key, _, value in pairs if key == "wbytes")
    return DiskTraffic(read, written) if pairs else DiskTraffic()


def parse_network(path: Path) -> NetworkTraffic:
    """Return the bytes received and sent over every interface except the loopback."""
    counters: list[list[str]] = []
    for row in read_kernel_text(path).splitlines()[2:]:
        name, _, counts = row.partition(":")
        if name.strip() != "lo":
            counters.append(counts.split())
    if not counters:
        return NetworkTraffic()
    return NetworkTraffic(
        sum(int(row[0]) for row in counters), sum(int(row[8]) for row in counters)
    )


def count_usable_cores(pid: int) -> float:
    try:
        return float(len(os.sched_getaffinity(pid)))
    except OSError:
        return float(os.cpu_count() or 1)


def read_kernel_text(path: Path) -> str:
    """Read a small kernel file; "" if it cannot be read."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (half the cost, some 30 times a second)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def read_kernel_number(path: Path) -> int | None:
    """Read a number; None if the file has none ("max" is not a number)."""
    content = read_kernel_text(path).strip()
    return int(content) if content.isdigit() else None


def read_kernel_rows(path: Path) -> dict[str, int]:
    """Parse lines `name 42`, ignoring the rest of each line."""
    values = {}
    for row in read_kernel_text(path).splitlines():
        words = row.split(None, 2)
        if len(words) > 1 and words[1].isdigit():
            values[words[0]] = int(words[1])
    return values
