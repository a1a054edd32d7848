"""An account's share of the machine: one cgroup above all its containers.

A container's own limits could be multiplied by starting more containers; the cgroup limits all of
them together.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from ..host.paths import read_text
from .http import HttpRefusal
from .rules import AccountShare

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
EVEN = 1024


def set_account_limits(uid: int, share: AccountShare, driver: str) -> str:
    """Set the account's limits; return its CgroupParent. `driver` is the engine's cgroup driver."""
    if driver == "systemd":
        return _set_slice(uid, share)
    path = f"{_own_cgroup()}/labctl/u{uid}"
    if (ROOT / "cgroup.controllers").exists():
        _set_v2(path, share)
    else:
        _set_v1(path, share)
    return path


def _set_slice(uid: int, share: AccountShare) -> str:
    name = f"labctl-u{uid}.slice"
    words = [f"MemoryMax={share.memory_bytes}", f"TasksMax={share.pids}", "MemorySwapMax=0"]
    words += [f"CPUQuota={round(share.cpus * 100)}%", "CPUWeight=100"]
    line = ["systemctl", "set-property", "--runtime", name, *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HttpRefusal(500, f"could not set the account's limits: {done.stderr.strip()[-300:]}")
    return name


def _own_cgroup() -> str:
    """Return this machine's own cgroup if it is itself a container; "" otherwise."""
    for line in read_text(Path("/proc/1/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        if names in ("memory", ""):
            return "" if path in ("/", "/init.scope") else path.rstrip("/")
    return ""


def _set_v1(path: str, share: AccountShare) -> None:
    """Set limits in cgroup v1, a tree for each controller. Swap needs support by the kernel."""
    quota = round(share.cpus * PERIOD_US)
    values = (
        # Memory with swap must never be below memory without it: the share may have grown.
        ("memory", "memory.memsw.limit_in_bytes", -1),
        ("memory", "memory.limit_in_bytes", share.memory_bytes),
        ("memory", "memory.memsw.limit_in_bytes", share.memory_bytes),
        ("pids", "pids.max", share.pids),
        ("cpu", "cpu.shares", EVEN),
        ("cpu", "cpu.cfs_quota_us", quota),
    )
    for controller, file, value in values:
        if (ROOT / controller).is_dir():
            _write(Path(f"{ROOT}/{controller}{path}"), file, str(value))


def _set_v2(path: str, share: AccountShare) -> None:
    quota = f"{round(share.cpus * PERIOD_US)} {PERIOD_US}"
    folder = ROOT
    for name in path.strip("/").split("/"):
        _write(folder, "cgroup.subtree_control", "+memory +cpu +pids")
        folder = folder / name
        folder.mkdir(exist_ok=True)
    _write(folder, "cgroup.subtree_control", "+memory +cpu +pids")
    for file, value in (
        ("memory.max", str(share.memory_bytes)),
        ("memory.swap.max", "0"),
        ("pids.max", str(share.pids)),
        ("cpu.max", quota),
    ):
        _write(folder, file, value)


def _write(folder: Path, file: str, value: str) -> None:
    """Write a cgroup file, if this kernel has it."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = folder / file
    if not path.exists():
        return
    try:
        path.write_text(value)
    except OSError as error:
        raise HttpRefusal(500, f"could not set the account's limits: {path}: {error}") from None


def read_total_memory_bytes() -> int:
    """Return the memory of the machine (or of the container that it is)."""
    kib = 0
    for line in read_text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemTotal:"):
            kib = int(line.split()[1])
    return kib * 1024
