"""Who has which GPU: first come, by UUID, for a time. The truth is in the containers' labels.

So a lease is over when its container is, and outlives the broker. Ends count on CLOCK_BOOTTIME,
since a restart of the machine ends every container anyway.
"""

from __future__ import annotations

import pwd
import time
from pathlib import Path
from typing import Any, NamedTuple

from .broker_http import Refusal
from .broker_rules import ENDS, GPUS, OWNER, Account
from .shared import TAKEN

STATES = ("created", "running", "paused", "restarting")
ROUND_UP_S = 59.0


class Lease(NamedTuple):
    """One GPU's. `ends_s` on CLOCK_BOOTTIME."""

    uuid: str
    uid: int
    container: str
    ends_s: float


def boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def leases(containers: list[dict[str, Any]]) -> list[Lease]:
    """Those of containers as the engine lists them."""
    found = []
    for one in containers:
        labels = one.get("Labels") or {}
        if labels.get(GPUS) and one.get("State") in STATES:
            uid, ends_s = int(labels[OWNER]), float(labels[ENDS])
            found += [Lease(u, uid, one["Id"], ends_s) for u in labels[GPUS].split(",")]
    return found


def lent(
    account: Account,
    wanted: list[str],
    gpus: list[dict[str, Any]],
    held: list[Lease],
    most: int,
    until_s: float,
    now_s: float,
) -> tuple[list[str], float]:
    """UUIDs for a container that wants these (["*"]: as many as the account may have), and the end.

    An account that has all it may have shares them among its own containers, until the lease that
    it has ends. Refusal (409), with every holder's name and end, where others have them.
    """
    known = [str(gpu["uuid"]) for gpu in gpus if gpu.get("uuid")]
    if not known:
        raise Refusal(409, f"{TAKEN}it has no GPU; ask for `gpu: none`")
    by_index = {str(gpu.get("index")): str(gpu["uuid"]) for gpu in gpus if gpu.get("uuid")}
    named = [by_index.get(one, one) for one in wanted if one != "*"]
    unknown = [one for one in named if one not in known]
    if unknown:
        raise Refusal(409, f"{TAKEN}there is no GPU {', '.join(unknown)[:200]}")
    own = {one.uuid: one.ends_s for one in held if one.uid == account.uid}
    if own and (set(named) <= own.keys() if named else len(own) >= most):
        mine = named or list(own)
        return mine, min(own[uuid] for uuid in mine)
    if len(own.keys() | set(named)) > most:
        told = "; ".join(told_of(one, gpus, now_s) for one in held if one.uid == account.uid)
        raise Refusal(409, f"{TAKEN}an account has at most {most} GPU here at once. {told}".strip())
    taken = {one.uuid for one in held if one.uid != account.uid}
    free = [uuid for uuid in named or known if uuid not in taken and uuid not in own]
    if not free or len(free) < len(set(named) - own.keys()):
        others = [one for one in held if one.uid != account.uid]
        told = "; ".join(told_of(one, gpus, now_s) for one in others)
        raise Refusal(409, f"{TAKEN}no GPU is free: {told}")
    chosen = named or free[: most - len(own)]
    return chosen, min([until_s, *(own[uuid] for uuid in chosen if uuid in own)])


def told_of(lease: Lease, gpus: list[dict[str, Any]], now_s: float) -> str:
    """ "GPU 0 (Tesla T4) is lab-alice's for 40 min at most"."""
    gpu = next((one for one in gpus if one.get("uuid") == lease.uuid), {})
    minutes = int((max(0.0, lease.ends_s - now_s) + ROUND_UP_S) // 60)
    at = time.strftime("%H:%M %Z", time.localtime(time.time() + lease.ends_s - now_s))
    name = f"GPU {gpu.get('index', '?')} ({gpu.get('name', lease.uuid)})"
    return f"{name} is {holder(lease.uid)}'s for {minutes} min at most, until {at}"


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
