"""What staff hands out: kept in the course's folder, and in every lab's data on the servers.

A run sees it at /lab/data/handouts. The folder is the truth: a server that is made later gets the
same, and pushing again sends only what has changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from labctl.actions import Reporter, sync
from labctl.actions.courses.machines import labs_on
from labctl.actions.ground import Ground
from labctl.courses.folder import CourseFolder
from labctl.errors import NotFoundError, UsageError
from labctl.model import FileEntry, Server, Value

NAME = "handouts"
REMOTE = f"data/{NAME}"


def take(folder: CourseFolder, files: Sequence[Path]) -> list[str]:
    """Copy these files and directories into the course's `handouts/`; the names that they have.

    UsageError for a link, for the course's own folder, and for a file that is none.
    """
    there = folder.path / NAME
    for file in files:
        if file.is_symlink() or not (file.is_file() or file.is_dir()):
            missing = not file.exists()
            raise (NotFoundError if missing else UsageError)(
                f"{file} is not a file or a directory",
                why="there is none" if missing else "links are not handed out",
                hint="labctl course push FILES",
            )
        if folder.path.is_relative_to(file.resolve()) and file.is_dir():
            raise UsageError(
                f"{file} holds the course's own folder",
                why="the roster and the grades are in it",
                hint="name the files that students are to have",
            )
        if file.resolve().is_relative_to(folder.private):
            raise UsageError(f"{file} is labctl's own", why="it is not for students")
    there.mkdir(mode=0o755, exist_ok=True)
    for file in files:
        target = there / file.resolve().name
        if file.resolve() == target.resolve():
            continue
        if file.is_dir():
            shutil.copytree(file, target, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(file, target)
    return [file.resolve().name for file in files]


class Handouts(Value, frozen=True):
    """What there is to hand out, and where it lies."""

    root: Path
    files: tuple[FileEntry, ...]


def files(folder: CourseFolder, reporter: Reporter) -> Handouts:
    """Everything in the course's `handouts/`, hashed; nothing where there is no such folder."""
    root = folder.path / NAME
    if not root.is_dir():
        return Handouts(root=root, files=())
    return Handouts(root=root, files=sync.scan_data(folder.private, NAME, root, reporter))


def bring(ground: Ground, server: Server, given: Handouts) -> int:
    """Make every lab's handouts on the server what the folder's are; how many files were sent."""
    if not given.files:
        return 0
    sent = 0
    for lab in labs_on(ground, server):
        done = sync.push(
            lab.remote(server),
            lab.config.name,
            lab.lab_id,
            REMOTE,
            given.root,
            given.files,
            lab.reporter,
            force=True,
        )
        sent += done.sent
    return sent
