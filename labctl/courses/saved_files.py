"""The results that the keeper saved of a seat's ended servers, for the seat's students to fetch."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from labctl.courses.context import SEATS
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.server_contents import LABS
from labctl.errors import NotFoundError
from labctl.sync.containment import find_name_problem
from labctl.sync.local_results import PARTIAL
from labctl.wire.containment import find_link_on_way, is_contained
from labctl.wire.keeper import (
    SAVED_PART_BYTES,
    FetchSavedFileReply,
    FetchSavedFileRequest,
    SavedFileRecord,
)

# Saved runs, as `labctl pull` lays them out in a lab. Nothing else of a directory is shown.
RUNS = "runs"
MOST_FILES = 20_000


def list_saved_files(folder: CourseFolder, seat: Seat) -> tuple[SavedFileRecord, ...]:
    """List the seat's saved files, by path; links and special files are left out.

    A path begins with the run, for the lab of the seat itself, and with the lab for each lab that
    a student of the seat created.
    """
    directories = _find_run_directories(folder, seat)
    files = sorted(
        (f"{prefix}{path}", size)
        for prefix, runs in directories.items()
        for path, size in _walk(runs)
    )
    return tuple(SavedFileRecord(path, size) for path, size in files[:MOST_FILES])


def read_saved_part(
    folder: CourseFolder, seat: Seat, request: FetchSavedFileRequest
) -> FetchSavedFileReply:
    """Return a part of a saved file; the last one has the hash of the whole file.

    NotFoundError for anything that is not a regular file among the seat's saved runs.
    """
    try:
        runs, path = _locate(folder, seat, request.path)
        if not _is_offered(request.path) or find_link_on_way(runs, path) is not None:
            raise FileNotFoundError
        descriptor = os.open(runs / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            offset = min(max(0, request.offset), size_bytes)
            file.seek(offset)
            part = file.read(SAVED_PART_BYTES)
            sha256 = ""
            if offset + len(part) >= size_bytes:
                file.seek(0)
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        raise NotFoundError(
            f"the course has no saved file {request.path[:200]!a} of yours",
            hint="labctl pull --from-course",
        ) from None
    return FetchSavedFileReply(base64.b64encode(part).decode(), size_bytes, sha256)


def _find_run_directories(folder: CourseFolder, seat: Seat) -> dict[str, Path]:
    """Return the directories with saved runs, by the beginning of the paths of their files."""
    home = folder.path / SEATS / seat.name
    try:
        labs = sorted(path.name for path in (home / LABS).iterdir())
    except OSError:
        labs = []
    return {"": home / RUNS, **{f"{lab}/": home / LABS / lab / RUNS for lab in labs}}


def _locate(folder: CourseFolder, seat: Seat, path: str) -> tuple[Path, str]:
    """Return the directory with the saved runs to which a path belongs, and the path below it.

    A run may be called like a lab.
    """
    directories = _find_run_directories(folder, seat)
    lab, slash, rest = path.partition("/")
    runs = directories.get(lab + slash) if slash else None
    if runs is None or (directories[""] / path).is_file():
        return directories[""], path
    return runs, rest


def _is_offered(path: str) -> bool:
    return is_contained(path) and PARTIAL not in path.split("/") and not find_name_problem(path)


def _walk(runs: Path) -> Iterator[tuple[str, int]]:
    for directory, _, names in os.walk(runs):
        for name in names:
            file = Path(directory) / name
            path = file.relative_to(runs).as_posix()
            if _is_offered(path) and file.is_file() and not file.is_symlink():
                yield path, file.stat().st_size
