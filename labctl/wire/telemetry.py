"""Measurements of a server, its GPUs, containers and processes: telemetry.jsonl and `top`.

Records are written without the fields that could not be measured, whose value is None. Counters of
disks and networks are totals since the container's start, rates are since the previous reading.
"""

from typing import NamedTuple, Optional, Tuple

from .verbs import Empty, StreamingVerb


class GpuRecord(NamedTuple):
    """A GPU. `parent` is the UUID of a MIG instance's card, and `index` is then "card:slot".

    `throttle` says what holds its clock down; `energy_j` is the total of the GPU's own counter.
    """

    index: str = ""  # type: ignore[assignment]  # the key in JSON, although tuples have `index`
    uuid: str = ""
    name: str = ""
    parent: str = ""
    use_percent: Optional[float] = None
    memory_bytes: Optional[int] = None
    memory_total_bytes: Optional[int] = None
    power_w: Optional[float] = None
    power_limit_w: Optional[float] = None
    temperature_c: Optional[float] = None
    sm_clock_mhz: Optional[float] = None
    sm_clock_max_mhz: Optional[float] = None
    throttle: Optional[Tuple[str, ...]] = None
    energy_j: Optional[float] = None


class BrokeredGpusReply(NamedTuple):
    """The GPUs of a shared server, as its broker lists them."""

    gpus: Tuple[GpuRecord, ...]


class ContainerUsageRecord(NamedTuple):
    """What a container uses. `cores` is how many it may use, `cpu_cores` how many were busy."""

    cores: float
    cpu_cores: Optional[float] = None
    memory_bytes: Optional[int] = None
    memory_limit_bytes: Optional[int] = None
    shm_bytes: Optional[int] = None
    shm_limit_bytes: Optional[int] = None
    disk_read_bytes: Optional[int] = None
    disk_write_bytes: Optional[int] = None
    net_in_bytes: Optional[int] = None
    net_out_bytes: Optional[int] = None
    processes: Optional[int] = None


class OtherProgramRecord(NamedTuple):
    """A program beside a run: its name without arguments, its account, and its run if it has one.

    `gpus` are the UUIDs of those of the run's GPUs on which it computes too.
    """

    name: str
    person: str = ""
    run: str = ""
    cpu_cores: float = 0.0
    gpus: Tuple[str, ...] = ()


class TelemetryRecord(NamedTuple):
    """A line of a run's telemetry.jsonl: the usage of its container. `at` is Unix time.

    `host_cpu_cores` of the server's `host_cores` were busy since the reading before, with this run.
    `other_runs` counts the runs of the same account that lived beside it. `others` are the busiest
    programs that are not of the run, and those on its GPUs. `log_bytes` is the size of the run's
    log.
    """

    at: float
    attempt: int
    cores: float
    cpu_cores: Optional[float] = None
    memory_bytes: Optional[int] = None
    memory_limit_bytes: Optional[int] = None
    shm_bytes: Optional[int] = None
    shm_limit_bytes: Optional[int] = None
    disk_read_bytes: Optional[int] = None
    disk_write_bytes: Optional[int] = None
    net_in_bytes: Optional[int] = None
    net_out_bytes: Optional[int] = None
    processes: Optional[int] = None
    gpus: Tuple[GpuRecord, ...] = ()
    host_cores: Optional[float] = None
    host_cpu_cores: Optional[float] = None
    other_runs: Optional[int] = None
    others: Tuple[OtherProgramRecord, ...] = ()
    log_bytes: Optional[int] = None


class TopRequest(NamedTuple):
    """Samples every `interval_s`; `samples` 0 means until the reader is gone.

    On a cluster, `job_of` is the id of the lab whose newest job's machine is measured.
    """

    interval_s: float = 1.0
    samples: int = 0
    job_of: str = ""


class TopOpening(NamedTuple):
    """The time on the server's clock, in Unix seconds."""

    now: float


class HostUsageRecord(NamedTuple):
    """What the whole server uses."""

    cores: int
    load: float
    memory_bytes: int
    memory_total_bytes: int
    disk_free_bytes: int
    disk_total_bytes: int
    cpu_cores: Optional[float] = None
    disk_read_bytes_per_s: Optional[float] = None
    disk_write_bytes_per_s: Optional[float] = None
    net_in_bytes_per_s: Optional[float] = None
    net_out_bytes_per_s: Optional[float] = None


class ContainerOwnerRecord(NamedTuple):
    """Whose container it is. `run` and `service` are "" for a container that is neither."""

    name: str = ""
    run: str = ""
    service: str = ""
    lab: str = ""
    lab_id: str = ""
    person: str = ""


class TopContainerRecord(NamedTuple):
    """A container in a sample: its owner, its usage, the UUIDs of its GPUs, a run's progress."""

    started_at: str
    cores: float
    name: str = ""
    run: str = ""
    service: str = ""
    lab: str = ""
    lab_id: str = ""
    person: str = ""
    cpu_cores: Optional[float] = None
    memory_bytes: Optional[int] = None
    memory_limit_bytes: Optional[int] = None
    shm_bytes: Optional[int] = None
    shm_limit_bytes: Optional[int] = None
    disk_read_bytes: Optional[int] = None
    disk_write_bytes: Optional[int] = None
    net_in_bytes: Optional[int] = None
    net_out_bytes: Optional[int] = None
    processes: Optional[int] = None
    gpus: Tuple[str, ...] = ()
    step: Optional[float] = None
    total_steps: Optional[float] = None


class GpuUseRecord(NamedTuple):
    uuid: str = ""
    memory_bytes: Optional[int] = None


class TopProcessRecord(NamedTuple):
    """A process that uses a CPU or a GPU, and the owner of its container, if it is in one."""

    pid: int
    command: str
    cpu_cores: float
    memory_bytes: int
    gpus: Tuple[GpuUseRecord, ...]
    person: str = ""
    name: str = ""
    run: str = ""
    service: str = ""
    lab: str = ""
    lab_id: str = ""


class TopRecord(NamedTuple):
    """A sample, one line of JSON. `at` is Unix time on the server's clock."""

    at: float
    cores: int
    load: float
    memory_bytes: int
    memory_total_bytes: int
    disk_free_bytes: int
    disk_total_bytes: int
    gpus: Tuple[GpuRecord, ...]
    runs: Tuple[TopContainerRecord, ...]
    processes: Tuple[TopProcessRecord, ...]
    cpu_cores: Optional[float] = None
    disk_read_bytes_per_s: Optional[float] = None
    disk_write_bytes_per_s: Optional[float] = None
    net_in_bytes_per_s: Optional[float] = None
    net_out_bytes_per_s: Optional[float] = None


TOP = StreamingVerb("top", TopRequest, TopOpening, Empty)
