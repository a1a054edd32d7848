"""Is this checkpoint nothing but data? Safetensors and text are; a pickle is a program.

Loading a pickle (torch.save, joblib, `.npy` with objects) runs whatever code it holds, with all
rights of whoever loads it. So a checkpoint with one is refused before anything of it is loaded, by
what its files hold and not by their names; and while the server runs, every attempt to unpickle
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

from .refusals import ModelError

LARGEST_HEADER_BYTES = 100_000_000
"""The bound of the safetensors library itself."""
LARGEST_TEXT_BYTES = 64 * 1024**2
TEXTS = (".md", ".txt", ".yaml", ".yml")
ADVICE = "save the weights with safetensors (safetensors.torch.save_file) and serve those"
MOST_FILES = 10_000
HALF_WRITTEN = re.compile(r"\..*\.partial-")
"""Directories that become a checkpoint when they are renamed."""


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
    tensors = file.suffix == ".safetensors"
    # First of all, since the length at the head of good safetensors may look like a pickle's.
    damage = _damage(file, size) if tensors else ""
    if tensors and not damage:
        return True
    with file.open("rb") as opened:
        kind = _pickle(opened.read(512))
    if kind:
        text = f"{name!a} is {kind}: loading it would run whatever code it holds; {ADVICE}"
        raise ModelError(text)
    if tensors:
        raise ModelError(f"{name!a} {damage}")
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


def _pickle(head: bytes) -> str:
    """What kind of pickle a file begins like, "" where it does not.

    (A pickle of protocol 0 looks like text; it is stopped when somebody loads it.)
    """
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":
        return "a pickle"
    if head[:4] == b"PK\x03\x04":
        return "an archive of pickles, as torch.save writes it"
    if head[:6] == b"\x93NUMPY" and b"'|O'" in head:
        return "a NumPy file with a pickle in it"
    return ""


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
