"""Files in and out: nothing good is ever replaced by something that did not arrive whole.

In: `plan` says what is needed and what was edited here; bytes land in a staging directory (by
rsync, or `append`, or as a tar through `receive`); `commit` checks every hash and renames.
Out: `manifest` names whole files with their hashes; `read` hands over ranges of bytes.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .looks import final
from .place import (
    CHUNK,
    checked_name,
    free_bytes,
    home,
    inside,
    lab_dir,
    read_json,
    run_dir,
    sha256_of,
    write_json,
)
from .reply import Failure, answer, finish

RESERVE_BYTES = 64 * 1024 * 1024
"""What a transfer leaves free: a disk at zero stops Docker and sshd too."""
SETTLED_S = 2.0
"""A file written within this time may still be growing."""
UNFINISHED = ("*.tmp", "*.partial", "*.part", ".*.partial-*", ".nfs*")
GROWING = ("logs/*", "*.log", "*tfevents*")
"""Append-only by convention: their first N bytes are worth having while they grow."""


class Target:
    """One tree that is pushed to: the lab's code, a data set, or the wheelhouse."""

    def __init__(self, request: dict[str, Any]) -> None:
        kind, _, name = request["target"].partition("/")
        lab = lab_dir(request["lab"], request["lab_id"])
        self.key = request["target"].replace("/", "-")
        if kind == "code":
            self.root = lab / "code"
        elif kind == "data":
            self.root = lab / "data" / checked_name(name)
        elif kind == "wheelhouse":
            self.root = home() / ".wheelhouse"
        else:
            raise Failure("usage", f"nothing is pushed to {request['target']!r}")
        own = home() if kind == "wheelhouse" else lab / ".labctl"
        self.staging = own / f".staging-{self.key}"
        self.record_path = own / f".pushed-{self.key}.json"
        self.record: dict[str, list[Any]] = read_json(self.record_path)

    def present(self, path: str) -> str:
        """Hash of the file here, "" if there is none; unchanged since the record: not read."""
        place = inside(self.root, path)
        try:
            stat = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            return ""
        if not place.is_file() or place.is_symlink():
            return "not a file"
        known = self.record.get(path)
        if known and known[1] == stat.st_size and known[2] == stat.st_mtime_ns:
            return str(known[0])
        return sha256_of(place)

    def note(self, path: str, sha256: str) -> None:
        stat = os.lstat(inside(self.root, path))
        self.record[path] = [sha256, stat.st_size, stat.st_mtime_ns]

    def save(self) -> None:
        write_json(self.record_path, self.record)


def plan(request: dict[str, Any]) -> dict[str, Any]:
    """Compare "files" ([path, size, sha256, mode] each) with what is here; deletions included.

    Replies needed paths, bytes already staged for each, conflicts (files edited here since the
    last push), and applies nothing but the removal of files that the last push brought and that
    are gone at home.
    """
    target = Target(request)
    force = bool(request.get("force"))
    needed, conflicts, size_needed = [], [], 0
    for path, size, sha256, _mode in request["files"]:
        present = target.present(path)
        if present == sha256:
            if path not in target.record:
                target.note(path, sha256)
            continue
        known = target.record.get(path)
        if present and not force and (known is None or present != known[0]):
            conflicts.append(path)
            continue
        needed.append(path)
        size_needed += size
    gone = sorted(set(target.record) - {one[0] for one in request["files"]})
    doomed = []
    for path in gone:
        present = target.present(path)
        if present and present != target.record[path][0] and not force:
            conflicts.append(path)
        else:
            doomed.append(path)
    free = free_bytes(target.root)
    staged = {p: _size(inside(target.staging, p)) for p in needed}
    short = size_needed - sum(staged.values()) + RESERVE_BYTES - free
    if not conflicts and short <= 0:
        _remove(target, doomed)
        target.root.mkdir(parents=True, exist_ok=True)
        if needed:
            target.staging.mkdir(parents=True, exist_ok=True)
        target.save()
    return {
        "needed": needed,
        "staged": {p: n for p, n in staged.items() if n},
        "conflicts": sorted(conflicts),
        "removed": doomed,
        "short_bytes": max(0, short),
        "free_bytes": free,
        "staging": str(target.staging),
        "root": str(target.root),
    }


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _remove(target: Target, paths: list[str]) -> None:
    for path in paths:
        place = inside(target.root, path)
        if place.is_file() and not place.is_symlink():
            place.unlink()
        target.record.pop(path, None)
        for parent in place.parents:
            if parent == target.root or not _empty(parent):
                break
            parent.rmdir()


def _empty(directory: Path) -> bool:
    return directory.is_dir() and not any(directory.iterdir())


def receive(request: dict[str, Any]) -> dict[str, Any]:
    """A tar of the needed files on standard input, after the request's line; then `commit`."""
    target = Target(request)
    wanted = {one[0] for one in request["files"]}
    target.staging.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
            for member in archive:
                if not member.isreg() or member.name not in wanted:
                    raise Failure("usage", f"the archive holds {member.name!r}, which is not due")
                content = archive.extractfile(member)
                place = inside(target.staging, member.name)
                place.parent.mkdir(parents=True, exist_ok=True)
                with place.open("wb") as file:
                    shutil.copyfileobj(content, file, CHUNK)  # type: ignore[arg-type]
    except tarfile.TarError as error:
        raise Failure("link", "the transfer was cut short", str(error), "labctl push") from None
    return commit(request)


def append(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes from standard input go to the staged "path" from "offset" on; a repeat is harmless."""
    target = Target(request)
    place = inside(target.staging, request["path"])
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch()
    with place.open("r+b") as file:
        file.truncate(int(request["offset"]))
        file.seek(int(request["offset"]))
        shutil.copyfileobj(sys.stdin.buffer, file, CHUNK)
        return {"size": file.tell()}


def commit(request: dict[str, Any]) -> dict[str, Any]:
    """Check the staged files' hashes and rename each into place; says which did not match.

    What was edited here between `plan` and now is a conflict and stays as it is.
    """
    target = Target(request)
    force = bool(request.get("force"))
    bad, conflicts, done = [], [], 0
    for path, size, sha256, mode in request["files"]:
        staged = inside(target.staging, path)
        if _size(staged) != size or staged.is_symlink() or sha256_of(staged) != sha256:
            if target.present(path) != sha256:
                bad.append(path)
            if staged.exists() and _size(staged) >= size:
                staged.unlink()
            continue
        present = target.present(path)
        known = target.record.get(path)
        if present and not force and (known is None or present != known[0]) and present != sha256:
            conflicts.append(path)
            continue
        place = inside(target.root, path)
        if place.is_dir():
            raise Failure("policy", f"{place} is a directory on the server, a file at home")
        place.parent.mkdir(parents=True, exist_ok=True)
        staged.chmod(0o755 if mode & 0o100 else 0o644)
        staged.replace(place)
        target.note(path, sha256)
        done += 1
    target.save()
    if not bad:
        shutil.rmtree(target.staging, ignore_errors=True)
    return {"committed": done, "bad": bad, "conflicts": conflicts}


def edits(request: dict[str, Any]) -> dict[str, Any]:
    """What was made or changed in the lab's code on the server since the last push."""
    target = Target({**request, "target": "code"})
    changed = []
    for path in _walk(target.root):
        name = str(path.relative_to(target.root))
        if any(part in ("__pycache__", ".ipynb_checkpoints") for part in path.parts):
            continue
        sha256 = target.present(name)
        known = target.record.get(name)
        if known is None or known[0] != sha256:
            changed.append([name, path.stat().st_size, sha256])
    return {"files": changed, "root": str(target.root)}


def _walk(root: Path) -> Iterator[Path]:
    """Regular files below `root`, never through links, in order of name."""
    for directory, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            path = Path(directory) / name
            if path.is_file() and not path.is_symlink():
                yield path


def manifest(request: dict[str, Any]) -> dict[str, Any]:
    """The whole files of each run in "runs" (all if empty), below "outputs" (or "all").

    Replies per run: files [path, size, sha256, growing], and skipped [path, reason]. A checkpoint
    directory with a manifest.json counts only when every file in it matches; other files only when
    size and time stand still while they are hashed.
    """
    root = lab_dir(request["lab"], request["lab_id"])
    wanted = request.get("runs") or [
        d.name for d in sorted((root / "runs").glob("*")) if not d.name.startswith(".")
    ]
    return {"runs": {name: _manifest(run_dir(root, name), request) for name in wanted}}


def _manifest(directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    if not directory.is_dir():
        raise Failure("missing", f"there is no run {directory.name} here", "", "labctl status")
    spec = read_json(directory / ".labctl" / "spec.json")
    ended = bool(final(directory))
    cache_path = directory / ".labctl" / "hashes.json"
    cache = read_json(cache_path)
    fresh: dict[str, list[Any]] = {}
    files, skipped = [], []
    for path in _chosen(directory, spec, bool(request.get("all"))):
        name = str(path.relative_to(directory))
        reason, entry = _whole(path, name, ended, cache)
        if entry is None:
            skipped.append([name, reason])
            continue
        fresh[name] = entry
        growing = not ended and _matches(name, GROWING)
        files.append([name, entry[0], entry[2], growing])
    write_json(cache_path, fresh)
    broken = _broken_checkpoints(directory, {f[0]: f for f in files})
    skipped += [[f[0], broken[top]] for f in files for top in broken if f[0].startswith(top + "/")]
    files = [f for f in files if not any(f[0].startswith(top + "/") for top in broken)]
    return {"files": files, "skipped": skipped, "directory": str(directory), "ended": ended}


def _chosen(directory: Path, spec: dict[str, Any], everything: bool) -> Iterator[Path]:
    outputs = {*spec.get("outputs", []), "logs"}
    known: set[str] = set()
    if everything:
        text = directory / ".labctl" / "code.json"
        known = set(json.loads(text.read_text())) if text.exists() else set()
    for path in _walk(directory):
        name = str(path.relative_to(directory))
        if name.startswith(".labctl/") or "/__pycache__/" in name:
            continue
        is_output = any(name == o or name.startswith(o + "/") for o in outputs)
        if is_output or (everything and not (name.startswith("code/") and name[5:] in known)):
            yield path


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    parts = name.split("/")
    return any(
        fnmatch.fnmatch(name, p) or any(fnmatch.fnmatch(part, p) for part in parts)
        for p in patterns
    )


def _whole(
    path: Path, name: str, ended: bool, cache: dict[str, Any]
) -> tuple[str, list[Any] | None]:
    """("", [size, mtime_ns, sha256]) of a file that stood still, or (why not, None)."""
    if _matches(name, UNFINISHED):
        return "unfinished by its name", None
    try:
        before = path.stat()
        growing = not ended and _matches(name, GROWING)
        if not ended and not growing and time.time() - before.st_mtime < SETTLED_S:
            return "written just now", None
        known = cache.get(name)
        if known and known[:2] == [before.st_size, before.st_mtime_ns]:
            return "", known
        sha256 = sha256_of(path, before.st_size if growing else None)
        after = path.stat()
    except FileNotFoundError:
        return "removed meanwhile", None
    moved = (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
    if moved and not (growing and after.st_size >= before.st_size):
        return "still changing", None
    # A growing file is never taken from the cache by its new time, only by the old one.
    return "", [before.st_size, before.st_mtime_ns, sha256]


def _broken_checkpoints(directory: Path, files: dict[str, list[Any]]) -> dict[str, str]:
    """Checkpoint directories whose manifest names a file that is missing or different."""
    broken = {}
    for name in files:
        if not name.endswith("/manifest.json"):
            continue
        top = name[: -len("/manifest.json")]
        listed = read_json(directory / name).get("files", {})
        for inner, expected in listed.items() if isinstance(listed, dict) else ():
            found = files.get(f"{top}/{inner}")
            same = found and isinstance(expected, dict) and found[2] == expected.get("sha256")
            if not same:
                broken[top] = f"its manifest does not match {inner}"
                break
    return broken


def read(request: dict[str, Any]) -> None:
    """Bytes [offset, offset + length) of "path" below the run or the code, after the reply."""
    root = lab_dir(request["lab"], request["lab_id"])
    base = run_dir(root, request["run"]) if request.get("run") else root / "code"
    path = inside(base, request["path"])
    if path.is_symlink() or not path.is_file():
        raise Failure("missing", f"{path} is not there")
    answer({"size": path.stat().st_size})
    with path.open("rb") as file:
        file.seek(int(request["offset"]))
        _copy(file, int(request["length"]))
    finish({})


def _copy(file: BinaryIO, length: int) -> None:
    while length > 0:
        block = file.read(min(CHUNK, length))
        if not block:
            return
        sys.stdout.buffer.write(block)
        length -= len(block)
    sys.stdout.buffer.flush()
