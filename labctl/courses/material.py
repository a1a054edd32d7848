"""What staff gives to every lab: the course's data sets, and handouts, kept in the folder.

A run sees it at /lab/data/handouts. The folder is the truth: a server that is made later gets the
same, and pushing again sends only what has changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from labctl.courses.records.folder import PRIVATE, CourseFolder
from labctl.courses.server_contents import labs_on
from labctl.errors import NotFoundError, UsageError
from labctl.events import Reporter
from labctl.model import FileEntry, Server, Value
from labctl.servers.context import Ground
from labctl.shell import command
from labctl.sync.fetch import fetch_data
from labctl.sync.push import push
from labctl.sync.scan import scan_data

NAME = "handouts"
# Where a baked machine image has the course's data sets.
SHARED = "/opt/labctl/course/data"
SEED_S = 1800.0
_SEED = """cd "$1" 2>/dev/null || exit 0
for d in */; do
  t="$HOME/labctl/$2/data/${d%/}"
  [ -e "$t" ] && continue
  mkdir -p "$HOME/labctl/$2/data" && cp -R -- "$d" "$t.new" && mv "$t.new" "$t"
done
"""


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
        _check_for_students(folder, file.resolve())
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


def _check_for_students(folder: CourseFolder, file: Path) -> None:
    """UsageError where names, grades or hidden data would be handed out."""
    home = folder.path.resolve()
    own = (home / PRIVATE, home / "imported", home / "assignments", home / "roster.csv")
    holds = home.is_relative_to(file)
    if holds or any(file.is_relative_to(one) for one in (*own, home / "course.yaml")):
        raise UsageError(
            f"{file} is the course's own" if not holds else f"{file} holds the course's own folder",
            why="names, grades or hidden data are in it",
            hint="name the files that students are to have",
        )


class Tree(Value, frozen=True):
    """A directory here, and where in a lab on the server it goes: "data/<name>"."""

    target: str
    root: Path
    files: tuple[FileEntry, ...]


class Material(Value, frozen=True):
    """What every lab of the course is to have: trees from here, data that servers fetch."""

    trees: tuple[Tree, ...] = ()
    urls: dict[str, str] = msgspec.field(default_factory=dict)


def material(folder: CourseFolder, reporter: Reporter, *, data: bool = True) -> Material:
    """The handouts, and with `data` course.yaml's data sets; read and hashed once for everybody."""
    sources = folder.config.lab.data if data else {}
    roots = {name: one.path for name, one in sources.items() if one.path is not None}
    if (folder.path / NAME).is_dir():
        roots[NAME] = folder.path / NAME
    trees = tuple(
        Tree(
            target=f"data/{name}",
            root=root,
            files=scan_data(folder.private, name, root, reporter),
        )
        for name, root in roots.items()
    )
    urls = {name: one.url for name, one in sources.items() if one.url}
    return Material(trees=trees, urls=urls)


def seed(lab: Ground, server: Server) -> None:
    """Data that came with a baked machine image, copied there: nothing of it has to travel."""
    line = command("sh", "-c", _SEED, "sh", SHARED, lab.config.name).render()
    lab.connections.reopen(server).run(line, timeout_s=SEED_S)


def bring(ground: Ground, server: Server, given: Material, *, baked: bool = False) -> int:
    """Make every lab's data on the server what it is here; how many files were sent.

    What a student has changed in it there is given up: it is the course's. `baked`: the machine
    came with some of it.
    """
    sent = 0
    for lab in labs_on(ground, server) if given.trees or given.urls else []:
        remote = lab.remote(server)
        if baked and lab is ground:
            seed(lab, server)
        for tree in given.trees:
            about = (lab.config.name, lab.lab_id, tree.target)
            done = push(remote, *about, tree.root, tree.files, lab.reporter, force=True)
            sent += done.sent
        if given.urls:
            fetch_data(remote, lab.config.name, lab.lab_id, given.urls, lab.reporter)
    return sent
