"""What is read of a whole server: by psutil, and by what stands in where it is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from labctl.agent.host import proc
from labctl.agent.host.host_usage import (
    BUSY_CORES,
    HostUsageReader,
    ProcessUsage,
    is_whole_disk,
    load_psutil,
)

SOURCES = [psutil, proc]
NAMES = ["psutil", "proc"]
PROGRAM = Path(proc.__file__).parents[2]
LONGEST_WAIT_S = 60.0


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_a_second_reading_has_rates(source: Any, tmp_path: Path) -> None:
    machine = HostUsageReader(tmp_path, source)
    first, second = machine.read(), machine.read()
    rates = {"cpu_cores", "net_in_bytes_per_s", "net_out_bytes_per_s"}
    rates |= {"disk_read_bytes_per_s", "disk_write_bytes_per_s"}
    measured = {key for key, value in second._asdict().items() if value is not None}
    assert {key for key in measured if getattr(first, key) is None} == rates
    assert 0 < second.memory_bytes < second.memory_total_bytes
    assert 0 < second.disk_free_bytes <= second.disk_total_bytes
    assert all(getattr(second, key) >= 0 for key in rates)
    assert second.cores == os.cpu_count()


def test_what_cannot_be_read_is_absent(tmp_path: Path) -> None:
    class Hidden:
        """As psutil in a sandbox that hides the kernel's files."""

        virtual_memory = staticmethod(psutil.virtual_memory)

        def cpu_times(self) -> None:
            raise FileNotFoundError

        def disk_io_counters(self, perdisk: bool, nowrap: bool) -> None:
            raise NotImplementedError

        def net_io_counters(self, pernic: bool, nowrap: bool) -> dict[str, Any]:
            return {}

    machine = HostUsageReader(tmp_path, Hidden())
    machine.read()
    found = machine.read()
    assert found.cpu_cores is None
    assert found.disk_read_bytes_per_s is None
    assert found.memory_bytes > 0


@pytest.fixture
def busy_child() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass", "a b"]) as child:
        yield child.pid
        child.kill()


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_a_process_that_computes_is_found_and_described(source: Any, busy_child: int) -> None:
    processes = ProcessUsage(source)
    deadline = time.monotonic() + LONGEST_WAIT_S
    processes.refresh()
    while busy_child not in processes.busy:
        assert time.monotonic() < deadline
        time.sleep(0.05)  # what is measured is the time between two looks
        processes.refresh()
    found = processes.describe(busy_child)
    assert found is not None
    assert found.cpu_cores >= BUSY_CORES
    assert found.memory_bytes > 1024**2
    assert found.command.endswith("-c while True: pass a b")
    assert found.person == processes.find_person(os.getpid()) == psutil.Process().username()


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_a_process_that_has_ended_is_nobodys(source: Any) -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    processes = ProcessUsage(source)
    assert processes.describe(child.pid) is None
    assert processes.find_person(child.pid) == ""


def test_a_partition_counts_with_its_disk_alone() -> None:
    disks = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
    whole = {name for name in disks if is_whole_disk(name)}
    assert whole <= {entry.name for entry in Path("/sys/block").iterdir()}
    assert not is_whole_disk("dm-0")
    assert not is_whole_disk("loop0")


def test_the_stand_in_agrees_with_psutil() -> None:
    """Each of its figures lies between two readings of psutil's."""
    assert proc.virtual_memory().total == psutil.virtual_memory().total
    before, own, after = psutil.cpu_times(), proc.cpu_times(), psutil.cpu_times()
    for field in ("user", "nice", "system", "irq", "softirq"):
        assert getattr(before, field) <= getattr(own, field) <= getattr(after, field), field
    for count, word, fields in (
        ("disk_io_counters", "perdisk", ("read_bytes", "write_bytes")),
        ("net_io_counters", "pernic", ("bytes_recv", "bytes_sent")),
    ):
        low, mine, high = (
            getattr(source, count)(**{word: True, "nowrap": False})
            for source in (psutil, proc, psutil)
        )
        assert mine.keys() == low.keys()
        for name in low.keys() & high.keys():
            for field in fields:
                found = getattr(mine[name], field)
                assert getattr(low[name], field) <= found <= getattr(high[name], field), name


def test_the_stand_in_knows_a_process_as_psutil_does() -> None:
    theirs, own = psutil.Process(), proc.Process(os.getpid())
    assert own.name() == theirs.name()
    assert own.cmdline() == theirs.cmdline()
    assert own.username() == theirs.username()
    assert own.cpu_times().user <= theirs.cpu_times().user
    assert own.memory_info().rss == pytest.approx(theirs.memory_info().rss, rel=0.5)
    assert os.getpid() in {one.pid for one in proc.process_iter()}


@pytest.mark.parametrize(
    ("packages", "name"),
    [(str(Path(psutil.__file__).parents[1]), "psutil"), ("/nonexistent", "labctl.agent.host.proc")],
)
def test_psutil_is_used_where_the_distribution_has_it(packages: str, name: str) -> None:
    """As the agent starts: without the packages of the interpreter and of the account."""
    code = (
        "import sys, types; sys.modules['labctl'] = types.ModuleType('labctl')\n"
        f"sys.modules['labctl'].__path__ = [{str(PROGRAM)!r}]; before = list(sys.path)\n"
        "from labctl.agent.host.host_usage import load_psutil\n"
        f"print(load_psutil({packages!r}).__name__, sys.path == before)"
    )
    words = [sys.executable, "-I", "-S", "-W", "error", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [name, "True"]


def test_a_psutil_that_is_too_old_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ubuntu 20.04's fails at the disks of a newer kernel."""
    monkeypatch.setattr(psutil, "version_info", (5, 5, 1))
    assert load_psutil() is proc


def test_it_is_found_here() -> None:
    assert load_psutil() is psutil
