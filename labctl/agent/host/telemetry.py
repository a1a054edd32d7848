"""Telemetry of runs: a line about the container every 10 s in its logs/telemetry.jsonl.

A process of the lab's own account records it while a run lives. A run's start starts it, and the
watchdog restarts it if needed (recorder.py). It is separate from the watchdog, so that a hanging
driver or a crashing GPU library does not affect the watchdog, and so that root writes nothing into
a directory that a container writes into.
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

from ...wire.codec import to_json
from ...wire.telemetry import GpuRecord, HostUsageRecord, TelemetryRecord
from ...wire.verbs import Empty
from ..reply import Failure
from ..watchdog.activity import LabAccount
from ..watchdog.notify import notify
from . import engine
from .container_usage import ContainerUsageReader
from .docker import end_session
from .engine_objects import Container
from .gpu_access import GpuProbe
from .gpus import Gpus, select_given
from .host_usage import HostUsageReader, load_psutil
from .other_programs import OtherPrograms
from .paths import labctl_home
from .session_usage import is_session, list_process_runs

NAME = "telemetry.jsonl"
LOCKS = Path("/var/tmp")
# seconds between two lines: at first, and after LATER_AFTER_S of the run
EVERY_S, LATER_S = 10.0, 60.0
LATER_AFTER_S = 6 * 3600.0
MOST_BYTES = 8 * 1024**2
# seconds between two queries of the running runs
POLL_S = 5.0
# queries without a run after which this process ends
PATIENCE = 3


class RecordedRun:
    """One run's container, and when its next line is due.

    `reader` is for a run without a container, which is described as one.
    """

    def __init__(self, container: Container, reader: ContainerUsageReader | None = None) -> None:
        self.directory = Path(container.sources["/lab/run"])
        self.container_id = container.Id
        self.usage_reader = reader or ContainerUsageReader(container)
        self.attempt = int(container.Name.rpartition("-")[2])
        self.began_s = self.due_s = time.monotonic()
        # A plain process keeps the access to GPUs that its account has.
        has_gpu = reader is None and bool(container.HostConfig.DeviceRequests)
        self.probe = GpuProbe(container, self.directory) if has_gpu else None

    def build_line(
        self,
        gpus: list[GpuRecord],
        host: HostUsageRecord,
        programs: OtherPrograms,
        runs: dict[str, str],
    ) -> TelemetryRecord | None:
        """Measure the container; None once it has ended. `runs` are all runs, by container id."""
        usage = self.usage_reader.read()
        if usage is None:
            return None
        given = [describe_gpu(gpu, gpus) for gpu in select_given(gpus, self.usage_reader.container)]
        uuids = [gpu.uuid for gpu in given]
        return TelemetryRecord(
            at=round(time.time(), 3),
            attempt=self.attempt,
            gpus=tuple(given),
            host_cores=host.cores,
            host_cpu_cores=host.cpu_cores,
            other_runs=len(runs) - 1,
            log_bytes=_measure_log(self.directory),
            others=programs.list_beside(self.container_id, uuids, runs),
            **usage._asdict(),
        )


def _measure_log(run: Path) -> int | None:
    """Return the size of a run's log, which says later when each of its lines was written."""
    try:
        return os.lstat(run / "logs" / "run.log").st_size
    except OSError:
        return None


def describe_gpu(gpu: GpuRecord, gpus: list[GpuRecord]) -> GpuRecord:
    """Return what is recorded of a GPU. For an instance, its card supplies the missing values."""
    if not gpu.parent:
        return gpu._replace(index="")
    card = next((candidate for candidate in gpus if candidate.uuid == gpu.parent), GpuRecord())
    return gpu._replace(
        index="",
        parent="",
        temperature_c=card.temperature_c,
        sm_clock_mhz=card.sm_clock_mhz,
        sm_clock_max_mhz=card.sm_clock_max_mhz,
        throttle=card.throttle,
    )


def record(request: Empty) -> None:
    """Record telemetry until no run lives. A second process for the same home ends at once.

    The recorder of a run that starts while the first process ends finds the lock taken. So a
    process checks once more for runs after it releases the lock.
    """
    labctl_home().mkdir(exist_ok=True)
    alive = True
    while alive:
        with claim_recording(os.getuid(), labctl_home()) as is_claimed:
            if not is_claimed:
                return
            _record_until_idle()
        alive = bool(list_recorded({}))


def _record_until_idle() -> None:
    gpus = Gpus()
    psutil = load_psutil()
    host = HostUsageReader(labctl_home(), psutil)
    programs = OtherPrograms(psutil, gpus)
    recorded: dict[str, RecordedRun] = {}
    empty = 0
    while True:
        started = time.monotonic()
        before, recorded = recorded, list_recorded(recorded)
        for container_id in before.keys() - recorded.keys():
            end_session(before[container_id].directory.name)
        empty = 0 if recorded else empty + 1
        if empty == PATIENCE:
            return
        write_due(recorded, gpus, host, programs)
        probe_gpus(recorded)
        time.sleep(max(0.1, POLL_S - (time.monotonic() - started)))


@contextmanager
def claim_recording(uid: int, lab_home: Path) -> Iterator[bool]:
    """Yield whether this process now holds the only right to record the runs below `lab_home`.

    The lock is on this machine's own disk: a home may be on a network and shared with others. The
    account `uid` deletes the file at the end.
    """
    # Jobs of Slurm that share a machine have a recorder each: it sees only its own job's GPUs.
    key = f"{lab_home}{os.environ.get('SLURM_JOB_ID', '')}"
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = LOCKS / f"labctl-telemetry-{uid}-{name}"
    is_own = os.getuid() == uid
    try:
        file = _lock_file(path, os.O_CREAT if is_own else 0)
    except (FileNotFoundError, BlockingIOError) as error:
        yield isinstance(error, FileNotFoundError)
        return
    try:
        yield True
    finally:
        if is_own:
            with suppress(FileNotFoundError):
                path.unlink()
        os.close(file)


def _lock_file(path: Path, flags: int) -> int:
    """Open and lock the file at `path`; BlockingIOError while another process holds the lock."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that held the lock may have deleted the file since it was opened here.
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                os.close(file)
                raise
        except OSError:
            os.close(file)
            raise
        os.close(file)


def list_recorded(before: dict[str, RecordedRun]) -> dict[str, RecordedRun]:
    """Return every live run of this account by the id of its container or session."""
    processes = {run.container.Id: run for run in list_process_runs()}
    current = {
        session: before.get(session) or RecordedRun(run.container, run.usage_reader)
        for session, run in processes.items()
    }
    try:
        ids = list_running()
    except Failure:  # the engine is being restarted, and its containers may still run; or none
        return {**{id_: run for id_, run in before.items() if not is_session(id_)}, **current}
    for container_id in ids:
        entry = before.get(container_id)
        if entry is None:
            with suppress(Failure, ValueError):
                container = engine.inspect_container(container_id)
                entry = RecordedRun(container) if container else None
        if entry is not None and labctl_home() in entry.directory.parents:
            current[container_id] = entry
    return current


def list_running() -> list[str]:
    return [container.Id for container in engine.list_containers("labctl.run")]


def write_due(
    recorded: dict[str, RecordedRun], gpus: Gpus, host: HostUsageReader, programs: OtherPrograms
) -> None:
    now = time.monotonic()
    due = [run for run in recorded.values() if run.due_s <= now + POLL_S / 2]
    if not due:
        return
    gpu_readings, host_usage = gpus.read(wait=True), host.read()
    programs.refresh()
    runs = {container_id: run.directory.name for container_id, run in recorded.items()}
    for run in due:
        line = run.build_line(gpu_readings, host_usage, programs, runs)
        every_s = LATER_S if now - run.began_s > LATER_AFTER_S else EVERY_S
        # A machine that was suspended does not make up for missed lines.
        run.due_s = run.due_s + every_s if run.due_s + every_s > now else now + every_s
        if line is not None:
            append_line(run.directory / "logs", line)


def probe_gpus(recorded: dict[str, RecordedRun]) -> None:
    """Check whether containers still have their GPUs, and notify people if not."""
    for run in recorded.values():
        # The run may have ended, or the engine may be busy: the next round tries again.
        with suppress(Failure, OSError, ValueError, KeyError):
            if run.probe and run.probe.advance():
                text = f"the container of run {run.directory.name} has lost access to its GPU"
                text += f". To see why: labctl explain {run.directory.name}"
                logs = [run.directory / "logs" / "run.log"]
                notify(LabAccount(os.getuid(), os.getgid()), text, logs)


def append_line(logs: Path, measured: TelemetryRecord) -> bool:
    """Append a line; False if there is no room, or the file is no regular file any more.

    The run writes into this directory too, so no link is followed and only a regular file is
    written.
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
        status = os.fstat(file)
        body = to_json(measured, drop_defaults=True)
        line = json.dumps(body, separators=(",", ":")).encode() + b"\n"
        if not stat.S_ISREG(status.st_mode) or status.st_size + len(line) > MOST_BYTES:
            return False
        if status.st_size and os.pread(file, 1, status.st_size - 1) != b"\n":
            line = b"\n" + line  # the last line is incomplete: the disk was full
        return os.write(file, line) == len(line)
    except OSError:
        return False
    finally:
        os.close(file)
