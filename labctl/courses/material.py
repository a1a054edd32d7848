"""The files that every lab of a course gets: its data sets, and the handouts in its folder.

A run sees the handouts at /lab/data/handouts. The folder is the truth: a server that is created
later gets the same files, and pushing again sends only what has changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from labctl.courses.records.folder import PRIVATE, CourseFolder
from labctl.courses.server_contents import list_labs
from labctl.errors import NotFoundError, UsageError
from labctl.events import Reporter
from labctl.model import FileEntry, Server, Value
from labctl.servers.context import LabContext
from labctl.shell import command
from labctl.sync.fetch import fetch_data
from labctl.sync.push import push_tree
from labctl.sync.scan import scan_data

NAME = "handouts"
# Where a baked machine image holds the course's data sets.
SHARED = "/opt/labctl/course/data"
SEED_S = 1800.0
_SEED = """cd "$1" 2>/dev/null || exit 0
for d in */; do
  t="$HOME/labctl/$2/data/${d%/}"
  [ -e "$t" ] && continue
  mkdir -p "$HOME/labctl/$2/data" && cp -R -- "$d" "$t.new" && mv "$t.new" "$t"
done
"""


def add_handouts(folder: CourseFolder, files: Sequence[Path]) -> list[str]:
    """Copy these files and directories into the course's `handouts/`; return their names.

    UsageError for a link, a special file or the course's own files; NotFoundError for a missing
    one.
    """
    handouts = folder.path / NAME
    for file in files:
        if file.is_symlink() or not (file.is_file() or file.is_dir()):
            missing = not file.exists()
            raise (NotFoundError if missing else UsageError)(
                f"{file} is not a file or a directory",
                why="it does not exist"
                if missing
                else "links and special files are not handed out",
                hint="labctl course push FILES",
            )
        _require_no_secrets(folder, file.resolve())
    handouts.mkdir(mode=0o755, exist_ok=True)
    for file in files:
        target = handouts / file.resolve().name
        if file.resolve() == target.resolve():
            continue
        if file.is_dir():
            shutil.copytree(file, target, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(file, target)
    return [file.resolve().name for file in files]


def _require_no_secrets(folder: CourseFolder, file: Path) -> None:
    """Raise UsageError if names, grades or hidden data would be handed out."""
    home = folder.path.resolve()
    private = (home / PRIVATE, home / "imported", home / "assignments", home / "roster.csv")
    holds_folder = home.is_relative_to(file)
    if holds_folder or any(file.is_relative_to(path) for path in (*private, home / "course.yaml")):
        raise UsageError(
            f"{file} contains the course's folder"
            if holds_folder
            else f"{file} is private to the course",
            why="it has names, grades or hidden data",
            hint="choose only the files that students should get",
        )


class UploadTree(Value, frozen=True):
    """A local directory, and its target in a lab on the server: "data/<name>"."""

    target: str
    root: Path
    files: tuple[FileEntry, ...]


class CourseMaterial(Value, frozen=True):
    """The files for every lab of the course: directories from here, URLs that servers fetch."""

    trees: tuple[UploadTree, ...] = ()
    urls: dict[str, str] = msgspec.field(default_factory=dict)


def collect_material(
    folder: CourseFolder, reporter: Reporter, *, data: bool = True
) -> CourseMaterial:
    """Read and hash the handouts, and with `data` course.yaml's data sets, once for all labs."""
    sources = folder.config.lab.data if data else {}
    roots = {name: source.path for name, source in sources.items() if source.path is not None}
    if (folder.path / NAME).is_dir():
        roots[NAME] = folder.path / NAME
    trees = tuple(
        UploadTree(
            target=f"data/{name}",
            root=root,
            files=scan_data(folder.private, name, root, reporter),
        )
        for name, root in roots.items()
    )
    urls = {name: source.url for name, source in sources.items() if source.url}
    return CourseMaterial(trees=trees, urls=urls)


def seed_data(lab: LabContext, server: Server) -> None:
    """Copy the data of a baked machine image into the lab on the server, without a transfer."""
    line = command("sh", "-c", _SEED, "sh", SHARED, lab.config.name).render()
    lab.connections.reopen(server).run(line, timeout_s=SEED_S)


def push_material(
    context: LabContext, server: Server, wanted: CourseMaterial, *, baked: bool = False
) -> int:
    """Make the course data of every lab on the server equal to the folder; return the files sent.

    Students' changes in it are overwritten. `baked` is True if the machine image came with some of
    it.
    """
    sent = 0
    for lab in list_labs(context, server) if wanted.trees or wanted.urls else []:
        remote = lab.open_agent(server)
        if baked and lab is context:
            seed_data(lab, server)
        for tree in wanted.trees:
            destination = (lab.config.name, lab.lab_id, tree.target)
            result = push_tree(
                remote, *destination, tree.root, tree.files, lab.reporter, force=True
            )
            sent += result.sent
        if wanted.urls:
            fetch_data(remote, lab.config.name, lab.lab_id, wanted.urls, lab.reporter)
    return sent
