"""What the server's GPUs do: from NVIDIA's library, else from nvidia-smi; nothing without a GPU.

One GPU is a dict with the keys of telemetry.jsonl, its "index", and for a MIG instance "parent".
What could not be measured is absent.
"""

from __future__ import annotations

import ctypes
import json
import resource
import shutil
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Dict

from ..broker.detection import brokered
from ..reply import Failure

if TYPE_CHECKING:
    from .nvml import Nvml

MIB = 1024**2
Gpu = Dict[str, Any]
LIBRARY = "libnvidia-ml.so.1"
# nvmlClocksEventReasons: the board's power cap; software and hardware heat limits; the board's own
# protection and its power brake. A clock that rests, or that somebody set, is not throttled.
THROTTLES = ((0x04, "power"), (0x20 | 0x40, "thermal"), (0x08 | 0x80, "hardware"))


def describe_throttling(reasons: int) -> list[str]:
    """The words for what holds a clock down, by the driver's bits."""
    return [word for bits, word in THROTTLES if reasons & bits]


# nvidia-smi's field, our key, and how its text is read (units left out).
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
    """NVIDIA's library; None where it is not installed, or no driver is loaded."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return None  # the bindings take 16 MiB, which a server without a GPU need not hold
    from pynvml import NVMLError

    from .nvml import Nvml

    try:
        return Nvml()
    except NVMLError:
        return None


class Gpus:
    """Opens the library at the first look.

    `read` takes at most SHARE of a core in the long run: where a look costs more (many cards, or no
    library and so a process), what the last one found is given again for some seconds.
    """

    def __init__(self, open_library: Callable[[], Nvml | None] = open_nvml) -> None:
        self._open_library = open_library
        self._nvml: Nvml | None = None
        self._tool: Tool | Lent | None = None
        self._opened = False
        self._seen: list[Gpu] = []
        self._pace = Pace()

    def read(self, wait: bool = False) -> list[Gpu]:
        """With `wait` a look that nvidia-smi has just begun is waited for."""
        self._open()
        if self._tool:
            return self._tool.read(wait)
        if self._nvml and self._pace.due():
            began = time.thread_time()
            self._seen = self._nvml.read()
            self._pace.took(time.thread_time() - began)
        return self._seen

    def processes(self) -> list[dict[str, Any]]:
        """Who computes on which GPU: {"uuid", "pid", "memory_bytes"}."""
        self._open()
        if self._nvml:
            return self._nvml.processes()
        return self._tool.processes() if self._tool else []

    def _open(self) -> None:
        if self._opened:
            return
        self._opened = True
        if brokered():
            self._tool = Lent()
            return
        self._nvml = self._open_library()
        if self._nvml is None:
            program = shutil.which("nvidia-smi")
            self._tool = Tool(program) if program else None


class Lent:
    """A shared server's, whose device nodes are closed to accounts: its broker tells."""

    def read(self, wait: bool) -> list[Gpu]:
        from . import engine  # only where it is asked for

        try:
            found: list[Gpu] = json.loads(engine.ask("GET", "/labctl/gpus"))["gpus"]
        except (Failure, ValueError, KeyError):
            return []
        return found

    def processes(self) -> list[dict[str, Any]]:
        """Other accounts' are nobody's business, and one's own cannot be told from them."""
        return []


class Pace:
    """When the next look is due, so that looks take at most SHARE of a core."""

    def __init__(self) -> None:
        self._due_s = 0.0
        self._first = True

    def due(self) -> bool:
        return time.monotonic() >= self._due_s

    def took(self, cpu_s: float) -> None:
        """The first look wakes the driver, and tells nothing about the next."""
        rest = 0.0 if self._first else min(LONGEST_REST_S, cpu_s / SHARE)
        self._first = False
        self._due_s = time.monotonic() + rest


class Tool:
    """nvidia-smi. It takes a core for tens of milliseconds, or seconds on a driver that slept: so
    a thread asks it, and is not asked twice at once."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.fields = FIELDS
        self._gpus: list[Gpu] = []
        self._processes: list[dict[str, Any]] = []
        self._asking: threading.Thread | None = None
        self._pace = Pace()

    def read(self, wait: bool) -> list[Gpu]:
        """What the last look found; the very first is waited for."""
        first = self._asking is None
        if self._asking is None or (not self._asking.is_alive() and self._pace.due()):
            self._asking = threading.Thread(target=self._look, daemon=True)
            self._asking.start()
        if first or wait:
            self._asking.join(ANSWER_S)
        return self._gpus

    def processes(self) -> list[dict[str, Any]]:
        return self._processes

    def _look(self) -> None:
        before = _children_s()
        rows = self._asked(f"--query-gpu={','.join(name for name, _, _ in self.fields)}")
        if rows is None and self.fields is FIELDS:
            # A driver that knows the last field under another name refuses the whole question.
            self.fields = FIELDS[:-1]
            rows = self._asked(f"--query-gpu={','.join(name for name, _, _ in self.fields)}")
        self._gpus = [row_of(row, self.fields) for row in rows or []]
        apps = self._asked("--query-compute-apps=gpu_uuid,pid,used_memory") if rows else []
        self._processes = [one for row in apps or [] for one in _app(row)]
        self._pace.took(_children_s() - before)

    def _asked(self, question: str) -> list[str] | None:
        """Its rows; None where it failed."""
        try:
            done = subprocess.run(
                [self.program, question, CSV],
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


def _children_s() -> float:
    """Processor time of the processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row_of(row: str, fields: tuple[tuple[str, str, Callable[[str], Any]], ...] = FIELDS) -> Gpu:
    """A row of --query-gpu; what reads "[N/A]" or "[Not Supported]" is absent."""
    found = {}
    for (_, key, read), text in zip(fields, row.split(", ")):
        try:
            found[key] = read(text.strip())
        except ValueError:
            continue
    return found


def _app(row: str) -> list[dict[str, Any]]:
    uuid, _, rest = row.partition(", ")
    pid, _, used = rest.partition(", ")
    if not pid.strip().isdigit():
        return []
    known = {"memory_bytes": round(float(used) * MIB)} if used.strip().isdigit() else {}
    return [{"uuid": uuid.strip(), "pid": int(pid), **known}]


def given(gpus: list[Gpu], container: dict[str, Any]) -> list[Gpu]:
    """Those that a container was given, as `docker inspect` shows it."""
    wanted = set()
    for asked in (container.get("HostConfig") or {}).get("DeviceRequests") or []:
        if any("gpu" in names for names in asked.get("Capabilities") or []):
            count = asked.get("Count") or 0
            wanted |= set(asked.get("DeviceIDs") or [])
            wanted |= {gpu["index"] for gpu in gpus[: len(gpus) if count < 0 else count]}
    return [gpu for gpu in gpus if wanted & {gpu["index"], gpu.get("uuid"), gpu.get("parent")}]
