"""Files in: nothing good is ever replaced by something that did not arrive whole.

`plan` says what is needed and what was edited here, and changes nothing that counts. rsync or tar
fills the staging directory. `commit` checks what arrived and renames it. What goes out is in
outputs.py.
"""

from __future__ import annotations

import base64
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any, Callable, Iterator, Tuple

from ..host.paths import free_bytes, inside, write_json
from ..reply import Failure
from .push_target import NOT_A_FILE, PushedFile, Target, lstat

# What a transfer leaves free: a disk at zero stops Docker and sshd too.
RESERVE_BYTES = 64 * 1024 * 1024
UNREADABLE = "this user may not read it"
BYTECODE = "__pycache__"

# Path, sha256, mode, and the stat of the staged file.
Ready = Tuple[str, str, int, os.stat_result]


def plan(request: dict[str, Any]) -> dict[str, Any]:
    """Compare "files" (each an `PushedFile`) with what is here.

    Replies needed paths, which of them lie whole in the staging directory ("whole") and how many
    bytes of the others ("staged_bytes"), conflicts (files edited here since the last push), and
    removed: what the last push brought and is gone at home. Only where nothing is needed are those
    removed at once; else `commit` does it. "unsure" are files without a sha256 whose size is that
    of the file here: nothing is done before their hash is known. "basis" is the tree here, "" if
    there is none, and "rsync" what rsync says of itself.

    "contents" (path -> base64) may hold small files: where no others are needed, they are
    committed at once, and the reply has "bad" too.
    """
    target = Target(request)
    force = bool(request.get("force"))
    contents: dict[str, str] = request.get("contents", {})
    _drop_fetched(target)
    entries = [PushedFile(*one) for one in request["files"]]
    doomed, conflicts = _doomed(target, {entry.path for entry in entries}, force)
    needed, unsure = [], []
    for entry in entries:
        present, found = target.look(entry.path)
        if present == NOT_A_FILE:
            conflicts += _in_the_way(Path(target.at(entry.path)), target.root, doomed, force)
            present = ""
        elif not entry.sha256 and found is not None and found.st_size == entry.size:
            unsure.append(entry.path)
            continue
        elif present == entry.sha256 and found is not None:
            if target.edited(entry.path, present):
                target.note(entry.path, entry.sha256, found)
            if (found.st_mode ^ entry.mode) & 0o100:
                Path(target.at(entry.path)).chmod(_mode(entry.mode))
            continue
        if target.edited(entry.path, present) and not force:
            conflicts.append(entry.path)
            continue
        needed.append(entry)
    whole, staged_bytes = _look_staged(target, needed)
    free = free_bytes(target.root)
    missing_bytes = sum(entry.size for entry in needed) - staged_bytes
    short = missing_bytes + RESERVE_BYTES - free if needed else 0
    refused = bool(conflicts or unsure or short > 0)
    reply = {
        "needed": [entry.path for entry in needed],
        "whole": whole,
        "staged_bytes": staged_bytes,
        "unsure": unsure,
        "conflicts": sorted(set(conflicts)),
        "removed": doomed,
        "short_bytes": max(0, short),
        "free_bytes": free,
        "staging": str(target.staging),
    }
    try:
        if needed and not refused:
            _stage(target, needed)
            reply.update(_take(target, needed, contents, doomed, force))
        elif not refused:
            target.root.mkdir(parents=True, exist_ok=True)
            _remove(target, doomed)
    finally:
        target.save()
    return reply


def _take(
    target: Target,
    needed: list[PushedFile],
    contents: dict[str, str],
    doomed: list[str],
    force: bool,
) -> dict[str, Any]:
    """Commit what came with the question; else say what a transfer has to know."""
    if {entry.path for entry in needed} <= contents.keys():
        for entry in needed:
            _write(target, entry.path, base64.b64decode(contents[entry.path]))
        return _commit(target, needed, doomed, force)
    basis = str(target.root) if target.root.is_dir() else ""
    return {"basis": basis, "rsync": rsync_version()}


def rsync_version() -> str:
    """What rsync here says of itself, "" where there is none."""
    try:
        done = subprocess.run(["rsync", "--version"], stdin=subprocess.DEVNULL, capture_output=True)
    except OSError:
        return ""
    return done.stdout.decode(errors="replace")


def _drop_fetched(target: Target) -> None:
    """A data set that came from an address is nobody's work: it makes way for a pushed one."""
    if target.fetched_path.exists():
        shutil.rmtree(target.root, ignore_errors=True)
        target.fetched_path.unlink()


def _doomed(target: Target, coming: set[str], force: bool) -> tuple[list[str], list[str]]:
    """(paths that go since they are gone at home, those among them that were edited here)."""
    doomed, conflicts = [], []
    for path in sorted(set(target.record) - coming):
        present = target.present(path)
        if present not in ("", NOT_A_FILE) and target.edited(path, present) and not force:
            conflicts.append(path)
        else:
            doomed.append(path)
    return doomed, conflicts


def _in_the_way(place: Path, root: Path, doomed: list[str], force: bool) -> list[str]:
    """What keeps a file from a link's or a directory's place: all in it that will not go."""
    if place.is_symlink() or not place.is_dir():
        return [] if force else [str(place.relative_to(root))]
    going = set(doomed)
    inner = (str(p.relative_to(root)) for p in walk(place) if BYTECODE not in p.parts)
    return [name for name in inner if name not in going]


def _mode(mode: int) -> int:
    return 0o755 if mode & 0o100 else 0o644


def _look_staged(target: Target, needed: list[PushedFile]) -> tuple[list[str], int]:
    """(needed paths that an earlier try has staged whole, bytes of them and of beginnings)."""
    whole: list[str] = []
    total = 0
    for entry in needed if target.staging.is_dir() else ():
        same = target.due.get(entry.path) == entry.sha256 and target.staged(entry) is not None
        found = lstat(target.staged_at(entry.path))
        if same:
            whole.append(entry.path)
        if found is not None and stat.S_ISREG(found.st_mode):
            total += min(found.st_size, entry.size)
    return whole, total


def _stage(target: Target, needed: list[PushedFile]) -> None:
    """Have a staging directory without anything that could be in the way of `needed`."""
    wanted = {entry.path for entry in needed}
    for folder, folders, names in os.walk(target.staging, topdown=False):
        for name in (*folders, *names):
            place = Path(folder) / name
            path = str(place.relative_to(target.staging))
            if place.is_dir() and not place.is_symlink():
                if path in wanted or not any(place.iterdir()):
                    shutil.rmtree(place)
            elif path not in wanted or not place.is_file() or place.is_symlink():
                place.unlink()
    target.staging.mkdir(parents=True, exist_ok=True)
    target.staging.chmod(0o700)
    _note_due(target, needed)


def _note_due(target: Target, entries: list[PushedFile]) -> None:
    due = {entry.path: entry.sha256 for entry in entries}
    if target.due != due or not target.due_path.exists():
        target.due = due
        write_json(target.due_path, due)


def _write(target: Target, path: str, content: bytes) -> None:
    place = Path(target.staged_at(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.write_bytes(content)


def _remove(target: Target, paths: list[str]) -> None:
    """Remove what pushes brought, and directories that it leaves empty."""
    for path in paths:
        place = inside(target.root, path)
        if place.is_file() and not place.is_symlink():
            place.unlink()
        target.record.pop(path, None)
        for parent in place.parents:
            if parent == target.root or not _clear_if_empty(parent):
                break


def _clear_if_empty(directory: Path) -> bool:
    """Remove a directory that holds nothing, or nothing but bytecode."""
    if not directory.is_dir() or directory.is_symlink():
        return not directory.exists()
    if any(inner.name != BYTECODE for inner in directory.iterdir()):
        return False
    shutil.rmtree(directory)
    return True


def commit(request: dict[str, Any]) -> dict[str, Any]:
    """Remove "removed", check the staged files and rename each into place.

    Replies bad (paths that did not arrive as promised) and conflicts: what was edited here since
    `plan` stays as it is. Repeated, it finds its work done. A file without a sha256 is bad.
    """
    target = Target(request)
    entries = [PushedFile(*one) for one in request["files"]]
    _note_due(target, entries)
    try:
        return _commit(target, entries, request["removed"], bool(request.get("force")))
    finally:
        target.save()


def _commit(
    target: Target, entries: list[PushedFile], removed: list[str], force: bool
) -> dict[str, Any]:
    bad: list[str] = []
    ready: list[Ready] = []
    for entry in entries:
        found = target.staged(entry) if entry.sha256 else None
        if found is not None:
            ready.append((entry.path, entry.sha256, entry.mode, found))
        elif not entry.sha256 or target.present(entry.path) != entry.sha256:
            bad.append(entry.path)
    doomed: list[str] = []
    conflicts: list[str] = []
    for path in removed:
        present = target.present(path)
        edited = present != NOT_A_FILE and target.edited(path, present)
        (conflicts if edited and not force else doomed).append(path)
    _remove(target, doomed)
    if not _whole(target, ready):
        conflicts += _one_by_one(target, ready, force)
    if not bad:
        shutil.rmtree(target.staging, ignore_errors=True)
    return {"committed": len(ready), "bad": bad, "conflicts": conflicts}


def _whole(target: Target, ready: list[Ready]) -> bool:
    """Where there is no tree yet: whether the staging directory became it, in one step."""
    staged = sum(len(names) for _, _, names in os.walk(target.staging))
    if os.path.lexists(target.root) or not ready or staged != len(ready):
        return False
    for path, _, mode, found in ready:
        _give_mode(target.staged_at(path), mode, found)
    target.root.parent.mkdir(parents=True, exist_ok=True)
    target.staging.chmod(0o755)
    target.staging.rename(target.root)
    for path, sha256, _, found in ready:
        target.note(path, sha256, found)
    return True


def _one_by_one(target: Target, ready: list[Ready], force: bool) -> list[str]:
    """Rename each file into place; those that stay, since somebody edited what is there."""
    conflicts: list[str] = []
    made: set[str] = set()
    for path, sha256, mode, found in ready:
        present, here = target.look(path)
        if target.edited(path, present) and not force:
            conflicts += [] if present == sha256 else [path]
            continue
        if here is not None and not stat.S_ISREG(here.st_mode):
            _make_way(target, path)
        _place(target, path, sha256, mode, found, made)
    return conflicts


def _make_way(target: Target, path: str) -> None:
    place = inside(target.root, path)
    if place.is_dir() and not place.is_symlink() and not _clear_if_empty(place):
        raise Failure("policy", f"{place} is a directory on the server, a file at home")


def _place(
    target: Target, path: str, sha256: str, mode: int, found: os.stat_result, made: set[str]
) -> None:
    """Rename the staged file that was `found` so; `made` are parents that are known to be there."""
    place, staged = target.at(path), target.staged_at(path)
    parent = place.rpartition("/")[0]
    if parent not in made:
        try:
            Path(parent).mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            what = f"{parent} is a file on the server, a directory at home"
            raise Failure("policy", what, "", f"labctl ssh -- rm {parent}") from None
        made.add(parent)
    _give_mode(staged, mode, found)
    os.replace(staged, place)  # noqa: PTH105 (a Path a file is slow)
    target.note(path, sha256, found)


def _give_mode(staged: str, mode: int, found: os.stat_result) -> None:
    if stat.S_IMODE(found.st_mode) != _mode(mode):
        Path(staged).chmod(_mode(mode))


def walk(
    root: Path,
    on_closed: Callable[[Path], None] | None = None,
    on_link: Callable[[Path], None] | None = None,
) -> Iterator[Path]:
    """Regular files below `root`, never through links, in order of name.

    `on_closed` hears of each directory, or file in one, that this user may not look into, and
    `on_link` of each symbolic link.
    """

    def note(error: OSError) -> None:
        if on_closed and isinstance(error, PermissionError):
            on_closed(Path(os.fsdecode(error.filename)))

    def note_link(path: Path) -> bool:
        is_link = path.is_symlink()
        if is_link and on_link:
            on_link(path)
        return is_link

    for directory, folders, names in os.walk(root, onerror=note):
        folders.sort()
        for name in folders if on_link else ():
            note_link(Path(directory) / name)
        for name in sorted(names):
            path = Path(directory) / name
            try:
                if not note_link(path) and path.is_file():
                    yield path
            except PermissionError as error:
                if on_closed is None:
                    raise
                note(error)
