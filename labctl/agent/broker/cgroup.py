"""An account's share of the machine: one cgroup above all its containers.

A container's own limits could be had many times over; the cgroup's hold for all of them at once.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from ..host.paths import read_text
from .http import Refusal
from .rules import Share

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
EVEN = 1024


def parent_of(uid: int, share: Share, driver: str) -> str:
    """The account's CgroupParent, its limits set. `driver` is what the engine says of itself."""
    if driver == "systemd":
        return _slice(uid, share)
    path = f"{_base()}/labctl/u{uid}"
    if (ROOT / "cgroup.controllers").exists():
        _second(path, share)
    else:
        _first(path, share)
    return path


def _slice(uid: int, share: Share) -> str:
    name = f"labctl-u{uid}.slice"
    words = [f"MemoryMax={share.memory_bytes}", f"TasksMax={share.pids}", "MemorySwapMax=0"]
    words += [f"CPUQuota={round(share.cpus * 100)}%", "CPUWeight=100"]
    line = ["systemctl", "set-property", "--runtime", name, *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Refusal(500, f"the account's share could not be set: {done.stderr.strip()[-300:]}")
    return name


def _base() -> str:
    """Where this machine's own cgroup is, when it is a container itself; "" on a real one."""
    for line in read_text(Path("/proc/1/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        if names in ("memory", ""):
            return "" if path in ("/", "/init.scope") else path.rstrip("/")
    return ""


def _first(path: str, share: Share) -> None:
    """cgroup v1: a tree for each controller. Swap is only limited where the kernel counts it."""
    quota = round(share.cpus * PERIOD_US)
    values = (
        # Memory with swap may at no moment be less than without: a share may have grown.
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


def _second(path: str, share: Share) -> None:
    quota = f"{round(share.cpus * PERIOD_US)} {PERIOD_US}"
    here = ROOT
    for name in path.strip("/").split("/"):
        _write(here, "cgroup.subtree_control", "+memory +cpu +pids")
        here = here / name
        here.mkdir(exist_ok=True)
    _write(here, "cgroup.subtree_control", "+memory +cpu +pids")
    for file, value in (
        ("memory.max", str(share.memory_bytes)),
        ("memory.swap.max", "0"),
        ("pids.max", str(share.pids)),
        ("cpu.max", quota),
    ):
        _write(here, file, value)


def _write(folder: Path, file: str, value: str) -> None:
    """A file that this kernel does not have is left out."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = folder / file
    if not path.exists():
        return
    try:
        path.write_text(value)
    except OSError as error:
        raise Refusal(500, f"the account's share could not be set: {path}: {error}") from None


def whole_memory_bytes() -> int:
    """The machine's, or the container's that it is."""
    kib = 0
    for line in read_text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemTotal:"):
            kib = int(line.split()[1])
    return kib * 1024
