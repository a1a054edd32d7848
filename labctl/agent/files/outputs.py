"""The outputs of a run for download: `manifest` lists complete files with their hashes."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Set, Tuple

from ..host.paths import (
    HASHES,
    hash_file,
    lab_dir,
    measure_age_s,
    read_json,
    resolve_inside,
    run_dir,
    write_json,
)
from ..reply import Failure
from ..runs.records import read_final_record
from .files import UNREADABLE, read_rsync_version, walk

# seconds: a file written within this time may still be growing
SETTLED_S = 2.0
UNFINISHED = ("*.tmp", "*.partial", "*.part", ".*.partial-*")
NEVER = (".nfs*", "__pycache__")
# Append-only by convention: their first N bytes are useful while they grow.
GROWING = ("logs/*", "*.log", "*tfevents*")
# bytes: with "quick", larger files are hashed only when they are transferred
QUICK_BYTES = 1024 * 1024
MANIFEST = "manifest.json"
OUTWARD = "a link to a path outside the lab"
Files = Dict[str, List[Any]]
Open = Set[Tuple[int, int]]


def manifest(request: dict[str, Any]) -> dict[str, Any]:
    """List the complete files of each run in "runs" (all if empty), below its outputs (or "all").

    Replies per run: files [path, size, sha256, growing], skipped [path, reason], and "unpulled":
    how many of the files no client has reported to hold (verb `pulled`). Skipped files exist only
    on this server. Files that are no outputs by their name (NEVER) are in neither list. A
    checkpoint directory with a manifest.json counts only if every file in it matches. While a run
    lives, other files count only if no process has them open for writing and their size and time
    do not change. "outputs" adds to the outputs that the run was started with; "only" replaces
    them.

    With "quick", large files are not read: their hash is the one in a checkpoint's manifest, or ""
    (then verb `hashes` computes it). A wrong hash in a manifest is not detected.
    """
    root = lab_dir(request["lab"], request["lab_id"])
    run_ids = request.get("runs") or [
        d.name for d in sorted((root / "runs").glob("*")) if not d.name.startswith(".")
    ]
    directories = [run_dir(root, name) for name in run_ids]
    for directory in directories:
        if not directory.is_dir():
            what = f"run {directory.name} does not exist on this server"
            raise Failure("missing", what, "", "labctl status")
    ended = {d.name: bool(read_final_record(d)) for d in directories}
    writing = _OpenFiles()
    scans = {d.name: _RunScan(d, request, ended[d.name], writing).manifest() for d in directories}
    rsync = read_rsync_version() if request.get("quick") else ""
    return {"runs": {name: {**scan, "rsync": rsync} for name, scan in scans.items()}}


class _OpenFiles:
    """The files open for writing, found once and only where needed, since that takes a while."""

    def __init__(self) -> None:
        self._files: Open | None = None

    def __contains__(self, file: tuple[int, int]) -> bool:
        if self._files is None:
            self._files = list_open_for_writing()
        return file in self._files


def list_open_for_writing() -> Open:
    """Return (device, inode) of every file that a process of this user has open for writing.

    Containers run as this user too, so their processes are included.
    """
    files: Open = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    info = (process / "fdinfo" / descriptor.name).read_text()
                    flags = int(info.split("flags:", 1)[1].split()[0], 8)
                    if flags & os.O_ACCMODE:
                        status = descriptor.stat()
                        files.add((status.st_dev, status.st_ino))
    return files


class _RunScan:
    """A scan of one run's files."""

    def __init__(
        self, directory: Path, request: dict[str, Any], ended: bool, writing: _OpenFiles
    ) -> None:
        self.directory = directory
        self.everything = bool(request.get("all"))
        self.ended = ended
        self.writing = writing
        spec = read_json(directory / ".labctl" / "spec.json")
        output_names = {*spec.get("outputs", []), *request.get("outputs", []), "logs"}
        self.outputs = sorted(request.get("only") or output_names)
        self.quick = bool(request.get("quick"))
        self.cache_path = directory / HASHES
        self.cache = read_json(self.cache_path)
        self.promised: dict[str, str] = {}
        self.proved: set[str] = set()

    def manifest(self) -> dict[str, Any]:
        fresh: Files = {}
        files: Files = {}
        closed: set[Path] = set()
        links: set[Path] = set()
        candidates = list(self._name_outputs(self._list_candidates(closed.add, links.add)))
        skipped = [[name, UNREADABLE] for _, name in self._name_outputs(sorted(closed))]
        skipped += [[name, OUTWARD] for name in self._find_outward_links(sorted(links))]
        self._trust_manifests(name for _, name in candidates)
        for path, name in candidates:
            reason, entry = self._hash_complete(path, name)
            if entry is None:
                skipped.append([name, reason])
                continue
            fresh[name] = entry
            sha256 = entry[2] or self.promised.get(name, "")
            files[name] = [name, entry[0], sha256, self._is_growing(name)]
        if fresh != self.cache:
            write_json(self.cache_path, {**self.cache, **fresh})
        broken = self._find_broken_checkpoints(files)
        for name, reason in skipped:
            if name.endswith("/" + MANIFEST):
                broken.setdefault(name[: -len(MANIFEST)], f"its manifest: {reason}")
        complete = []
        for name, entry in files.items():
            reason = next((r for top, r in broken.items() if name.startswith(top)), "")
            if reason:
                skipped.append([name, reason])
            else:
                complete.append(entry)
        pulled = read_json(self.directory / ".labctl" / "pulled.json")
        return {
            "files": complete,
            "skipped": skipped,
            "directory": str(self.directory),
            "ended": self.ended,
            "unpulled": sum(
                pulled.get(name) != [size, sha256] for name, size, sha256, _ in complete
            ),
        }

    def _name_outputs(self, paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
        """Yield the paths that may be outputs, with their names in the run."""
        for path in paths:
            name = str(path.relative_to(self.directory))
            if not name.startswith(".labctl/") and not _matches(name, NEVER):
                yield path, name

    def _find_outward_links(self, links: Iterable[Path]) -> Iterator[str]:
        """Yield the links among the outputs that lead to files outside the lab."""
        lab = self.directory.parent.parent.resolve()
        for link, name in self._name_outputs(links):
            if not any(f"{name}/".startswith(f"{output}/") for output in self.outputs):
                continue
            # Many are broken on the server: the run's container has other paths.
            with contextlib.suppress(OSError, RuntimeError):
                target = link.resolve()
                if lab not in target.parents and (target.is_file() or target.is_dir()):
                    yield name

    def _list_candidates(
        self, on_closed: Callable[[Path], None], on_link: Callable[[Path], None]
    ) -> Iterator[Path]:
        if not self.everything:
            yielded = set()
            for output in self.outputs:
                path = resolve_inside(self.directory, output)
                if path.is_symlink():
                    on_link(path)
                    continue
                for file in [path] if path.is_file() else walk(path, on_closed, on_link):
                    if file not in yielded:
                        yielded.add(file)
                        yield file
            return
        code_list = self.directory / ".labctl" / "code.json"
        code_files = set(json.loads(code_list.read_text())) if code_list.exists() else set()
        for file in walk(self.directory, on_closed, on_link):
            name = str(file.relative_to(self.directory))
            if not (name.startswith("code/") and name[5:] in code_files):
                yield file

    def _trust_manifests(self, names: Iterable[str]) -> None:
        """Read the hashes in checkpoints' manifests into `promised`.

        If a manifest has a hash for every file, it and its files count at once, without waiting
        until they stop changing: `proved`.
        """
        for name in () if self.ended and not self.quick else names:
            if name.endswith("/" + MANIFEST):
                entries = read_json(self.directory / name).get("files")
                top, hashes = name[: -len(MANIFEST)], _parse_hashes(entries)
                promised = {top + inner: sha256 for inner, sha256 in hashes.items()}
                self.promised.update(promised)
                if entries and len(promised) == len(entries):
                    self.proved |= {name, *promised}

    def _is_growing(self, name: str) -> bool:
        return not self.ended and _matches(name, GROWING)

    def _hash_complete(self, path: Path, name: str) -> tuple[str, list[Any] | None]:
        """Return ("", [size, mtime_ns, sha256]) of a stable file, or (reason, None)."""
        if not self.ended and _matches(name, UNFINISHED):
            return "unfinished by its name", None
        is_growing = self._is_growing(name)
        try:
            before = path.stat()
            if not self.ended and not is_growing and name not in self.proved:
                if measure_age_s(before.st_mtime) < SETTLED_S:
                    return "written just now", None
                if (before.st_dev, before.st_ino) in self.writing:
                    return "still open for writing", None
            cached = self.cache.get(name)
            if cached and cached[:2] == [before.st_size, before.st_mtime_ns] and cached[2]:
                return "", cached
            if self.quick and not is_growing and before.st_size > QUICK_BYTES:
                return "", [before.st_size, before.st_mtime_ns, ""]
            sha256 = hash_file(path, before.st_size if is_growing else None)
            after = path.stat()
        except FileNotFoundError:
            return "removed meanwhile", None
        except PermissionError:
            return UNREADABLE, None
        has_changed = (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
        if has_changed and not (is_growing and after.st_size >= before.st_size):
            return "still changing", None
        # The old time: a growing file must never be taken from the cache by its new one.
        return "", [before.st_size, before.st_mtime_ns, sha256]

    def _find_broken_checkpoints(self, files: Files) -> dict[str, str]:
        """Map checkpoint directories (with "/") to how they differ from their manifest."""
        broken = {}
        for name in files:
            if not name.endswith("/" + MANIFEST):
                continue
            top = name[: -len(MANIFEST)]
            entries = read_json(self.directory / name).get("files", {})
            for inner, expected in entries.items() if isinstance(entries, dict) else ():
                if isinstance(expected, dict) and not _matches_entry(
                    files.get(top + inner), expected
                ):
                    broken[top] = f"its manifest does not match {inner}"
                    break
        return broken


def _parse_hashes(entries: Any) -> dict[str, str]:
    items = entries.items() if isinstance(entries, dict) else ()
    hashed = ((inner, entry.get("sha256")) for inner, entry in items if isinstance(entry, dict))
    return {inner: sha256 for inner, sha256 in hashed if sha256 and isinstance(sha256, str)}


def _matches_entry(entry: list[Any] | None, expected: dict[str, Any]) -> bool:
    if entry is None:
        return False
    return bool(
        expected.get("sha256", entry[2]) == entry[2] and expected.get("size", entry[1]) == entry[1]
    )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    parts = name.split("/")
    return any(
        fnmatch.fnmatch(name, p) or any(fnmatch.fnmatch(part, p) for part in parts)
        for p in patterns
    )
