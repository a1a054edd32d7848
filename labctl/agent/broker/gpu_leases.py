"""Who has which GPU: by UUID, for a time. The truth is in the containers' labels.

So a lease is over when its container is, and outlives the broker. Ends count on CLOCK_BOOTTIME,
since a restart of the machine ends every container anyway.
"""

from __future__ import annotations

import math
import pwd
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from ..host.gpus import Gpus
from .account_containers import Container
from .detection import TAKEN
from .gpu_queue import Waiter
from .http import Refusal
from .rules import ENDS, GPUS, Account

ROUND_UP_S = 59.0


class Lease(NamedTuple):
    """One GPU's. `ends_s` on CLOCK_BOOTTIME."""

    uuid: str
    uid: int
    container: str
    ends_s: float


def boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class GpuReader:
    """The GPUs of this machine, as any thread may ask for them."""

    def __init__(self) -> None:
        self._gpus = Gpus()
        self._lock = threading.Lock()

    def read(self) -> list[dict[str, Any]]:
        with self._lock:
            return self._gpus.read(wait=False)


class Busy(Refusal):
    """Others have the GPUs, or asked for them before. `missing` are UUIDs, none for any GPU."""

    def __init__(self, message: str, missing: list[str]) -> None:
        super().__init__(409, message)
        self.missing = missing


def leases(containers: list[Container]) -> list[Lease]:
    """Those of containers as the engine lists them."""
    found = []
    for one in containers:
        if one.labels.get(GPUS) and one.is_live:
            ends_s = _read_end(one.labels.get(ENDS, ""))
            found += [Lease(uuid, one.uid, one.id, ends_s) for uuid in one.labels[GPUS].split(",")]
    return found


def _read_end(text: str) -> float:
    """A lease whose end cannot be read is over, or nothing would ever end it."""
    try:
        ends_s = float(text)
    except ValueError:
        return 0.0
    return ends_s if math.isfinite(ends_s) else 0.0


def find_free(gpus: list[dict[str, Any]], held: list[Lease]) -> list[str]:
    """UUIDs of the GPUs that nobody has."""
    taken = {one.uuid for one in held}
    return [str(gpu["uuid"]) for gpu in gpus if gpu.get("uuid") and gpu["uuid"] not in taken]


def lend(
    account: Account,
    wanted: list[str],
    gpus: list[dict[str, Any]],
    held: list[Lease],
    kept: dict[str, Waiter],
    most: int,
    until_s: float,
    now_s: float,
) -> tuple[list[str], float]:
    """UUIDs for a container that wants these (["*"]: as many as the account may have), and the end.

    An account that has all it may have shares them among its own containers, until the lease that
    it has ends. A lease that has ended is shared no more: what is being stopped still has its GPU.
    `kept` are GPUs for accounts that asked before. Refusal (409) with every holder's name and end,
    Busy where waiting helps.
    """
    known = [str(gpu["uuid"]) for gpu in gpus if gpu.get("uuid")]
    if not known:
        raise Refusal(409, f"{TAKEN}it has no GPU; ask for `gpu: none`")
    by_index = {str(gpu.get("index")): str(gpu["uuid"]) for gpu in gpus if gpu.get("uuid")}
    named = [by_index.get(one, one) for one in wanted if one != "*"]
    unknown = [one for one in named if one not in known]
    if unknown:
        raise Refusal(409, f"{TAKEN}there is no GPU {', '.join(unknown)[:200]}")
    mine = [one for one in held if one.uid == account.uid and one.ends_s > now_s]
    own = {one.uuid: one.ends_s for one in mine}
    if own and (set(named) <= own.keys() if named else len(own) >= most):
        shared = named or list(own)
        return shared, min(own[uuid] for uuid in shared)
    if len(own.keys() | set(named)) > most:
        told = "; ".join(told_of(one, gpus, now_s) for one in mine)
        raise Refusal(409, f"{TAKEN}an account has at most {most} GPU here at once. {told}".strip())
    free = [one for one in find_free(gpus, held) if one not in kept and one in (named or known)]
    missing = [one for one in named if one not in own]
    if not free or len(free) < len(missing):
        others = [told_of(one, gpus, now_s) for one in held if one.uuid not in own]
        others += [describe_kept(uuid, one, gpus) for uuid, one in kept.items()]
        raise Busy(f"{TAKEN}no GPU is free: {'; '.join(others)}", missing)
    chosen = named or free[: most - len(own)]
    return chosen, min([until_s, *(own[uuid] for uuid in chosen if uuid in own)])


def describe_kept(uuid: str, waiter: Waiter, gpus: list[dict[str, Any]]) -> str:
    return f"{_name_gpu(uuid, gpus)} is kept for {holder(waiter.uid)}, who asked before"


def told_of(lease: Lease, gpus: list[dict[str, Any]], now_s: float) -> str:
    """ "GPU 0 (Tesla T4) is lab-alice's for 40 min at most"."""
    minutes = int((max(0.0, lease.ends_s - now_s) + ROUND_UP_S) // 60)
    at = time.strftime("%H:%M %Z", time.localtime(time.time() + lease.ends_s - now_s))
    name = _name_gpu(lease.uuid, gpus)
    return f"{name} is {holder(lease.uid)}'s for {minutes} min at most, until {at}"


def _name_gpu(uuid: str, gpus: list[dict[str, Any]]) -> str:
    gpu = next((one for one in gpus if one.get("uuid") == uuid), {})
    return f"GPU {gpu.get('index', '?')} ({gpu.get('name', uuid)})"


def holder(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def node_groups(folder: Path = Path("/dev")) -> list[str]:
    """Groups that the GPU's device nodes belong to: a container with a lease is put there."""
    found = {
        str(node.stat().st_gid)
        for node in folder.glob("nvidia*")
        if node.is_char_device() and node.stat().st_mode & 0o006 == 0
    }
    return sorted(found)
