"""Is this checkpoint nothing but data? Safetensors and text are; a pickle is a program.

Loading a pickle (torch.save, joblib, `.npy` with objects) runs whatever code it holds, with all
rights of whoever loads it. So a checkpoint with one is refused before anything of it is loaded
(`wire.judge` looks at what its files hold); and while the server runs, every attempt to unpickle
something that names code is stopped, whatever library makes it.
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

from ...wire.judge import judge_file
from .refusals import ModelError

# The bound of the safetensors library itself.
LARGEST_HEADER_BYTES = 100_000_000
LARGEST_TEXT_BYTES = 64 * 1024**2
TEXTS = (".md", ".txt", ".yaml", ".yml")
ADVICE = "save the weights with safetensors (safetensors.torch.save_file) and serve those"
MOST_FILES = 10_000
# Directories that become a checkpoint when they are renamed.
HALF_WRITTEN = re.compile(r"\..*\.partial-")


def check(path: Path) -> tuple[str, ...]:
    """The safetensors files at or below `path`, by name; ModelError says which file is refused.

    Only heads of large files are read. Links are not followed out of `path`. A run may still be
    writing: what is half written under a hidden name, or gone meanwhile, does not count.
    """
    if not path.exists():
        raise ModelError(f"there is no checkpoint at {path}")
    found = []
    for file in _files(path):
        name = str(file.relative_to(path)) if file != path else path.name
        if not file.resolve().is_relative_to(path.resolve()):
            raise ModelError(f"{name!a} is a link that leads out of the checkpoint")
        with suppress(FileNotFoundError):
            if _checked(file, name):
                found.append(name)
    if not found:
        raise ModelError(f"there are no safetensors in {path}; {ADVICE}")
    return tuple(found)


def refuse_pickles() -> None:
    """From now on unpickling code raises ModelError in this process, whatever asks for it.

    Python calls an audit hook for every class or function that a pickle names; it cannot be taken
    away again.
    """
    sys.addaudithook(_stop)


def _stop(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        module, name = (str(one) for one in arguments[:2])
        raise ModelError(f"a pickle that names {module}.{name} was about to be loaded; {ADVICE}")


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found: list[Path] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [one for one in folders if not HALF_WRITTEN.match(one)]
        found += [Path(folder) / name for name in names]
        if len(found) > MOST_FILES:
            raise ModelError(f"{path} holds more than {MOST_FILES} files; that is no checkpoint")
    return sorted(found)


def _checked(file: Path, name: str) -> bool:
    """Whether it is safetensors; False for text. ModelError for anything else."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(f"{name!a} is not a file")
    size = found.st_size
    with file.open("rb") as opened:
        verdict = judge_file(file.name, opened, size)
    if verdict.pickle:
        text = f"{name!a} is {verdict.pickle}: loading it would run whatever code it holds"
        raise ModelError(f"{text}; {ADVICE}")
    if verdict.hazard:
        raise ModelError(f"{name!a} must not be loaded: {verdict.hazard}; {ADVICE}")
    if file.suffix == ".safetensors":
        if damage := _damage(file, size):
            raise ModelError(f"{name!a} {damage}")
        return True
    if file.suffix != ".json" and file.suffix not in TEXTS:
        raise ModelError(f"{name!a} is neither safetensors nor text; {ADVICE}")
    if size > LARGEST_TEXT_BYTES:
        raise ModelError(f"{name!a} is {size} bytes, too many for a text")
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            json.loads(text)
    except (ValueError, RecursionError):
        said = "JSON" if file.suffix == ".json" else "text"
        raise ModelError(f"{name!a} is not {said}, whatever its name says") from None
    return False


def _damage(file: Path, size: int) -> str:
    """What is wrong with a file of safetensors, "" for nothing.

    The header must be whole and speak of as many bytes as there are.
    """
    with file.open("rb") as opened:
        first = opened.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(LARGEST_HEADER_BYTES, size - 8):
            return "is not a safetensors file, or it is cut off"
        text = opened.read(length)
    try:
        header = json.loads(text)
        ends = [_end(value) for key, value in header.items() if key != "__metadata__"]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return "has a damaged header"
    whole = max(ends, default=0) == size - 8 - length
    return "" if whole else "is cut off, or more than safetensors"


def _end(entry: dict[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end):
        raise ValueError(entry)
    return end
