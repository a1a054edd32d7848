"""The hashes of the files that students got from the course or labctl: nobody's own work."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from labctl.config.identity import write_private
from labctl.courses.material import NAME as HANDOUTS
from labctl.courses.records.folder import CourseFolder
from labctl.courses.templates import BUILT_IN
from labctl.errors import PolicyError
from labctl.sync.scan import hash_file
from labctl.sync.starter import Starter, decode_starter

# The directory of published starters in the course's private one, ASSIGNMENT/SHA256.json.
STARTERS = "starters"
# Below STARTERS: the hashes of all files of starters that students could get, now or earlier.
HANDED_OUT = "handed-out.sha256"


def hash_handed_out_files(folder: CourseFolder, templates: Path) -> frozenset[str]:
    """Return the sha256 of every file of the starters, the handouts and labctl's templates.

    Starters that were replaced count too: a student may still have their files.
    """
    hashes = {hash_file(path) for path in list_handed_out_files(folder, templates)}
    return frozenset(hashes | _list_starter_hashes(folder))


def list_handed_out_files(folder: CourseFolder, templates: Path) -> Iterator[Path]:
    """Yield the files of the handouts, with the published starters, and of labctl's templates."""
    directories = {name for names in BUILT_IN.values() for name in names}
    for root in (folder.path / HANDOUTS, *(templates / name for name in sorted(directories))):
        yield from _list_files(root)


def record_handed_out(folder: CourseFolder, starter: Starter) -> None:
    """Remember the hashes of a starter's files, which outlive the published version."""
    hashes = _list_starter_hashes(folder) | _hash_starter_files(starter)
    text = "".join(f"{sha256}\n" for sha256 in sorted(hashes))
    write_private(folder.private / STARTERS / HANDED_OUT, text.encode())


def _list_starter_hashes(folder: CourseFolder) -> set[str]:
    directory = folder.private / STARTERS
    try:
        hashes = set((directory / HANDED_OUT).read_text().split())
    except FileNotFoundError:
        hashes = set()
    # An earlier version of labctl may have published these.
    for file in directory.glob("*/[!.]*.json"):
        # A damaged one is no reason to withhold grades or to publish nothing.
        with suppress(PolicyError):
            hashes |= _hash_starter_files(decode_starter(file.read_bytes()))
    return hashes


def _hash_starter_files(starter: Starter) -> set[str]:
    return {hashlib.sha256(file.content).hexdigest() for file in starter.files}


def _list_files(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
