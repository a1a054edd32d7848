"""The hashes of the files that students got from the course or labctl: nobody's own work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from labctl.courses.material import NAME as HANDOUTS
from labctl.courses.records.folder import CourseFolder
from labctl.courses.starters import list_handed_out
from labctl.courses.templates import BUILT_IN
from labctl.sync.scan import hash_file


def hash_handed_out_files(folder: CourseFolder, templates: Path) -> frozenset[str]:
    """Return the sha256 of every file of the starters, the handouts and labctl's templates.

    Starters that were replaced count too: a student may still have their files.
    """
    directories = {name for names in BUILT_IN.values() for name in names}
    roots = [folder.path / HANDOUTS, *(templates / name for name in directories)]
    hashes = {hash_file(path) for root in roots for path in _list_files(root)}
    return frozenset(hashes | list_handed_out(folder))


def _list_files(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
