"""Secrets of runs: on a tmpfs with mode 0600 while the run lives; never on disk or in argv."""

from __future__ import annotations

import os
from pathlib import Path

from ..host.paths import drop_tree, write_text
from ..reply import Failure


def secrets_directory(run_id: str) -> Path:
    return Path("/dev/shm") / f"labctl-{os.getuid()}" / run_id


def write_secrets(run_id: str, values: dict[str, str]) -> None:
    if not values:
        return
    directory = secrets_directory(run_id)
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    if directory.parent.is_symlink() or directory.parent.stat().st_uid != os.getuid():
        what = f"{directory.parent} belongs to another user"
        raise Failure("policy", what, "", "labctl doctor")
    directory.parent.chmod(0o700)
    directory.mkdir(mode=0o700, exist_ok=True)
    for name, value in values.items():
        write_text(directory / name, value, 0o600)


def read_secrets(run_id: str) -> dict[str, str]:
    """Read the secrets of a run by name; {} without any."""
    directory = secrets_directory(run_id)
    files = directory.iterdir() if directory.is_dir() else ()
    return {file.name: file.read_text() for file in files if not file.name.startswith(".")}


def remove_secrets(run_id: str) -> None:
    drop_tree(secrets_directory(run_id))
