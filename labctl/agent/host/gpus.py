"""Measurements of the server's GPUs, from NVIDIA's library or else nvidia-smi.

Values that could not be measured are None. A server without a GPU has an empty list.
"""

from __future__ import annotations

import ctypes
import resource
import shutil
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from ...wire.codec import MessageError, decode
from ...wire.telemetry import BrokeredGpusReply, GpuRecord
from ..broker.detection import is_brokered, is_in_job
from ..reply import Failure
from .engine_objects import Container

if TYPE_CHECKING:
    from .nvml import Nvml

MIB = 1024**2
LIBRARY = "libnvidia-ml.so.1"
# nvmlClocksEventReasons: the board's power cap; software and hardware heat limits; the board's own
# protection and its power brake. An idle clock, or one that somebody set, is not throttled.
THROTTLES = ((0x04, "power"), (0x20 | 0x40, "thermal"), (0x08 | 0x80, "hardware"))


class GpuProcess(NamedTuple):
    """A compute process on one GPU. `memory_bytes` is None if the driver does not report it."""

    uuid: str
    pid: int
    memory_bytes: int | None = None


def describe_throttling(reasons: int) -> tuple[str, ...]:
    """Return the words for what holds a clock down, from the driver's bits."""
    return tuple(word for bits, word in THROTTLES if reasons & bits)


# nvidia-smi's field, the field of GpuRecord, and the parser of its text (without units)
FIELDS: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
    ("index", "index", str),
    ("uuid", "uuid", str),
    ("name", "name", str),
    ("utilization.gpu", "use_percent", float),
    ("memory.used", "memory_bytes", lambda text: round(float(text) * MIB)),
    ("memory.total", "memory_total_bytes", lambda text: round(float(text) * MIB)),
    ("power.draw", "power_w", float),
    ("enforced.power.limit", "power_limit_w", float),
    ("temperature.gpu", "temperature_c", float),
    ("clocks.sm", "sm_clock_mhz", float),
    ("clocks.max.sm", "sm_clock_max_mhz", float),
    ("clocks_throttle_reasons.active", "throttle", lambda text: describe_throttling(int(text, 16))),
)
CSV = "--format=csv,noheader,nounits"
ANSWER_S = 20.0
SHARE, LONGEST_REST_S = 0.005, 30.0


def open_nvml() -> Nvml | None:
    """Open NVIDIA's library; None if it is not installed or no driver is loaded."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return None  # spares a server without a GPU the 16 MiB of the bindings
    from pynvml import NVMLError

    from .nvml import Nvml

    try:
        return Nvml()
    except NVMLError:
        return None


class Gpus:
    """Reader of the server's GPUs, which opens the library at the first reading.

    `read` takes at most SHARE of a core in the long run: if a reading costs more (many cards, or a
    process because there is no library), the last result is returned again for some seconds.
    """

    def __init__(self, open_library: Callable[[], Nvml | None] = open_nvml) -> None:
        self._open_library = open_library
        self._nvml: Nvml | None = None
        self._tool: NvidiaSmi | BrokeredGpus | None = None
        self._opened = False
        self._last: list[GpuRecord] = []
        self._pace = ReadingInterval()

    def read(self, wait: bool = False) -> list[GpuRecord]:
        """Return the GPUs. With `wait`, wait for a query that nvidia-smi has just started."""
        self._open()
        if self._tool:
            return self._tool.read(wait)
        if self._nvml and self._pace.is_due():
            started = time.thread_time()
            self._last = self._nvml.read()
            self._pace.record_cost(time.thread_time() - started)
        return self._last

    def list_processes(self) -> list[GpuProcess]:
        """List the compute processes of each GPU."""
        self._open()
        if self._nvml:
            return self._nvml.list_processes()
        return self._tool.list_processes() if self._tool else []

    def _open(self) -> None:
        if self._opened:
            return
        self._opened = True
        if is_brokered() and not is_in_job():
            self._tool = BrokeredGpus()
            return
        self._nvml = self._open_library()
        if self._nvml is None:
            program = shutil.which("nvidia-smi")
            self._tool = NvidiaSmi(program) if program else None


class BrokeredGpus:
    """The GPUs of a shared server, reported by its broker: accounts cannot open the devices."""

    def read(self, wait: bool) -> list[GpuRecord]:
        from . import engine  # imported only where it is needed

        try:
            return list(decode(BrokeredGpusReply, engine.call("GET", "/labctl/gpus")).gpus)
        except (Failure, MessageError):
            return []

    def list_processes(self) -> list[GpuProcess]:
        """Return nothing: other accounts' processes are private, and the broker reports no pids."""
        return []


class ReadingInterval:
    """The interval between readings: they take at most SHARE of a core."""

    def __init__(self) -> None:
        self._due_s = 0.0
        self._first = True

    def is_due(self) -> bool:
        return time.monotonic() >= self._due_s

    def record_cost(self, cpu_s: float) -> None:
        """Note a reading's cost. The first one wakes the driver, so its cost does not count."""
        rest = 0.0 if self._first else min(LONGEST_REST_S, cpu_s / SHARE)
        self._first = False
        self._due_s = time.monotonic() + rest


class NvidiaSmi:
    """nvidia-smi. It uses a core for tens of milliseconds, or for seconds if the driver slept.

    So a thread runs it, one query at a time.
    """

    def __init__(self, program: str) -> None:
        self.program = program
        self.fields = FIELDS
        self._gpus: list[GpuRecord] = []
        self._processes: list[GpuProcess] = []
        self._query_thread: threading.Thread | None = None
        self._pace = ReadingInterval()

    def read(self, wait: bool) -> list[GpuRecord]:
        """Return the last result; only the very first query is waited for."""
        first = self._query_thread is None
        if self._query_thread is None or (
            not self._query_thread.is_alive() and self._pace.is_due()
        ):
            self._query_thread = threading.Thread(target=self._query_all, daemon=True)
            self._query_thread.start()
        if first or wait:
            self._query_thread.join(ANSWER_S)
        return self._gpus

    def list_processes(self) -> list[GpuProcess]:
        return self._processes

    def _query_all(self) -> None:
        cpu_before_s = _children_cpu_s()
        rows = self._run_query(f"--query-gpu={','.join(name for name, _, _ in self.fields)}")
        if rows is None and self.fields is FIELDS:
            # A driver that has another name for the last field rejects the whole query.
            self.fields = FIELDS[:-1]
            rows = self._run_query(f"--query-gpu={','.join(name for name, _, _ in self.fields)}")
        self._gpus = [parse_row(row, self.fields) for row in rows or []]
        process_rows = (
            self._run_query("--query-compute-apps=gpu_uuid,pid,used_memory") if rows else []
        )
        self._processes = [process for row in process_rows or [] for process in _parse_process(row)]
        self._pace.record_cost(_children_cpu_s() - cpu_before_s)

    def _run_query(self, query: str) -> list[str] | None:
        """Return the rows of a query; None if it failed."""
        try:
            done = subprocess.run(
                [self.program, query, CSV],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                timeout=ANSWER_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.splitlines() if done.returncode == 0 else None


def _children_cpu_s() -> float:
    """Return the CPU time, in seconds, of the child processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def parse_row(
    row: str, fields: tuple[tuple[str, str, Callable[[str], Any]], ...] = FIELDS
) -> GpuRecord:
    """Parse a row of --query-gpu; a value of "[N/A]" or "[Not Supported]" is absent."""
    gpu = GpuRecord()
    for (_, field, parse), text in zip(fields, row.split(", ")):
        try:
            gpu = gpu._replace(**{field: parse(text.strip())})
        except ValueError:
            continue
    return gpu


def _parse_process(row: str) -> list[GpuProcess]:
    uuid, _, rest = row.partition(", ")
    pid, _, used = rest.partition(", ")
    if not pid.strip().isdigit():
        return []
    memory_bytes = round(float(used) * MIB) if used.strip().isdigit() else None
    return [GpuProcess(uuid.strip(), int(pid), memory_bytes)]


def select_given(gpus: list[GpuRecord], container: Container) -> list[GpuRecord]:
    """Return the GPUs that a container was given."""
    selected = set()
    for device_request in container.HostConfig.DeviceRequests or ():
        if any("gpu" in names for names in device_request.Capabilities or ()):
            count = device_request.Count
            selected |= set(device_request.DeviceIDs or ())
            selected |= {gpu.index for gpu in gpus[: len(gpus) if count < 0 else count]}
    return [gpu for gpu in gpus if selected & {gpu.index, gpu.uuid, gpu.parent} - {""}]
