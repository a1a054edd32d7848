"""The directories of attempts without a container, outside of the runs' own."""

from __future__ import annotations

from pathlib import Path

from ..host.paths import labctl_home
from ..reply import Failure


def find_attempt_directory(name: str) -> Path:
    """Return the directory of an attempt. Its name may be from a file that a run can write."""
    if not name or "/" in name or name.startswith("."):
        raise Failure("usage", f"bad name {name!r} of an attempt")
    return labctl_home() / ".attempts" / name


def list_attempt_directories() -> list[Path]:
    """List the directories of all attempts, the newest first."""
    attempts = labctl_home() / ".attempts"
    directories = list(attempts.iterdir()) if attempts.is_dir() else []
    return sorted(directories, key=lambda directory: directory.stat().st_mtime, reverse=True)
