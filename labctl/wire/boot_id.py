"""Identification of one boot of a machine, on the client and on servers alike."""

from __future__ import annotations

from pathlib import Path


def read_boot_token() -> str:
    """Return a token that changes when the machine (or the container) restarts; ":" outside Linux.

    A container shares the kernel's boot id with its host, so the start of process 1 counts too.
    """
    boot = _read_text(Path("/proc/sys/kernel/random/boot_id"))
    stat = _read_text(Path("/proc/1/stat"))
    start = stat.rpartition(")")[2].split()[19] if ")" in stat else ""
    return f"{boot}:{start}"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
