"""Signs of work on the server. A server without any is idle.

Each sign is a sentence with its age. A source that cannot be read counts as work, and the sign says
so. Typing has an age; a run, a busy kernel and an active transfer are current. TensorBoard, a
Jupyter with idle kernels, an attached terminal without typing, and a waiting program do not count.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Callable, NamedTuple

from ...wire.codec import from_json
from ...wire.runs import PROCESS
from ..host import engine
from ..host.engine_objects import ContainerRow
from ..host.paths import compute_age_s, labctl_home, read_boottime_s, read_text
from ..reply import Failure
from ..runs.executors import get_executor
from .jupyter_objects import JupyterKernel
from .processes import ActivitySign, ProcessActivity, read_typing

CONTAINER_CORES = 0.05
# cores: an unused service computes a little; more than this is a person's work
SERVICE_CORES = 0.5
GPU_PERCENT = 5.0
LONGEST_S, SHORTEST_S = 15.0, 1.0
CHECKS_PER_IDLE_LIMIT = 20
# Touched by each verb that shows that a person is at work (see entrypoint.py).
USED = ".used"


class ActivitySnapshot(NamedTuple):
    """A snapshot of all activity: when it began (seconds since boot), and the signs found."""

    began_s: float
    signs: list[ActivitySign]
    has_gpu: bool = True

    @property
    def busy(self) -> list[str]:
        return [sign.text for sign in self.signs if sign.age_s <= 0]

    @property
    def gpu_percent(self) -> float | None:
        """The use of all GPUs together, 100 for each that is fully used.

        None if it is unknown, or without a GPU.
        """
        if not self.has_gpu:
            return None
        percents = [sign.gpu_percent for sign in self.signs if sign.gpu_percent is not None]
        return sum(percents) if len(percents) == len(self.signs) else None

    @property
    def runs(self) -> frozenset[str]:
        """The ids of the runs that are running."""
        return frozenset(sign.run for sign in self.signs if sign.run)

    @property
    def quiet_s(self) -> float:
        """The age of the newest sign; infinite without one."""
        return min((sign.age_s for sign in self.signs), default=float("inf"))


class LabAccount(NamedTuple):
    """The account that owns the lab, and the words that run a command as that account."""

    uid: int
    gid: int

    @property
    def words(self) -> list[str]:
        if os.geteuid() == self.uid:
            return []
        drop = ["setpriv", "--reuid", str(self.uid), "--regid", str(self.gid), "--init-groups"]
        return [*drop, "--"]


class ActivityReader:
    """Reader of all sources of activity."""

    def __init__(self, account: LabAccount) -> None:
        self.account = account
        self.processes = ProcessActivity()
        self.cpu_ns: dict[str, int] = {}
        self.cpu_at_s = 0.0

    def read_activity(self) -> ActivitySnapshot:
        began_s = read_boottime_s()
        readers: list[tuple[str, Callable[[], list[ActivitySign] | None]]] = [
            ("the containers", self._containers),
            ("the runs without a container", list_process_runs),
            ("the terminals", lambda: read_typing(self.account.uid, self.account.words)),
            ("the processes", self.processes.read_activity),
            ("the GPU", read_gpu_signs),
            ("labctl's last use", read_last_use),
        ]
        signs: list[ActivitySign] = []
        has_gpu = True
        for name, read in readers:
            try:
                found = read()
                if found is None:
                    has_gpu = False
                signs += found or []
            except FileNotFoundError:
                continue  # without Docker, nothing of that kind can be running
            except (OSError, ValueError, KeyError, Failure, subprocess.SubprocessError) as error:
                why = error.report.what if isinstance(error, Failure) else error
                signs.append(ActivitySign(f"{name} cannot be read, which counts as work ({why})"))
        return ActivitySnapshot(began_s, signs, has_gpu)

    def _containers(self) -> list[ActivitySign]:
        if not shutil.which("docker"):
            return []
        signs: list[ActivitySign] = []
        previous, self.cpu_ns = self.cpu_ns, {}
        now = time.monotonic()
        span, self.cpu_at_s = now - self.cpu_at_s, now
        for container in engine.list_containers():
            labels, name = container.labels, container.name
            if "labctl.run" in labels:
                run = labels["labctl.run"]
                signs.append(ActivitySign(f"run {run} is running", run=run))
                continue
            if labels.get("labctl.service") == "jupyter":
                signs += read_kernels(container)
            used_ns = _cpu_ns(container.Id)
            self.cpu_ns[container.Id] = used_ns
            cores = (used_ns - previous.get(container.Id, used_ns)) / span / 1e9
            if cores > (SERVICE_CORES if "labctl.service" in labels else CONTAINER_CORES):
                signs.append(ActivitySign(f"the container {name} used {cores:.0%} of a core"))
        return signs


def _cpu_ns(container: str) -> int:
    try:
        stats = engine.call("GET", f"/containers/{container}/stats?stream=false&one-shot=true")
    except engine.EngineRequestError as refused:
        if refused.status == 404:
            return 0
        raise
    return int(json.loads(stats)["cpu_stats"]["cpu_usage"]["total_usage"])


def list_process_runs() -> list[ActivitySign]:
    """List the runs that the executor `process` runs."""
    attempts = get_executor(PROCESS).list_live()
    return [ActivitySign(f"run {one.run} is running", run=one.run) for one in attempts]


def read_kernels(container: ContainerRow) -> list[ActivitySign]:
    """Read the activity of a labctl Jupyter's kernels, through its API with its own token."""
    port = next((port.PublicPort for port in container.Ports or () if port.PublicPort), 0)
    root = labctl_home() / container.name.rpartition("-svc-")[0]
    token = read_text(root / ".labctl" / "service-jupyter.token")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/api/kernels", headers={"Authorization": f"token {token}"})
        reply = connection.getresponse()
        body = reply.read()
    except (OSError, http.client.HTTPException) as error:
        return [ActivitySign(f"Jupyter's kernels cannot be read, which counts as work ({error})")]
    finally:
        connection.close()
    if reply.status != 200:
        message = f"Jupyter's kernels cannot be read, which counts as work (HTTP {reply.status})"
        return [ActivitySign(message)]
    kernels = [from_json(JupyterKernel, kernel) for kernel in json.loads(body)]
    return [_describe_kernel(kernel, time.time()) for kernel in kernels]


def _describe_kernel(kernel: JupyterKernel, now: float) -> ActivitySign:
    """Describe a kernel. Only "busy" is work: a kernel that never had a client stays "starting"."""
    if kernel.execution_state == "busy":
        return ActivitySign("a Jupyter kernel is busy")
    moment = datetime.strptime(kernel.last_activity[:19], "%Y-%m-%dT%H:%M:%S")
    at = moment.replace(tzinfo=timezone.utc).timestamp()
    return ActivitySign("a Jupyter kernel was used", max(0.001, now - at))


def read_gpu_signs() -> list[ActivitySign] | None:
    """Return signs of GPU use; None without a GPU, or with only the driver's program installed."""
    program = shutil.which("nvidia-smi")
    if not program:
        return None
    words = [program, "--format=csv,noheader,nounits"]
    done = _run_query([*words, "--query-gpu=index,utilization.gpu"])
    if done.returncode != 0 and not Path("/dev/nvidiactl").exists():
        return None
    _require_success(done)
    signs = []
    for row in done.stdout.splitlines():
        index, _, percent = row.partition(",")
        if not percent.strip().replace(".", "").isdigit():
            return _gpu_processes(words)  # a partitioned GPU reports no utilization
        if float(percent) > GPU_PERCENT:
            text = f"GPU {index.strip()} is at {percent.strip()}%"
            signs.append(ActivitySign(text, gpu_percent=float(percent)))
    return signs


def _gpu_processes(words: list[str]) -> list[ActivitySign]:
    done = _run_query([*words, "--query-compute-apps=pid"])
    _require_success(done)
    pids = done.stdout.split()
    return [ActivitySign(f"process {pid} uses a GPU", gpu_percent=None) for pid in pids]


def _run_query(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)


def _require_success(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode != 0:
        raise ValueError(f"nvidia-smi: exit {done.returncode}, {done.stdout.strip()[:200]}")


def read_last_use() -> list[ActivitySign]:
    """Return when labctl was last used on this server."""
    at = (labctl_home() / USED).stat().st_mtime
    return [ActivitySign("labctl was used", max(0.001, compute_age_s(at)))]


class ActivityWatcher:
    """Reads activity in a thread of its own, since any source may hang while the clocks go on."""

    def __init__(self, signs: ActivityReader, on_update: Callable[[], None]) -> None:
        self.signs = signs
        self.on_update = on_update
        self.latest: ActivitySnapshot | None = None
        self.interval_s = SHORTEST_S
        self._now = threading.Event()
        threading.Thread(target=self._poll_forever, daemon=True).start()

    def set_idle_limit(self, idle_s: float | None) -> None:
        interval_s = LONGEST_S if idle_s is None else idle_s / CHECKS_PER_IDLE_LIMIT
        self.interval_s = min(LONGEST_S, max(SHORTEST_S, interval_s))

    def request_update(self) -> None:
        self._now.set()

    def _poll_forever(self) -> None:
        while True:
            self.latest = self.signs.read_activity()
            self.on_update()
            self._now.wait(self.interval_s)
            self._now.clear()
