"""Signs of work on the server: whoever finds none may call it idle.

Each sign is a sentence with its age. What cannot be read counts as work, and says so. A person's
typing ages; a run, a busy kernel or a moving transfer is now. TensorBoard, a Jupyter whose kernels
rest, an attached terminal that nobody types in, and a program that merely waits are no work.
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
from typing import Any, Callable, NamedTuple

from ..host import engine
from ..host.paths import age_of, home, read_text
from ..reply import Failure
from .processes import Processes, Sign, terminals, tmux_clients
from .state_files import boottime_s

CONTAINER_CORES = 0.05
# A service computes a little while nobody looks at it; more than this is somebody's work.
SERVICE_CORES = 0.5
GPU_PERCENT = 5.0
LONGEST_S, SHORTEST_S = 15.0, 1.0
LOOKS_PER_IDLE_LIMIT = 20
# Touched by each verb that somebody works with (see entrypoint.py).
USED = ".used"


class Look(NamedTuple):
    """One look at everything: when it began (since boot), and what was seen."""

    began_s: float
    signs: list[Sign]

    @property
    def busy(self) -> list[str]:
        return [sign.said for sign in self.signs if sign.age_s <= 0]

    @property
    def quiet_s(self) -> float:
        """How long ago anything was seen; a very long time where nothing ever was."""
        return min((sign.age_s for sign in self.signs), default=float("inf"))


class Account(NamedTuple):
    """Whose lab it is, and the words that run a command as that account."""

    uid: int
    gid: int

    @property
    def words(self) -> list[str]:
        if os.geteuid() == self.uid:
            return []
        drop = ["setpriv", "--reuid", str(self.uid), "--regid", str(self.gid), "--init-groups"]
        return [*drop, "--"]


class Signs:
    """Everything that is looked at, and what the last look found."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.processes = Processes()
        self.cpu_ns: dict[str, int] = {}
        self.cpu_at_s = 0.0

    def look(self) -> Look:
        began = boottime_s()
        readers: list[tuple[str, Callable[[], list[Sign]]]] = [
            ("the containers", self._containers),
            ("the terminals", terminals),
            ("tmux", lambda: tmux_clients(self.account.uid, self.account.words)),
            ("the processes", self.processes.look),
            ("the GPU", gpus),
            ("labctl's last use", used),
        ]
        signs: list[Sign] = []
        for name, read in readers:
            try:
                signs += read()
            except FileNotFoundError:
                continue  # no tmux, no Docker: nothing of that kind can be at work
            except (OSError, ValueError, KeyError, Failure, subprocess.SubprocessError) as error:
                why = error.body["what"] if isinstance(error, Failure) else error
                signs.append(Sign(f"{name} cannot be read, which counts as work ({why})"))
        return Look(began, signs)

    def _containers(self) -> list[Sign]:
        if not shutil.which("docker"):
            return []
        found: list[Sign] = []
        before, self.cpu_ns = self.cpu_ns, {}
        now = time.monotonic()
        span, self.cpu_at_s = now - self.cpu_at_s, now
        for one in json.loads(engine.ask("GET", "/containers/json")):
            labels = one.get("Labels") or {}
            name = one["Names"][0].lstrip("/")
            if "labctl.run" in labels:
                found.append(Sign(f"run {labels['labctl.run']} is running"))
                continue
            if labels.get("labctl.service") == "jupyter":
                found += kernels(one)
            used_ns = _cpu_ns(one["Id"])
            self.cpu_ns[one["Id"]] = used_ns
            cores = (used_ns - before.get(one["Id"], used_ns)) / span / 1e9
            if cores > (SERVICE_CORES if "labctl.service" in labels else CONTAINER_CORES):
                found.append(Sign(f"the container {name} used {cores:.0%} of a core"))
        return found


def _cpu_ns(container: str) -> int:
    try:
        said = engine.ask("GET", f"/containers/{container}/stats?stream=false&one-shot=true")
    except engine.Refused as refused:
        if refused.status == 404:
            return 0
        raise
    return int(json.loads(said)["cpu_stats"]["cpu_usage"]["total_usage"])


def kernels(container: dict[str, Any]) -> list[Sign]:
    """What the kernels of a labctl Jupyter do, asked of it with its own token."""
    port = next((p["PublicPort"] for p in container.get("Ports", []) if p.get("PublicPort")), 0)
    name = container["Names"][0].lstrip("/")
    root = home() / name.rpartition("-svc-")[0]
    token = read_text(root / ".labctl" / "service-jupyter.token")
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=5)
    try:
        connection.request("GET", "/api/kernels", headers={"Authorization": f"token {token}"})
        reply = connection.getresponse()
        body = reply.read()
    except (OSError, http.client.HTTPException) as error:
        return [Sign(f"Jupyter's kernels cannot be read, which counts as work ({error})")]
    finally:
        connection.close()
    if reply.status != 200:
        said = f"Jupyter's kernels cannot be read, which counts as work (HTTP {reply.status})"
        return [Sign(said)]
    return [_kernel(one, time.time()) for one in json.loads(body)]


def _kernel(kernel: dict[str, Any], now: float) -> Sign:
    """Only "busy" is work: a kernel that nobody ever connects to says "starting" for ever."""
    if kernel.get("execution_state") == "busy":
        return Sign("a Jupyter kernel is busy")
    moment = datetime.strptime(kernel["last_activity"][:19], "%Y-%m-%dT%H:%M:%S")
    at = moment.replace(tzinfo=timezone.utc).timestamp()
    return Sign("a Jupyter kernel was used", max(0.001, now - at))


def gpus() -> list[Sign]:
    """GPUs at work. A machine without any, or with a driver's program alone, has none."""
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    words = [program, "--format=csv,noheader,nounits"]
    asked = _asked([*words, "--query-gpu=index,utilization.gpu"])
    if asked.returncode != 0 and not Path("/dev/nvidiactl").exists():
        return []
    _check(asked)
    found = []
    for row in asked.stdout.splitlines():
        index, _, percent = row.partition(",")
        if not percent.strip().replace(".", "").isdigit():
            return _gpu_processes(words)  # a partitioned GPU tells no figure
        if float(percent) > GPU_PERCENT:
            found.append(Sign(f"GPU {index.strip()} is at {percent.strip()} %"))
    return found


def _gpu_processes(words: list[str]) -> list[Sign]:
    asked = _asked([*words, "--query-compute-apps=pid"])
    _check(asked)
    return [Sign(f"process {pid} uses a GPU") for pid in asked.stdout.split()]


def _asked(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)


def _check(asked: subprocess.CompletedProcess[str]) -> None:
    if asked.returncode != 0:
        raise ValueError(f"nvidia-smi: exit {asked.returncode}, {asked.stdout.strip()[:200]}")


def used() -> list[Sign]:
    """When somebody last worked here with labctl."""
    at = (home() / USED).stat().st_mtime
    return [Sign("labctl was used", max(0.001, age_of(at)))]


class Looker:
    """Looks from a thread of its own, since any sign may hang: the clocks go on meanwhile."""

    def __init__(self, signs: Signs, looked: Callable[[], None]) -> None:
        self.signs = signs
        self.looked = looked
        self.latest: Look | None = None
        self.interval_s = SHORTEST_S
        self._now = threading.Event()
        threading.Thread(target=self._go, daemon=True).start()

    def set_idle_limit(self, idle_s: float | None) -> None:
        wanted = LONGEST_S if idle_s is None else idle_s / LOOKS_PER_IDLE_LIMIT
        self.interval_s = min(LONGEST_S, max(SHORTEST_S, wanted))

    def look_now(self) -> None:
        self._now.set()

    def _go(self) -> None:
        while True:
            self.latest = self.signs.look()
            self.looked()
            self._now.wait(self.interval_s)
            self._now.clear()
