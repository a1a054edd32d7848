"""Check that a checkpoint contains only data: safetensors, trees as text, but no pickles.

Loading a pickle (torch.save, joblib, `.npy` with objects) runs the code in it, with all rights of
the process. So a checkpoint with a pickle is refused before any of it is loaded (`wire.judge`
inspects the files' contents). While the server runs, any attempt to unpickle something that names
code is stopped, whatever library makes it.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...wire.containment import is_inside
from ...wire.judge import judge_file
from .refusals import ModelError

# The limit of the safetensors library itself.
LARGEST_HEADER_BYTES = 100_000_000
LARGEST_TEXT_BYTES = 64 * 1024**2
TEXTS = (".md", ".txt", ".yaml", ".yml")
ADVICE = "save the weights with safetensors (safetensors.torch.save_file) and serve those"
MOST_FILES = 10_000
# Directories that become a checkpoint when they are renamed.
HALF_WRITTEN = re.compile(r"\..*\.partial-")


def check(path: Path) -> tuple[str, ...]:
    """List the files of a model at or below `path`, by name; ModelError names a refused file.

    They are safetensors, or the text formats of XGBoost and LightGBM.

    Reads only the headers of large files. Links out of `path` are refused. A run may still be
    writing: incomplete directories with hidden names and deleted files are ignored.
    """
    if not path.exists():
        raise ModelError(f"there is no checkpoint at {path}")
    names = []
    for file in _list_files(path):
        name = str(file.relative_to(path)) if file != path else path.name
        if not is_inside(file, path):
            raise ModelError(f"{name!a} is a link that leads out of the checkpoint")
        with suppress(FileNotFoundError):
            if _is_model(file, name):
                names.append(name)
    if not names:
        raise ModelError(f"there are no safetensors in {path}; {ADVICE}")
    return tuple(names)


def refuse_pickles() -> None:
    """Make unpickling of code raise ModelError in this process from now on, in any library.

    Python calls an audit hook for every class or function that a pickle names; a hook cannot be
    removed.
    """
    sys.addaudithook(_stop_unpickling)


def _stop_unpickling(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        module, name = (str(one) for one in arguments[:2])
        raise ModelError(f"a pickle that names {module}.{name} was about to be loaded; {ADVICE}")


def _list_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files: list[Path] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [folder_name for folder_name in folders if not HALF_WRITTEN.match(folder_name)]
        files += [Path(folder) / name for name in names]
        if len(files) > MOST_FILES:
            raise ModelError(f"{path} is not a checkpoint: it has more than {MOST_FILES} files")
    return sorted(files)


def _is_model(file: Path, name: str) -> bool:
    """Whether it is safetensors or trees; False for other text. ModelError for anything else."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{name!a} is not a file")
    size = status.st_size
    with file.open("rb") as opened:
        verdict = judge_file(file.name, opened, size)
    if verdict.pickle:
        text = f"{name!a} is {verdict.pickle}: loading it would run the code in it"
        raise ModelError(f"{text}; {ADVICE}")
    if verdict.hazard:
        raise ModelError(f"{name!a} must not be loaded: {verdict.hazard}; {ADVICE}")
    if file.suffix == ".safetensors":
        if damage := _find_damage(file, size):
            raise ModelError(f"{name!a} {damage}")
        return True
    if file.suffix != ".json" and file.suffix not in TEXTS:
        raise ModelError(f"{name!a} is neither safetensors nor text; {ADVICE}")
    if size > LARGEST_TEXT_BYTES:
        raise ModelError(f"{name!a} is too large for a text file ({size} bytes)")
    try:
        return _has_trees(file)
    except (ValueError, RecursionError):
        kind = "JSON" if file.suffix == ".json" else "text"
        raise ModelError(f"{name!a} is not {kind}, despite its name") from None


def _has_trees(file: Path) -> bool:
    """Whether a text is a model of XGBoost or LightGBM; ValueError if it is not what its name says.

    XGBoost writes JSON with these keys; the first line of LightGBM's text is its name for them.
    """
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".json":
        return file.suffix == ".txt" and text.startswith("tree\n")
    value = json.loads(text)
    return isinstance(value, dict) and {"learner", "version"} <= value.keys()


def _find_damage(file: Path, size: int) -> str:
    """Describe the damage of a safetensors file; "" if none exists.

    The header must be complete, and match the file's size.
    """
    with file.open("rb") as opened:
        first = opened.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(LARGEST_HEADER_BYTES, size - 8):
            return "is not a safetensors file, or is truncated"
        text = opened.read(length)
    try:
        header = json.loads(text)
        ends = [
            _end(*value["data_offsets"]) for key, value in header.items() if key != "__metadata__"
        ]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return "has a damaged header"
    is_complete = max(ends, default=0) == size - 8 - length
    return "" if is_complete else "is truncated, or contains more than safetensors"


def _end(begin: object, end: object) -> int:
    """Return where a tensor's data ends; ValueError if its range is not valid."""
    if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end):
        raise ValueError((begin, end))
    return end
