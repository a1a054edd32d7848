"""Pickles among checkpoints: loading one runs whatever code it holds, so none is loaded here."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from labctl.errors import PolicyError

SUFFIXES = frozenset({".pt", ".pth", ".pkl", ".pickle", ".joblib", ".ckpt", ".dill", ".npy"})
"""Files of these names are taken for pickles, whatever they begin with: NumPy's may hold some."""
PROTOCOLS = range(2, 6)
MOST_MEMBERS = 100_000
LONGEST_HEADER = 100_000_000
"""Bytes, as safetensors itself allows."""


def refuse_pickles(place: Path, hint: str) -> None:
    """PolicyError, with the first one's name, where anything at or below `place` is a pickle."""
    for path in sorted(_files(place)):
        if reason := pickled(path):
            name = path.name if path == place else path.relative_to(place.parent).as_posix()
            raise PolicyError(
                f"{name} {reason}",
                why="loading a pickle runs any code that its writer put there; safetensors does not"
                " (safetensors.torch.save_file)",
                hint=hint,
            )


def pickled(path: Path) -> str:
    """In what way a file is a pickle, by its content first; "" where it is none."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError:
        return ""
    if len(head) > 1 and head[0] == 0x80 and head[1] in PROTOCOLS and not _safetensors(path):
        return "is a pickle"
    if head[:2] == b"PK" and _zipped(path):
        return "holds a pickle, as torch.save writes it"
    if path.suffix.lower() == ".npy":
        return "is a NumPy file that may hold a pickle" if _object_array(path) else ""
    return f"is called {path.suffix}, as pickles are" if path.suffix.lower() in SUFFIXES else ""


def _files(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    for folder, _, names in os.walk(place):
        yield from (Path(folder) / name for name in names)


def _safetensors(path: Path) -> bool:
    """Whether it is called safetensors and begins so: the length of a JSON object, and the object.

    Such a length may look like a pickle's first bytes.
    """
    if path.suffix.lower() != ".safetensors":
        return False
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = file.read(length) if length <= LONGEST_HEADER else b""
    try:
        return len(head) == length and isinstance(json.loads(head), dict)
    except (ValueError, RecursionError):
        return False


def _zipped(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()[:MOST_MEMBERS]
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return True  # not to be read, so not to be trusted either
    return any(Path(name).suffix.lower() in SUFFIXES for name in names)


def _object_array(path: Path) -> bool:
    """Whether a NumPy file's header says that it holds Python objects, or cannot be read."""
    with path.open("rb") as file:
        head = file.read(512)
    return not head.startswith(b"\x93NUMPY") or b"|O" in head or b"descr" not in head
