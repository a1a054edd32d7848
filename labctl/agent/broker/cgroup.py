"""An account's share of the machine: one cgroup above all its containers.

A container's own limits could be multiplied by starting more containers; the cgroup limits all of
them together.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Mapping

from ..host.paths import read_text
from .http import HttpRefusal
from .rules import AccountShare

ROOT = Path("/sys/fs/cgroup")
# The trees of cgroup v1 in which Slurm limits a job.
LIMITING = ("memory", "cpuset", "devices")
PERIOD_US = 100_000
EVEN = 1024


def set_account_limits(uid: int, share: AccountShare, driver: str) -> str:
    """Set the account's limits; return its CgroupParent. `driver` is the engine's cgroup driver."""
    if driver == "systemd":
        return set_slice(f"labctl-u{uid}.slice", share)
    path = f"{_own_cgroup()}/labctl/u{uid}"
    if (ROOT / "cgroup.controllers").exists():
        _set_v2(path, share)
    else:
        _set_v1(path, share)
    return path


def set_slice(name: str, share: AccountShare, allowed_cpus: str = "") -> str:
    """Set the limits of a slice of systemd; return its name.

    With cgroup v1, systemd does not apply `allowed_cpus`.
    """
    words = [f"MemoryMax={share.memory_bytes}", f"TasksMax={share.pids}", "MemorySwapMax=0"]
    words += [f"CPUQuota={round(share.cpus * 100)}%", "CPUWeight=100"]
    words += [f"AllowedCPUs={allowed_cpus}"] if allowed_cpus else []
    line = ["systemctl", "set-property", "--runtime", name, *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HttpRefusal(500, f"could not set the limits of {name}: {done.stderr.strip()[-300:]}")
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


def limit_processes(path: str, pids: int) -> None:
    """Limit the number of processes in a control group of Slurm, which does not do so itself."""
    if (ROOT / "cgroup.controllers").exists():
        folder = Path(f"{ROOT}{path}")
        if not folder.is_dir():
            raise _make_gone_refusal(path)
        _write(folder.parent, "cgroup.subtree_control", "+pids")
    elif (ROOT / "pids").is_dir():
        folder = Path(f"{ROOT}/pids{path}")
    else:
        return
    _write(folder, "pids.max", str(pids))


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


def read_memory_limit(path: str) -> int:
    """Return the most memory that a control group may use, in bytes. Refusal if it is gone."""
    for file in (f"{ROOT}{path}/memory.max", f"{ROOT}/memory{path}/memory.limit_in_bytes"):
        text = read_text(Path(file)).strip()
        if text:  # without a limit it is "max", or with cgroup v1 a huge number
            total = read_total_memory_bytes()
            return min(int(text), total) if text.isdigit() else total
    raise _make_gone_refusal(path)


def read_cpus(path: str) -> str:
    """Return the processors that a control group may use, such as 0-3,8. Refusal if it is gone."""
    for file in (f"{ROOT}{path}/cpuset.cpus.effective", f"{ROOT}/cpuset{path}/cpuset.cpus"):
        text = read_text(Path(file)).strip()
        if text:
            return text
    raise _make_gone_refusal(path)


def count_cpus(path: str) -> int:
    """Return the number of processors that a control group may use. Refusal if it is gone."""
    ranges = [part.partition("-") for part in read_cpus(path).split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


def read_inodes(path: str) -> dict[str, int]:
    """Return the inode of each directory by which a control group limits. Refusal if it is gone.

    A group that was removed and made again has other ones.
    """
    inodes = {}
    for folder in (f"{ROOT}{path}", *(f"{ROOT}/{name}{path}" for name in LIMITING)):
        with suppress(FileNotFoundError):
            inodes[folder] = Path(folder).stat().st_ino
    if not inodes:
        raise _make_gone_refusal(path)
    return inodes


def remove_new(path: str, inodes: Mapping[str, int]) -> None:
    """Remove a control group that was made again without limits since `read_inodes`, if empty."""
    for folder in (f"{ROOT}{path}", *(f"{ROOT}/{name}{path}" for name in LIMITING)):
        with suppress(OSError):
            if Path(folder).stat().st_ino != inodes.get(folder):
                Path(folder).rmdir()


def _make_gone_refusal(path: str) -> HttpRefusal:
    """Whoever cannot read a limit must not take it for none."""
    return HttpRefusal(409, f"nothing limits the control group {path}: its job has just ended")


def read_total_memory_bytes() -> int:
    """Return the memory of the machine (or of the container that it is)."""
    kib = 0
    for line in read_text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemTotal:"):
            kib = int(line.split()[1])
    return kib * 1024
