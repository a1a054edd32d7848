"""The recorder of telemetry: what it writes, when, and what a run cannot make it write."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from labctl.agent.host import other_programs, telemetry
from labctl.agent.host.engine_objects import Container, MountPoint
from labctl.agent.host.gpus import Gpus
from labctl.agent.host.host_usage import HostUsageReader, ProcessDescription, load_psutil
from labctl.agent.host.other_programs import OtherPrograms
from labctl.agent.host.telemetry import (
    NAME,
    RecordedRun,
    append_line,
    claim_recording,
    describe_gpu,
    write_due,
)
from labctl.insight.telemetry import TELEMETRY_FILE, read_samples
from labctl.wire.codec import to_json
from labctl.wire.telemetry import ContainerUsageRecord, GpuRecord, TelemetryRecord
from labctl.wire.verbs import Empty

# Nothing is read of processes.
NO_PROGRAMS = SimpleNamespace(refresh=lambda: None, list_beside=lambda *_: ())
LINE = TelemetryRecord(at=1.0, attempt=1, cores=2.0)


def test_the_file_is_the_one_that_is_read(tmp_path: Path) -> None:
    assert NAME == TELEMETRY_FILE
    assert append_line(tmp_path, LINE)
    assert append_line(tmp_path, LINE._replace(at=11.0))
    assert [one.at for one in read_samples(tmp_path / NAME)] == [1.0, 11.0]
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) & 0o600 == 0o600


def test_a_line_that_a_full_disk_cut_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b'{"at":1.0}\n{"at":2.0,"cpu_co')
    assert append_line(tmp_path, LINE._replace(at=3.0))
    assert [one.at for one in read_samples(tmp_path / NAME)] == [1.0, 3.0]


def test_it_ends_at_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MOST_BYTES", 80)
    wrote = [append_line(tmp_path, LINE) for _ in range(5)]
    assert wrote == [True, True, False, False, False]
    assert (tmp_path / NAME).stat().st_size <= 80


@pytest.mark.parametrize("trap", ["link", "dangling link", "folder", "pipe", "linked logs"])
def test_a_run_cannot_have_it_write_elsewhere(tmp_path: Path, trap: str) -> None:
    logs, aim = tmp_path / "logs", tmp_path / "aim"
    logs.mkdir()
    aim.mkdir()
    (aim / NAME).write_text("mine\n")
    if trap == "link":
        (logs / NAME).symlink_to(aim / NAME)
    elif trap == "dangling link":
        (logs / NAME).symlink_to(aim / "new")
    elif trap == "folder":
        (logs / NAME).mkdir()
    elif trap == "pipe":
        os.mkfifo(logs / NAME)
    else:
        logs.rmdir()
        logs.symlink_to(aim)
    assert not append_line(logs, LINE)
    assert (aim / NAME).read_text() == "mine\n"
    assert not (aim / "new").exists()


def test_no_logs_is_no_line(tmp_path: Path) -> None:
    assert not append_line(tmp_path / "gone", LINE)


def test_one_records_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "LOCKS", tmp_path)
    with claim_recording(os.getuid(), Path("/home/a/labctl")) as first:
        assert first
        with claim_recording(os.getuid(), Path("/home/a/labctl")) as second:
            assert not second
        with claim_recording(os.getuid(), Path("/home/b/labctl")) as other:
            assert other
    with claim_recording(os.getuid(), Path("/home/a/labctl")) as again:
        assert again
    assert list(tmp_path.iterdir()) == [], "nothing stays on a machine that nobody uses"


def test_a_file_that_its_holder_has_deleted_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is opened before the holder deletes it, and locked afterwards."""
    monkeypatch.setattr(telemetry, "LOCKS", tmp_path)
    opened, lock = [], telemetry.fcntl.flock

    def delete_first(file: int, how: int) -> None:
        if not opened:
            next(tmp_path.iterdir()).unlink()
        opened.append(file)
        lock(file, how)

    monkeypatch.setattr(telemetry.fcntl, "flock", delete_first)
    with claim_recording(os.getuid(), Path("/home/a/labctl")) as first:
        assert first
        assert len(opened) == 2
        with claim_recording(os.getuid(), Path("/home/a/labctl")) as second:
            assert not second


def test_a_run_that_begins_while_the_recorder_ends_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "LOCKS", tmp_path)
    monkeypatch.setattr(telemetry, "labctl_home", lambda: tmp_path / "labctl")
    monkeypatch.setattr(telemetry.time, "sleep", lambda s: None)
    run: Any = SimpleNamespace(directory=tmp_path / "night-3")
    none: dict[str, Any] = {}
    # It ends after three empty lists; the fourth is after it has let go of the lock.
    run_lists = [none, none, none, {"a": run}, {"a": run}, none, none, none, none]
    due: list[int] = []
    monkeypatch.setattr(telemetry, "list_recorded", lambda before: run_lists.pop(0))
    monkeypatch.setattr(telemetry, "write_due", lambda runs, *readers: due.append(len(runs)))
    monkeypatch.setattr(telemetry, "probe_gpus", lambda runs: None)
    sessions_ended: list[str] = []
    monkeypatch.setattr(telemetry, "end_session", sessions_ended.append)
    telemetry.record(Empty())
    assert sum(due) == 1
    assert sessions_ended == ["night-3"]
    assert run_lists == []


def test_who_only_looks_makes_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "LOCKS", tmp_path)
    with claim_recording(os.getuid() + 1, Path("/home/a/labctl")) as free:
        assert free
    assert not list(tmp_path.iterdir())


class Readings:
    """Gauges that tell each of these, then that the container has ended."""

    def __init__(self, *found: ContainerUsageRecord) -> None:
        self.container = Container()
        self.found = list(found)

    def read(self) -> ContainerUsageRecord | None:
        return self.found.pop(0) if self.found else None


def recorded(directory: Path, readings: Readings, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    monkeypatch.setattr(telemetry, "ContainerUsageReader", lambda container: readings)
    (directory / "logs").mkdir(parents=True)
    mounts = (MountPoint("/lab/run", str(directory)),)
    return RecordedRun(Container(Mounts=mounts, Name="/digits-night-3"))


def test_a_line_is_due_every_ten_seconds_and_later_every_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: now[0])
    one = recorded(
        tmp_path,
        Readings(*[ContainerUsageRecord(2.0, processes=n) for n in range(99)]),
        monkeypatch,
    )
    due, host = [], host_reader(tmp_path)
    for moment in (0, 5, 10, 15, 20, 6 * 3600 + 20, 6 * 3600 + 30, 6 * 3600 + 80):
        now[0] = 1000.0 + moment
        before = len(read_samples(tmp_path / "logs" / NAME))
        write_due({"id": one}, Gpus(_no_library), host, NO_PROGRAMS)
        if len(read_samples(tmp_path / "logs" / NAME)) > before:
            due.append(moment)
    assert due == [0, 10, 20, 6 * 3600 + 20, 6 * 3600 + 80]


def test_an_ended_container_leaves_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = recorded(tmp_path, Readings(), monkeypatch)
    write_due({"id": one}, Gpus(_no_library), host_reader(tmp_path), NO_PROGRAMS)
    assert not (tmp_path / "logs" / NAME).exists()


def test_a_line_names_its_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = recorded(tmp_path, Readings(ContainerUsageRecord(2.0, 1.5, 7)), monkeypatch)
    write_due({"id": one}, Gpus(_no_library), host_reader(tmp_path), NO_PROGRAMS)
    (sample,) = read_samples(tmp_path / "logs" / NAME)
    assert (sample.attempt, sample.cpu_cores, sample.memory_bytes) == (3, 1.5, 7)
    assert json.loads((tmp_path / "logs" / NAME).read_text()).keys() == {
        "at",
        "attempt",
        "cores",
        "cpu_cores",
        "memory_bytes",
        "host_cores",
        "other_runs",
    }


def test_a_line_has_the_size_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = recorded(tmp_path, Readings(ContainerUsageRecord(2.0, 0.5)), monkeypatch)
    (tmp_path / "logs" / "run.log").write_text("Collecting torch\n")
    write_due({"id": one}, Gpus(_no_library), host_reader(tmp_path), NO_PROGRAMS)
    (sample,) = read_samples(tmp_path / "logs" / NAME)
    assert sample.log_bytes == 17


def test_a_line_has_the_load_of_the_server_and_the_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = ContainerUsageRecord(2.0, 0.5)
    one = recorded(tmp_path / "one", Readings(usage), monkeypatch)
    two = recorded(tmp_path / "two", Readings(usage), monkeypatch)
    host = host_reader(tmp_path)
    host.read()
    write_due({"1": one, "2": two}, Gpus(_no_library), host, NO_PROGRAMS)
    (sample,) = read_samples(tmp_path / "two" / "logs" / NAME)
    assert (sample.host_cores, sample.other_runs) == (os.cpu_count(), 1)
    assert sample.log_bytes is None
    assert sample.host_cpu_cores is not None
    assert sample.host_cpu_cores >= 0


def test_the_programs_beside_a_run_are_named_without_their_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(other_programs, "MOST_NAMED", 99)
    programs = OtherPrograms(load_psutil(), Gpus(_no_library))
    words = ["busy-beside", "-c", "while True: pass", "a secret"]
    with subprocess.Popen(words, executable=sys.executable) as child:
        deadline = time.monotonic() + 60
        found = None
        try:
            while found is None:
                assert time.monotonic() < deadline
                programs.refresh()
                others = programs.list_beside("the run's own container", (), {})
                found = next((other for other in others if other.name == "busy-beside"), None)
        finally:
            child.kill()
    assert found.person
    assert found.cpu_cores > 0
    assert "secret" not in repr(others)


def test_of_other_programs_the_busiest_and_those_on_the_gpu_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs = OtherPrograms(load_psutil(), Gpus(_no_library))
    rows = [("own", "train"), ("b", "make -j"), ("b", "make -k"), ("", "x"), ("", "y"), ("", "gpu")]
    programs._processes = [
        ProcessDescription(pid, "bob", command, container, 9.0 - pid, 0)
        for pid, (container, command) in enumerate(rows)
    ]
    programs._on_gpus = {0: {"GPU-1"}, 4: {"GPU-2"}, 5: {"GPU-1"}}
    found = programs.list_beside("own", ("GPU-1",), {"own": "night", "b": "second"})
    assert [(other.name, other.run, other.gpus) for other in found] == [
        ("make", "second", ()),
        ("x", "", ()),
        ("y", "", ()),
        ("gpu", "", ("GPU-1",)),
    ]
    assert found[0].cpu_cores == 8.0 + 7.0


def host_reader(disk: Path) -> HostUsageReader:
    return HostUsageReader(disk, load_psutil())


def _no_library() -> None:
    """As `open_nvml` on a machine without NVIDIA's library."""


def test_an_instance_is_told_with_its_card_s_heat() -> None:
    card = GpuRecord("0", "GPU-1", temperature_c=71, use_percent=90, power_w=300)
    part = GpuRecord("0:1", "MIG-1", parent="GPU-1", memory_bytes=5)
    assert to_json(describe_gpu(part, [card, part]), drop_defaults=True) == {
        "uuid": "MIG-1",
        "memory_bytes": 5,
        "temperature_c": 71,
    }
    assert to_json(describe_gpu(card, [card, part]), drop_defaults=True) == {
        "uuid": "GPU-1",
        "temperature_c": 71,
        "use_percent": 90,
        "power_w": 300,
    }
