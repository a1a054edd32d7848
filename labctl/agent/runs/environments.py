"""Environments of runs without containers, below `~/labctl/.environments`.

Each has the programs of one list of packages and is named after its content, as an image is. It is
built once, under a lock, and used only when it is whole: then it has the file WHOLE. It is built
where it stays, since the programs of an environment contain its path. `labs/` has the ids of the
labs that use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ...wire.runs import ENVIRONMENT
from ..host.paths import labctl_home, require_name
from ..reply import Failure
from .executor import Environment

WHOLE = "whole"
LABS = "labs"
_DIGEST = re.compile(r"[0-9a-f]{16}")


def use_environment(reference: str, lab_id: str) -> Environment | None:
    """Return an environment that stays while the lab uses it; None if it is not here, or not whole.

    The empty reference is the server without an environment.
    """
    if not reference:
        return Environment()
    directory = find_directory(reference)
    try:
        add_lab(directory, lab_id)
    except FileNotFoundError:
        return None
    # After the mark: another lab that gave it up may have removed it before.
    return Environment(directory) if is_whole(reference) else None


def is_environment(reference: str) -> bool:
    return reference.startswith(f"{ENVIRONMENT}:")


def is_whole(reference: str) -> bool:
    """Return whether this server has the environment, built to its end."""
    return (find_directory(reference) / WHOLE).exists()


def list_code_paths(environment: Environment, code: Path) -> list[str]:
    """List where a run's own copy of the code has what the environment installed from the lab.

    An editable installation is a line in a .pth file, which names the code of the build.
    """
    if environment.directory is None:
        return []
    of_build = str(environment.directory / "code")
    return [
        str(code) + line[len(of_build) :]
        for line in _list_path_lines(environment.directory)
        if line == of_build or line.startswith(f"{of_build}/")
    ]


def _list_path_lines(directory: Path) -> Iterator[str]:
    for file in sorted(directory.glob("env/lib/python3*/site-packages/*.pth")):
        yield from file.read_text(errors="replace").splitlines()


def environments_root() -> Path:
    return labctl_home() / ".environments"


def find_directory(reference: str) -> Path:
    """Return the directory of an environment. Failure (usage) for what is not one."""
    repository, _, digest = reference.partition(":")
    if repository != ENVIRONMENT or not _DIGEST.fullmatch(digest):
        why = "a run without a container has an environment, or the programs of the server"
        raise Failure("usage", f"{reference!r} is not an environment", why, "labctl config")
    return environments_root() / digest


def add_lab(directory: Path, lab_id: str) -> None:
    """Note that a lab uses the environment in a directory."""
    (directory / LABS / require_name(lab_id)).touch()
