"""Files of a seat's ended servers that the keeper saved, for the seat's students to fetch."""

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
from labctl.sync.home_files import SAVED as HOME
from labctl.sync.local_results import PARTIAL
from labctl.wire.containment import find_link_on_way, is_contained
from labctl.wire.keeper import (
    SAVED_PART_BYTES,
    FetchSavedFileReply,
    FetchSavedFileRequest,
    SavedFileRecord,
)

# Saved runs, as `labctl pull` lays them out in a lab. Of a seat's directory, students see only
# these, and the saved files of the server's home directory.
RUNS = "runs"
MOST_FILES = 20_000


def list_saved_files(folder: CourseFolder, seat: Seat) -> tuple[SavedFileRecord, ...]:
    """List the seat's saved files, by path; links and special files are left out.

    A path begins with the run, for the lab of the seat itself, with the lab for each lab that a
    student of the seat created, and with `server-home/` for files of the server's home directory.
    If there are more than MOST_FILES, those of runs come first.
    """
    files = [
        (f"{prefix}{path}", size)
        for prefix, directory in _find_directories(folder, seat).items()
        for path, size in sorted(_walk(directory))
    ]
    return tuple(SavedFileRecord(path, size) for path, size in sorted(files[:MOST_FILES]))


def read_saved_part(
    folder: CourseFolder, seat: Seat, request: FetchSavedFileRequest
) -> FetchSavedFileReply:
    """Return a part of a saved file; the last one has the hash of the whole file.

    NotFoundError for anything that is not a regular file among those that are listed.
    """
    try:
        root, path = _locate(folder, seat, request.path)
        if not _is_offered(request.path) or find_link_on_way(root, path) is not None:
            raise FileNotFoundError
        descriptor = os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
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


def _find_directories(folder: CourseFolder, seat: Seat) -> dict[str, Path]:
    """Return the directories with saved files, by the beginning of the paths of their files."""
    home = folder.path / SEATS / seat.name
    try:
        labs = sorted(path.name for path in (home / LABS).iterdir())
    except OSError:
        labs = []
    runs = {"": home / RUNS, **{f"{lab}/": home / LABS / lab / RUNS for lab in labs}}
    return runs if HOME in labs else {**runs, f"{HOME}/": home / HOME}


def _locate(folder: CourseFolder, seat: Seat, path: str) -> tuple[Path, str]:
    """Return the directory to which a listed path belongs, and the path below it.

    A run may be called like a lab, or like the directory of the home's files.
    """
    directories = _find_directories(folder, seat)
    first, slash, rest = path.partition("/")
    directory = directories.get(first + slash) if slash else None
    if directory is None or (directories[""] / path).is_file():
        return directories[""], path
    return directory, rest


def _is_offered(path: str) -> bool:
    return is_contained(path) and PARTIAL not in path.split("/") and not find_name_problem(path)


def _walk(root: Path) -> Iterator[tuple[str, int]]:
    for directory, _, names in os.walk(root):
        for name in names:
            file = Path(directory) / name
            path = file.relative_to(root).as_posix()
            if _is_offered(path) and file.is_file() and not file.is_symlink():
                yield path, file.stat().st_size
