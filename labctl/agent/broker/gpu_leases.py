"""Leases of GPUs: the containers' labels record which account has which GPU, and until when.

So a lease ends with its container, and survives a restart of the broker. End times are on
CLOCK_BOOTTIME, since a restart of the machine ends every container anyway.
"""

from __future__ import annotations

import math
import pwd
import threading
import time
from pathlib import Path
from typing import NamedTuple

from ...wire.telemetry import GpuRecord
from ..host.gpus import Gpus
from .account_containers import AccountContainer
from .gpu_queue import Waiter
from .http import LimitRefusal
from .rules import ENDS, GPUS, JOB, BrokerAccount

ROUND_UP_S = 59.0


class GpuLease(NamedTuple):
    """The lease of one GPU. `ends_s` is on CLOCK_BOOTTIME."""

    uuid: str
    uid: int
    container: str
    ends_s: float


class GpuIdentity(NamedTuple):
    """A GPU that can be leased. `number` is "" if the driver does not report it."""

    uuid: str
    number: str
    name: str


class GpuReader:
    """A reader of this machine's GPUs that any thread may use."""

    def __init__(self) -> None:
        self._gpus = Gpus()
        self._lock = threading.Lock()

    def measure(self) -> list[GpuRecord]:
        with self._lock:
            return self._gpus.read(wait=False)

    def identify(self) -> list[GpuIdentity]:
        return identify_gpus(self.measure())


def identify_gpus(gpus: list[GpuRecord]) -> list[GpuIdentity]:
    """Return the GPUs that have a UUID."""
    return [GpuIdentity(gpu.uuid, gpu.index, gpu.name or gpu.uuid) for gpu in gpus if gpu.uuid]


class GpusBusy(LimitRefusal):
    """Other accounts have the GPUs, or are before this one. `missing` are UUIDs, [] for any GPU."""

    def __init__(self, reason: str, missing: list[str]) -> None:
        super().__init__(409, reason)
        self.reason = reason
        self.missing = missing


def list_leases(containers: list[AccountContainer]) -> list[GpuLease]:
    """Return the leases of containers as the engine lists them.

    A container in a job of Slurm has the job's GPUs, without a lease.
    """
    current = []
    for container in containers:
        if container.labels.get(GPUS) and container.is_live and not container.labels.get(JOB):
            ends_s = _read_end(container.labels.get(ENDS, ""))
            current += [
                GpuLease(uuid, container.uid, container.id, ends_s)
                for uuid in container.labels[GPUS].split(",")
            ]
    return current


def _read_end(text: str) -> float:
    """Parse the end of a lease. One that cannot be read has ended, or it would never end."""
    try:
        ends_s = float(text)
    except ValueError:
        return 0.0
    return ends_s if math.isfinite(ends_s) else 0.0


def find_free(gpus: list[GpuIdentity], held: list[GpuLease]) -> list[str]:
    """Return the UUIDs of the GPUs without a lease."""
    leased = {lease.uuid for lease in held}
    return [gpu.uuid for gpu in gpus if gpu.uuid not in leased]


def lend_gpus(
    account: BrokerAccount,
    wanted: list[str],
    gpus: list[GpuIdentity],
    held: list[GpuLease],
    kept: dict[str, Waiter],
    most: int,
    until_s: float,
    now_s: float,
) -> tuple[list[str], float]:
    """Return UUIDs for a container that requests `wanted`, and the end of the lease.

    ["*"] requests as many as the account may have. An account at its limit shares its GPUs among
    its own containers until their lease ends. An ended lease is not shared: the container that is
    being stopped still has its GPU. `kept` are GPUs reserved for accounts that asked before.
    Refusal (409) names every holder and end; it is Busy if waiting helps.
    """
    uuids = [gpu.uuid for gpu in gpus]
    if not uuids:
        raise LimitRefusal(409, "it has no GPU; set `gpu: none` in lab.yaml")
    by_index = {gpu.number: gpu.uuid for gpu in gpus if gpu.number}
    requested = [by_index.get(name, name) for name in wanted if name != "*"]
    unknown = [name for name in requested if name not in uuids]
    if unknown:
        raise LimitRefusal(409, f"it has no GPU {', '.join(unknown)[:200]}")
    own_leases = [lease for lease in held if lease.uid == account.uid and lease.ends_s > now_s]
    leased = {lease.uuid: lease.ends_s for lease in own_leases}
    if leased and (set(requested) <= leased.keys() if requested else len(leased) >= most):
        shared = requested or list(leased)
        return shared, min(leased[uuid] for uuid in shared)
    if len(leased.keys() | set(requested)) > most:
        holders = "; ".join(describe_lease(lease, gpus, now_s) for lease in own_leases)
        message = f"an account may use at most {most} GPU at once. {holders}"
        raise LimitRefusal(409, message.strip())
    free = [
        uuid for uuid in find_free(gpus, held) if uuid not in kept and uuid in (requested or uuids)
    ]
    missing = [uuid for uuid in requested if uuid not in leased]
    if not free or len(free) < len(missing):
        others = [describe_lease(lease, gpus, now_s) for lease in held if lease.uuid not in leased]
        others += [describe_reservation(uuid, waiter, gpus) for uuid, waiter in kept.items()]
        raise GpusBusy(f"no GPU is free: {'; '.join(others)}", missing)
    granted = requested or free[: most - len(leased)]
    return granted, min([until_s, *(leased[uuid] for uuid in granted if uuid in leased)])


def describe_reservation(uuid: str, waiter: Waiter, gpus: list[GpuIdentity]) -> str:
    return f"{_name_gpu(uuid, gpus)} is reserved for {find_holder(waiter.uid)}, who is before you"


def describe_lease(lease: GpuLease, gpus: list[GpuIdentity], now_s: float) -> str:
    """Describe a lease: "GPU 0 (Tesla T4) is in use by lab-alice for at most 40 min, ..."."""
    minutes = int((max(0.0, lease.ends_s - now_s) + ROUND_UP_S) // 60)
    at = time.strftime("%H:%M %Z", time.localtime(time.time() + lease.ends_s - now_s))
    name = _name_gpu(lease.uuid, gpus)
    return f"{name} is in use by {find_holder(lease.uid)} for at most {minutes} min, until {at}"


def _name_gpu(uuid: str, gpus: list[GpuIdentity]) -> str:
    gpu = next((gpu for gpu in gpus if gpu.uuid == uuid), GpuIdentity(uuid, "", uuid))
    return f"GPU {gpu.number or '?'} ({gpu.name})"


def find_holder(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def list_node_groups() -> list[str]:
    """Return the groups of the GPU's device nodes, which a container with a lease joins."""
    groups = {
        str(node.stat().st_gid)
        for node in Path("/dev").glob("nvidia*")
        if node.is_char_device() and node.stat().st_mode & 0o006 == 0
    }
    return sorted(groups)
