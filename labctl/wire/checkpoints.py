"""Checkpoints in lists of names: the directories with a manifest, whose files belong together."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Iterable

MANIFEST = "manifest.json"


def list_checkpoints(names: Iterable[str]) -> list[str]:
    """Return the directories (with "/") that have a manifest, only the outermost ones."""
    outermost: list[str] = []
    for name in sorted(names, key=len):
        if name.endswith("/" + MANIFEST):
            top = name[: -len(MANIFEST)]
            if not any(top.startswith(outer) for outer in outermost):
                outermost.append(top)
    return outermost


def find_checkpoint(name: str, known: list[str]) -> str:
    """Return the one of these directories that has the file, "" for none."""
    return next((top for top in known if name.startswith(top)), "")


def fingerprint_checkpoints(directory: Path) -> dict[str, str]:
    """Return the fingerprint of each file and directory at the top of `directory`."""
    if not directory.is_dir():
        return {}
    return {entry.name: fingerprint_files(entry) for entry in directory.iterdir()}


def fingerprint_files(place: Path) -> str:
    """Hash the names, sizes and times of the files at or below `place`; no file is read.

    A download keeps the times, so both sides get the same result. Links are not followed.
    """
    files = [place]
    files += [Path(folder, name) for folder, _, names in os.walk(place) for name in names]
    digest = hashlib.sha256()
    for file in sorted(files):
        try:
            status = file.lstat()
        except FileNotFoundError:  # a draft of a run that goes on, renamed meanwhile
            continue
        if stat.S_ISREG(status.st_mode):
            row = (file.relative_to(place).as_posix(), status.st_size, status.st_mtime_ns)
            digest.update(repr(row).encode())
    return digest.hexdigest()[:16]
