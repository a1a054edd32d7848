"""The directories of attempts without a container, outside of the runs' own."""

from __future__ import annotations

from pathlib import Path

from ..host.paths import drop_tree, labctl_home, read_json
from ..reply import Failure
from .executor import NewAttempt


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


def drop_unstarted(attempt: NewAttempt, mark: str) -> None:
    """Drop earlier attempts of the run that were created and never began, so without this mark.

    The call that started one may have been killed meanwhile. Without its directory, such an attempt
    cannot begin any more, so that two never run.
    """
    for directory in (labctl_home() / ".attempts").iterdir():
        is_own = read_json(directory / "attempt.json").get("directory") == str(attempt.directory)
        if is_own and directory.name != attempt.name and not (directory / mark).exists():
            drop_tree(directory)
