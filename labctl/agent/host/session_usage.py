"""Usage of runs without containers: of the processes in their sessions.

Such a run is described as a container, so that telemetry and `top` measure both alike.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ...wire.runs import SLURM, ProcessRecord, RunSpec
from ...wire.telemetry import ContainerUsageRecord
from ..reply import Failure
from ..runs.attempt_directories import list_attempt_directories
from ..runs.executor import LiveAttempt
from ..runs.process_executor import ProcessExecutor, read_process
from ..runs.records import read_last_attempt
from ..runs.slurm_attempts import read_attempt
from ..runs.spec import read_spec
from .container_usage import (
    ContainerUsageReader,
    DiskTraffic,
    parse_memory_limit,
    read_kernel_rows,
)
from .engine_objects import (
    Container,
    ContainerConfig,
    ContainerHostConfig,
    ContainerState,
    DeviceRequest,
    MountPoint,
)
from .host_usage import SESSION, name_session
from .sessions import is_alive, list_session

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# seconds between two readings of the memory: the kernel looks at every page for it
MEMORY_EVERY_S = 5.0


class ProcessRun:
    """A run without a container: its first process, and its description as a container."""

    # 0: all of the machine's
    memory_limit_bytes = 0

    def __init__(self, attempt: LiveAttempt, process: ProcessRecord) -> None:
        spec = read_spec(attempt.directory)
        started_at = read_last_attempt(attempt.directory).started_at or time.time()
        self.process = process
        self.container = Container(
            Id=name_session(process.pid),
            Name=f"/{attempt.name}",
            State=ContainerState(
                Pid=process.pid,
                StartedAt=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_at)),
            ),
            Config=ContainerConfig(
                Hostname=spec.lab,
                Labels={"labctl.run": attempt.run, "labctl.lab-id": attempt.lab_id},
            ),
            HostConfig=ContainerHostConfig(DeviceRequests=_list_devices(spec)),
            Mounts=(MountPoint("/lab/run", str(attempt.directory)),),
        )

    @property
    def usage_reader(self) -> SessionUsageReader:
        return SessionUsageReader(self)


def _list_devices(spec: RunSpec) -> tuple[DeviceRequest, ...]:
    if not spec.gpus:
        return ()
    capabilities = (("gpu",),)
    if spec.gpus == "all":
        return (DeviceRequest(Count=-1, Capabilities=capabilities),)
    return (DeviceRequest(DeviceIDs=tuple(spec.gpus.split(",")), Capabilities=capabilities),)


def is_session(container_id: str) -> bool:
    return container_id.startswith(SESSION)


class JobRun(ProcessRun):
    """A run that is the job of Slurm in which this program runs too.

    Its processes are those of the session of its first one, which has the job's script too. Slurm
    gives it a part of the machine, which may be less than what its processes can see.
    """

    def __init__(self, attempt: LiveAttempt, first: ProcessRecord) -> None:
        super().__init__(attempt, ProcessRecord(os.getsid(first.pid), start_ticks=0))
        job = _read_environment(first.pid)
        cpus = float(job.get("SLURM_CPUS_ON_NODE") or 0)
        gpus = job.get("CUDA_VISIBLE_DEVICES", "")
        devices = (DeviceRequest(DeviceIDs=tuple(gpus.split(",")), Capabilities=(("gpu",),)),)
        config = ContainerHostConfig(
            NanoCpus=int(cpus * 1e9), DeviceRequests=devices if gpus else ()
        )
        self.container = self.container._replace(HostConfig=config)
        per_cpu = cpus * float(job.get("SLURM_MEM_PER_CPU") or 0)
        memory_mib = float(job.get("SLURM_MEM_PER_NODE") or per_cpu)
        self.memory_limit_bytes = int(memory_mib * 1024**2)


def _read_environment(pid: int) -> dict[str, str]:
    """Return the variables with which a process of this account was started."""
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def list_process_runs() -> list[ProcessRun]:
    """List the runs of this account that live on this machine without a container."""
    runs = list_job_runs()
    for attempt in ProcessExecutor().list_live():
        process = read_process(attempt.name)
        try:
            runs += [ProcessRun(attempt, process)] if process else []
        except (Failure, OSError):
            continue  # it has been removed meanwhile, or its files are damaged
    return runs


def list_job_runs() -> list[ProcessRun]:
    """List the run whose job this program is a part of; none outside of a job."""
    job_id = os.environ.get("SLURM_JOB_ID")
    runs: list[ProcessRun] = []
    for directory in list_attempt_directories() if job_id else ():
        record = read_attempt(directory.name)
        if record is None or record.job_id != job_id:
            continue
        process = read_process(directory.name)
        try:
            if process and is_alive(process):
                where = Path(record.directory)
                attempt = LiveAttempt(SLURM, directory.name, record.run, record.lab_id, where)
                runs.append(JobRun(attempt, process))
        except (Failure, OSError):
            continue  # it has ended meanwhile, or its files are damaged
    return runs


class SessionUsageReader(ContainerUsageReader):
    """Reads the processes of a session. Network traffic is not counted for each process."""

    def __init__(self, run: ProcessRun) -> None:
        super().__init__(run.container)
        self._process = run.process
        self._memory_limit_bytes = run.memory_limit_bytes
        self._traffic: dict[tuple[int, int], DiskTraffic] = {}
        self._memory_bytes: int | None = None
        self._memory_due_s = 0.0

    def read(self) -> ContainerUsageRecord | None:
        members = list_session(self._process)
        if not members:
            return None
        if time.monotonic() >= self._memory_due_s:
            self._memory_due_s = time.monotonic() + MEMORY_EVERY_S
            self._memory_bytes = sum(map(_read_memory, members))
        for pid, stat in members.items():
            self._traffic[pid, stat.start_ticks] = _read_traffic(pid)
        cpu_ticks = sum(stat.cpu_ticks for stat in members.values())
        shm_bytes, shm_limit_bytes = self._measure_shm()
        return ContainerUsageRecord(
            cores=self.cores,
            cpu_cores=self._measure_cores(cpu_ticks / TICKS_PER_S),
            memory_bytes=self._memory_bytes,
            memory_limit_bytes=parse_memory_limit(self._memory_limit_bytes),
            shm_bytes=shm_bytes,
            shm_limit_bytes=shm_limit_bytes,
            disk_read_bytes=sum(each.read_bytes or 0 for each in self._traffic.values()),
            disk_write_bytes=sum(each.write_bytes or 0 for each in self._traffic.values()),
            processes=len(members),
        )


def _read_memory(pid: int) -> int:
    """Return the memory of a process, in which shared pages count in proportion."""
    rows = read_kernel_rows(Path(f"/proc/{pid}/smaps_rollup"))
    if "Pss:" not in rows:
        rows = {"Pss:": read_kernel_rows(Path(f"/proc/{pid}/status")).get("VmRSS:", 0)}
    return rows["Pss:"] * 1024


def _read_traffic(pid: int) -> DiskTraffic:
    rows = read_kernel_rows(Path(f"/proc/{pid}/io"))
    return DiskTraffic(rows.get("read_bytes:"), rows.get("write_bytes:"))
