"""A model that a run wrote outside its directory for checkpoints, and the line that wrote it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ...wire.model_files import find_model
from .run_state import list_new_files

# Scripts of a project are at its top or one directory below; deeper ones are rarely its own.
_SCRIPTS = ("*.py", "*/*.py")
_LARGEST_SCRIPT_BYTES = 2**20


class MisplacedModel(NamedTuple):
    """`path` is relative to the run; `place` is where its code writes it: "train.py, line 12"."""

    path: PurePosixPath
    place: str


def find_misplaced_model(run: Path) -> MisplacedModel | None:
    """Return the model that a run wrote elsewhere in its directory, or None."""
    path = find_model(list_new_files(run, ()))
    return None if path is None else MisplacedModel(path, _find_place(run / "code", path.name))


def _find_place(code: Path, name: str) -> str:
    """Return the first line of the scripts that writes a file with this name, for a sentence."""
    for pattern in _SCRIPTS:
        for script in sorted(code.glob(pattern)):
            for number, line in enumerate(_read_lines(script), 1):
                if name in line and "load" not in line and not line.lstrip().startswith("#"):
                    return f"{script.relative_to(code)}, line {number}"
    return "your code"


def _read_lines(script: Path) -> list[str]:
    """Return the lines of a script; [] for what is no readable file."""
    if not script.is_file() or script.is_symlink():
        return []
    try:
        with script.open("rb") as file:
            return file.read(_LARGEST_SCRIPT_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return []
