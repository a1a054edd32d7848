"""Bring a lab to another version of its starter, without overwriting the student's changes.

Each file is merged in three ways, against the version that the lab received last, by `git
merge-file`. Where both sides changed the same lines, the student's file stays, and the merge with
its conflict marks is written beside it.
"""

from __future__ import annotations

import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from labctl.config import copy_environment
from labctl.config.identity import replace_file
from labctl.errors import NotFoundError, PolicyError
from labctl.model import Value
from labctl.shell import command
from labctl.sync.starter import Starter, StarterFile, read_record
from labctl.wire.containment import find_link_on_way

CONFLICT = ".conflict"
# What git writes behind the marks of a conflict.
MINE, COURSES = "your version", "the course's version"
MERGE_S = 60.0
LONGEST_LIST = 1000
Action = Literal["added", "updated", "merged", "removed", "kept", "conflict", "blocked"]


class FileChange(Value, frozen=True):
    """What an update did with one file. A file that needed nothing has no FileChange.

    `kept` is a file that the student changed or deleted, and that stays so. `beside` is the path
    of the file with the conflict marks. `why` says what blocks a path, and `blocked_by` is the path
    of what the student has to move away.
    """

    path: str
    action: Action
    beside: str = ""
    why: str = ""
    blocked_by: str = ""


class _Blocked(Value, frozen=True):
    """`path`, at or above that of a file, is something else than it must be."""

    path: str
    why: str


def update_files(root: Path, base: Starter | None, new: Starter) -> tuple[FileChange, ...]:
    """Write `new` into the lab at `root`, which received `base` before; None for the first time.

    An interrupted update can be repeated: files that are already as in `new` need nothing.
    """
    return tuple(_list_changes(root, base.by_path() if base else {}, new.by_path()))


def restore_file(root: Path, path: str) -> None:
    """Write a file again as the course handed it out, if it is missing in the lab at `root`.

    NotFoundError for a file that was not handed out; PolicyError if the lab has something there.
    """
    record = read_record(root)
    file = record.starter.by_path().get(path) if record else None
    if file is None:
        names = ", ".join(record.starter.by_path()) if record else "this lab has no such files"
        raise NotFoundError(
            f"the course handed out no file {path[:200]!a}",
            why=names[:LONGEST_LIST],
            hint="labctl join --restore PATH   # the path in the assignment's directory",
        )
    mine = _read_own(root, path)
    if mine is not None:
        why = mine.why if isinstance(mine, _Blocked) else "labctl never overwrites your files"
        raise PolicyError(
            f"{path} is in your lab", why=why, hint=command("mv", path, f"{path}.mine").render()
        )
    _write_file(root, file)


def _list_changes(
    root: Path, base: dict[str, StarterFile], new: dict[str, StarterFile]
) -> Iterator[FileChange]:
    for path in sorted(base.keys() | new.keys()):
        mine = _read_own(root, path)
        change = (
            FileChange(path=path, action="blocked", why=mine.why, blocked_by=mine.path)
            if isinstance(mine, _Blocked)
            else _update_file(root, mine, base.get(path), new.get(path))
        )
        if change is not None:
            yield change


def _read_own(root: Path, path: str) -> StarterFile | _Blocked | None:
    """Return the lab's own file, None if it is missing. Links are never followed."""
    if link := find_link_on_way(root, path):
        name = str(link.relative_to(root))
        return _Blocked(path=name, why=f"{name} is a link")
    file = root / path
    try:
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode):
            kind = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory"}
            name = kind.get(stat.S_IFMT(status.st_mode), "a special file")
            return _Blocked(path=path, why=f"{path} is {name} in your lab")
        return StarterFile(
            path=path, content=file.read_bytes(), executable=bool(status.st_mode & 0o100)
        )
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        parents = (str(parent) for parent in reversed(PurePosixPath(path).parents[:-1]))
        name = next(parent for parent in parents if not (root / parent).is_dir())
        return _Blocked(path=name, why=f"{name} is a file in your lab")
    except OSError as error:
        return _Blocked(path=path, why=f"{path}: {error.strerror}")


def _update_file(
    root: Path, mine: StarterFile | None, base: StarterFile | None, new: StarterFile | None
) -> FileChange | None:
    """Bring one file from `base` to `new`; None if nothing is to do or to say."""
    if new is None:
        return _remove_file(root, mine, base)
    if mine is None:
        if base is None:
            _write_file(root, new)
            return FileChange(path=new.path, action="added")
        return None if base == new else FileChange(path=new.path, action="kept")
    if mine.content == new.content or (base is not None and base.content == new.content):
        return None
    if base is not None and mine.content == base.content:
        _write_file(root, new)
        return FileChange(path=new.path, action="updated")
    merged, is_clean = _merge(mine, base, new)
    if is_clean:
        _write_file(root, msgspec.structs.replace(mine, content=merged))
        return FileChange(path=new.path, action="merged")
    beside = _name_beside(root, new.path, merged)
    _write_file(root, msgspec.structs.replace(new, path=beside, content=merged))
    return FileChange(path=new.path, action="conflict", beside=beside)


def _remove_file(
    root: Path, mine: StarterFile | None, base: StarterFile | None
) -> FileChange | None:
    """Remove a file that the course no longer hands out, unless the student changed it."""
    if mine is None or base is None:
        return None
    if mine.content != base.content:
        return FileChange(path=mine.path, action="kept")
    (root / mine.path).unlink()
    return FileChange(path=mine.path, action="removed")


def _merge(mine: StarterFile, base: StarterFile | None, new: StarterFile) -> tuple[bytes, bool]:
    """Merge three versions; return the text, and whether it has no conflicts.

    Without git, and for binary files, that is the course's version as a conflict.
    """
    with tempfile.TemporaryDirectory() as folder:
        versions = {"mine": mine.content, "base": base.content if base else b""}
        versions["course"] = new.content
        for name, content in versions.items():
            (Path(folder) / name).write_bytes(content)
        labels = ("-L", MINE, "-L", "handed out before", "-L", COURSES)
        words = ("git", "merge-file", "-p", "-q", *labels, "mine", "base", "course")
        environment = {**copy_environment(), "GIT_CONFIG_NOSYSTEM": "1"}
        try:
            done = subprocess.run(
                words,
                cwd=folder,
                env=environment,
                capture_output=True,
                timeout=MERGE_S,
                check=False,
            )
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return new.content, False
    # The code is the number of conflicts, at most 127; greater ones are errors.
    if done.returncode > 127 or done.returncode < 0:
        return new.content, False
    return done.stdout, done.returncode == 0


def has_conflict_marks(content: bytes) -> bool:
    """Tell whether both versions of a conflict are still in a file."""
    lines = content.splitlines()
    return f"<<<<<<< {MINE}".encode() in lines and f">>>>>>> {COURSES}".encode() in lines


def _name_beside(root: Path, path: str, content: bytes) -> str:
    """Return the path for a file with conflict marks, which replaces no other file."""
    number = 1
    while True:
        beside = f"{path}{CONFLICT}" if number == 1 else f"{path}{CONFLICT}-{number}"
        file = root / beside
        if not file.is_symlink() and (
            not file.exists() or (file.is_file() and file.read_bytes() == content)
        ):
            return beside
        number += 1


def _write_file(root: Path, file: StarterFile) -> None:
    target = root / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, file.content, mode=0o755 if file.executable else 0o644)
