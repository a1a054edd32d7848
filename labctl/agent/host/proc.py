"""The part of psutil that labctl uses, read from /proc, for servers without psutil.

tests/unit/test_machine.py compares its figures with psutil's.
"""

from __future__ import annotations

import os
import pwd
from functools import lru_cache
from pathlib import Path
from typing import Iterator, NamedTuple

from .container_usage import read_kernel_rows, read_kernel_text

SECTOR_BYTES = 512
TICKS_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Error(Exception):
    """A process that has ended, or that this account may not read."""


class CpuTimes(NamedTuple):
    user: float
    nice: float
    system: float
    idle: float
    iowait: float
    irq: float
    softirq: float


class Memory(NamedTuple):
    total: int
    available: int


class DiskIo(NamedTuple):
    read_bytes: int
    write_bytes: int


class NetIo(NamedTuple):
    bytes_recv: int
    bytes_sent: int


class ProcessTimes(NamedTuple):
    user: float
    system: float


class ProcessMemory(NamedTuple):
    rss: int


class Process:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fields = read_kernel_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        if len(self._fields) < 22:
            raise Error(pid)

    def create_time(self) -> float:
        return int(self._fields[19]) / TICKS_S

    def cpu_times(self) -> ProcessTimes:
        return ProcessTimes(int(self._fields[11]) / TICKS_S, int(self._fields[12]) / TICKS_S)

    def memory_info(self) -> ProcessMemory:
        return ProcessMemory(int(self._fields[21]) * PAGE_BYTES)

    def name(self) -> str:
        return read_kernel_text(Path(f"/proc/{self.pid}/comm")).strip()

    def cmdline(self) -> list[str]:
        words = read_kernel_text(Path(f"/proc/{self.pid}/cmdline")).rstrip("\0")
        return words.split("\0") if words else []

    def username(self) -> str:
        try:
            return _account_name(Path(f"/proc/{self.pid}").stat().st_uid)
        except OSError:
            raise Error(self.pid) from None


@lru_cache(maxsize=256)
def _account_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def process_iter() -> Iterator[Process]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                yield Process(int(entry.name))
            except Error:
                continue


def cpu_times() -> CpuTimes:
    words = read_kernel_text(Path("/proc/stat")).split("\n", 1)[0].split()[1:8]
    if len(words) < 7:
        raise NotImplementedError
    return CpuTimes(*(int(word) / TICKS_S for word in words))


def virtual_memory() -> Memory:
    memory = read_kernel_rows(Path("/proc/meminfo"))
    return Memory(memory.get("MemTotal:", 0) * 1024, memory.get("MemAvailable:", 0) * 1024)


def disk_io_counters(perdisk: bool, nowrap: bool) -> dict[str, DiskIo]:
    counts = (row.split() for row in read_kernel_text(Path("/proc/diskstats")).splitlines())
    return {
        row[2]: DiskIo(int(row[5]) * SECTOR_BYTES, int(row[9]) * SECTOR_BYTES)
        for row in counts
        if len(row) > 9
    }


def net_io_counters(pernic: bool, nowrap: bool) -> dict[str, NetIo]:
    links = (row.partition(":") for row in read_kernel_text(Path("/proc/net/dev")).splitlines()[2:])
    counts = {name.strip(): words.split() for name, _, words in links}
    return {name: NetIo(int(row[0]), int(row[8])) for name, row in counts.items()}
