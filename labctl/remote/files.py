"""Files in: nothing good is ever replaced by something that did not arrive whole.

`plan` says what is needed and what was edited here, and changes nothing that counts; bytes land in
a staging directory (arriving.py); `commit` checks every hash and renames. What goes out is in
outputs.py.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any, Callable, Iterator, Tuple

from .place import (
    Below,
    checked_name,
    free_bytes,
    home,
    inside,
    lab_dir,
    read_json,
    sha256_of,
    write_json,
)
from .reply import Failure

RESERVE_BYTES = 64 * 1024 * 1024
"""What a transfer leaves free: a disk at zero stops Docker and sshd too."""
NOT_A_FILE = "not a file"
UNREADABLE = "this user may not read it"
BYTECODE = "__pycache__"
Needed = Tuple[str, int, str]
"""Path, size, and sha256 or ""."""
Ready = Tuple[str, str, int, os.stat_result]
"""Path, sha256, mode, and what the staged file was found to be."""


class Target:
    """One tree that is pushed to: the lab's code, a data set, a run to restore, a model, wheels,
    what is graded.

    `record` holds [sha256, size, mtime_ns] of what a push brought, `due` the hash that each staged
    file is to have; a file with neither hash was edited here.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        kind, _, name = request["target"].partition("/")
        lab = lab_dir(request["lab"], request["lab_id"])
        self.key = request["target"].replace("/", "-")
        if kind == "code":
            self.root = lab / "code"
        elif kind == "data":
            self.root = lab / "data" / checked_name(name)
        elif kind == "restore":
            self.root = lab / "restore" / checked_name(name)
        elif kind == "model":
            self.root = lab / "models" / checked_name(name)
        elif kind == "grading":
            self.root = lab / "grading" / checked_name(name)
        elif kind == "wheelhouse":
            self.root = home() / ".wheelhouse"
        else:
            raise Failure("usage", f"nothing is pushed to {request['target']!r}")
        own = home() if kind == "wheelhouse" else lab / ".labctl"
        self.staging = own / f".staging-{self.key}"
        self.due_path = own / f".due-{self.key}.json"
        self.record_path = own / f".pushed-{self.key}.json"
        self.fetched_path = own / f".fetched-{name}.json"
        self.record: dict[str, list[Any]] = read_json(self.record_path)
        self.due: dict[str, str] = read_json(self.due_path)
        self._saved = dict(self.record)
        self.at = Below(self.root)
        self.staged_at = Below(self.staging)

    def look(self, path: str) -> tuple[str, os.stat_result | None]:
        """(hash of the file here, its stat); "" and None if there is none.

        Unchanged since the record, it is not read. A file that a push left here without its
        record being written is recorded now.
        """
        place = self.at(path)
        found = _lstat(place)
        if found is None:
            return "", None
        if not stat.S_ISREG(found.st_mode):
            return NOT_A_FILE, found
        known = self.record.get(path)
        if known and known[1] == found.st_size and known[2] == found.st_mtime_ns:
            return str(known[0]), found
        sha256 = sha256_of(Path(place))
        if sha256 == self.due.get(path) or (known and sha256 == known[0]):
            self.note(path, sha256, found)
        return sha256, found

    def present(self, path: str) -> str:
        """The hash of the file here, "" if there is none."""
        return self.look(path)[0]

    def edited(self, path: str, present: str) -> bool:
        """Whether what is `present` at this path is somebody's work here."""
        known = self.record.get(path)
        return bool(present) and (known is None or present != known[0])

    def note(self, path: str, sha256: str, found: os.stat_result) -> None:
        self.record[path] = [sha256, found.st_size, found.st_mtime_ns]

    def save(self) -> None:
        if self.record != self._saved:
            write_json(self.record_path, self.record)
            self._saved = dict(self.record)


def plan(request: dict[str, Any], target: Target | None = None) -> dict[str, Any]:
    """Compare "files" ([path, size, sha256, mode] each) with what is here.

    Replies needed paths, bytes already staged for each, conflicts (files edited here since the
    last push), and removed: what the last push brought and is gone at home. Only where nothing is
    needed are those removed at once; else `commit` (or `receive`) does it.

    A sha256 may be "" where it is only told when the file has come (`receive`): "begun" are the
    hashes of what is staged of such files, and "unsure" are those with a file of their size here,
    for which nothing is done before their hash is known.
    """
    target = target or Target(request)
    force = bool(request.get("force"))
    _drop_fetched(target)
    coming = {one[0] for one in request["files"]}
    doomed, conflicts = _doomed(target, coming, force)
    needed, size_needed, unsure = [], 0, []
    for path, size, sha256, mode in request["files"]:
        present, found = target.look(path)
        if present == NOT_A_FILE:
            conflicts += _in_the_way(Path(target.at(path)), target.root, doomed, force)
            present = ""
        elif not sha256 and found is not None and found.st_size == size:
            unsure.append(path)
            continue
        elif present == sha256 and found is not None:
            if target.edited(path, present):
                target.note(path, sha256, found)
            if (found.st_mode ^ mode) & 0o100:
                Path(target.at(path)).chmod(_mode(mode))
            continue
        if target.edited(path, present) and not force:
            conflicts.append(path)
            continue
        needed.append((path, size, sha256))
        size_needed += size
    staged = _staged(target, needed)
    free = free_bytes(target.root)
    short = size_needed - sum(staged.values()) + RESERVE_BYTES - free if needed else 0
    if not conflicts and not unsure and short <= 0:
        if needed:
            _stage(target, needed, staged)
        else:
            target.root.mkdir(parents=True, exist_ok=True)
            _remove(target, doomed)
    target.save()
    return {
        "needed": [one[0] for one in needed],
        "unsure": unsure,
        "staged": {p: n for p, n in staged.items() if n},
        "begun": _begun(target, needed, staged) if not unsure else {},
        "conflicts": sorted(set(conflicts)),
        "removed": doomed,
        "short_bytes": max(0, short),
        "free_bytes": free,
        "staging": str(target.staging),
        "root": str(target.root),
    }


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


def _staged(target: Target, needed: list[Needed]) -> dict[str, int]:
    """Bytes that lie here already for each needed path; those meant for another hash do not."""
    found = {}
    for path, size, sha256 in needed:
        if not sha256 or target.due.get(path) == sha256:
            known = _lstat(target.staged_at(path))
            there = known.st_size if known and stat.S_ISREG(known.st_mode) else 0
            found[path] = there if sha256 or there <= size else 0
    return found


def _begun(target: Target, needed: list[Needed], staged: dict[str, int]) -> dict[str, str]:
    """Hashes of what is staged, where nothing else says what it is the beginning of."""
    unknown = (path for path, _, sha256 in needed if not sha256 and staged[path])
    return {path: sha256_of(Path(target.staged_at(path))) for path in unknown}


def _stage(target: Target, needed: list[Needed], staged: dict[str, int]) -> None:
    fresh = not target.staging.exists()
    target.staging.mkdir(parents=True, exist_ok=True)
    for path, _, _ in () if fresh else needed:
        place = target.staged_at(path)
        if not staged.get(path) and _lstat(place) is not None:
            old = Path(place)
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    target.due = {path: sha256 for path, _, sha256 in needed}
    write_json(target.due_path, target.due)


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


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


def commit(
    request: dict[str, Any], arrived: dict[str, str] | None = None, target: Target | None = None
) -> dict[str, Any]:
    """Remove "removed", check the staged files' hashes and rename each into place.

    Replies bad (paths that did not arrive as promised) and conflicts: what was edited here since
    `plan` stays as it is. Repeated, it finds its work done. `arrived` are hashes taken on the way.
    A file for which no hash is promised is bad.
    """
    target = target or Target(request)
    force = bool(request.get("force"))
    known = arrived or {}
    bad, ready = [], []
    for path, size, sha256, mode in request["files"]:
        staged = target.staged_at(path)
        found = _lstat(staged)
        if found is None or not stat.S_ISREG(found.st_mode) or found.st_size < size:
            bad += [path] if not sha256 or target.present(path) != sha256 else []
        elif found.st_size == size and (known.get(path) or sha256_of(Path(staged))) == sha256:
            ready.append((path, sha256, mode, found))
        elif not sha256 or target.present(path) != sha256:
            bad.append(path)
            Path(staged).unlink()
    doomed: list[str] = []
    conflicts: list[str] = []
    for path in request.get("removed", []):
        present = target.present(path)
        edited = present != NOT_A_FILE and target.edited(path, present)
        (conflicts if edited and not force else doomed).append(path)
    try:
        _remove(target, doomed)
        if not _whole(target, ready):
            conflicts += _one_by_one(target, ready, force)
    finally:
        target.save()
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
