"""The outputs of a run that may be downloaded: `manifest` lists whole files with their hashes."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Set, Tuple

from ..host.paths import HASHES, age_of, inside, lab_dir, read_json, run_dir, sha256_of, write_json
from ..reply import Failure
from ..runs.run_state import final
from .files import UNREADABLE, rsync_version, walk

# A file written within this time may still be growing.
SETTLED_S = 2.0
UNFINISHED = ("*.tmp", "*.partial", "*.part", ".*.partial-*")
NEVER = (".nfs*", "__pycache__")
# Append-only by convention: their first N bytes are worth having while they grow.
GROWING = ("logs/*", "*.log", "*tfevents*")
# With "quick", so much is hashed at once, and more only on its way.
QUICK_BYTES = 1024 * 1024
MANIFEST = "manifest.json"
OUTWARD = "a link to what is outside of the lab"
Files = Dict[str, List[Any]]
Open = Set[Tuple[int, int]]


def manifest(request: dict[str, Any]) -> dict[str, Any]:
    """The whole files of each run in "runs" (all if empty), below its outputs (or "all").

    Replies per run: files [path, size, sha256, growing], skipped [path, reason], and how many of
    the files no client has said to hold (verb `pulled`): "unpulled". Whatever is skipped exists
    here alone; what is not an output by its name (NEVER) is in neither list. A checkpoint
    directory with a manifest.json counts only when every file in it matches. While a run lives,
    other files count only when nobody has them open for writing and size and time stand still.
    "outputs" adds to those that the run was started with; with "only" it is these alone.

    With "quick", large files are not read: their hash is what a checkpoint's manifest says of them,
    or "", and then verb `hashes` tells it. A manifest that says something wrong is not found out.
    """
    root = lab_dir(request["lab"], request["lab_id"])
    wanted = request.get("runs") or [
        d.name for d in sorted((root / "runs").glob("*")) if not d.name.startswith(".")
    ]
    directories = [run_dir(root, name) for name in wanted]
    for directory in directories:
        if not directory.is_dir():
            raise Failure("missing", f"there is no run {directory.name} here", "", "labctl status")
    ended = {d.name: bool(final(d)) for d in directories}
    writing = _Writing()
    looks = {d.name: _Look(d, request, ended[d.name], writing).manifest() for d in directories}
    rsync = rsync_version() if request.get("quick") else ""
    return {"runs": {name: {**found, "rsync": rsync} for name, found in looks.items()}}


class _Writing:
    """What is open for writing, looked at once and only where it matters: it takes a while."""

    def __init__(self) -> None:
        self._found: Open | None = None

    def __contains__(self, file: tuple[int, int]) -> bool:
        if self._found is None:
            self._found = open_for_writing()
        return file in self._found


def open_for_writing() -> Open:
    """(device, inode) of every file that a process of this user has open for writing.

    Containers run as this user too, so their processes are seen.
    """
    found: Open = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    info = (process / "fdinfo" / descriptor.name).read_text()
                    flags = int(info.split("flags:", 1)[1].split()[0], 8)
                    if flags & os.O_ACCMODE:
                        known = descriptor.stat()
                        found.add((known.st_dev, known.st_ino))
    return found


class _Look:
    """One look at one run's files."""

    def __init__(
        self, directory: Path, request: dict[str, Any], ended: bool, writing: _Writing
    ) -> None:
        self.directory = directory
        self.everything = bool(request.get("all"))
        self.ended = ended
        self.writing = writing
        spec = read_json(directory / ".labctl" / "spec.json")
        every = {*spec.get("outputs", []), *request.get("outputs", []), "logs"}
        self.outputs = sorted(request.get("only") or every)
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
        chosen = list(self._named(self._chosen(closed.add, links.add)))
        skipped = [[name, UNREADABLE] for _, name in self._named(sorted(closed))]
        skipped += [[name, OUTWARD] for name in self._outward(sorted(links))]
        self._believe(name for _, name in chosen)
        for path, name in chosen:
            reason, entry = self._whole(path, name)
            if entry is None:
                skipped.append([name, reason])
                continue
            fresh[name] = entry
            sha256 = entry[2] or self.promised.get(name, "")
            files[name] = [name, entry[0], sha256, self._growing(name)]
        if fresh != self.cache:
            write_json(self.cache_path, {**self.cache, **fresh})
        broken = self._broken_checkpoints(files)
        for name, reason in skipped:
            if name.endswith("/" + MANIFEST):
                broken.setdefault(name[: -len(MANIFEST)], f"its manifest: {reason}")
        kept = []
        for name, entry in files.items():
            reason = next((r for top, r in broken.items() if name.startswith(top)), "")
            if reason:
                skipped.append([name, reason])
            else:
                kept.append(entry)
        known = read_json(self.directory / ".labctl" / "pulled.json")
        return {
            "files": kept,
            "skipped": skipped,
            "directory": str(self.directory),
            "ended": self.ended,
            "unpulled": sum(known.get(name) != [size, sha256] for name, size, sha256, _ in kept),
        }

    def _named(self, paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
        """Those that may be outputs, with their names in the run."""
        for path in paths:
            name = str(path.relative_to(self.directory))
            if not name.startswith(".labctl/") and not _matches(name, NEVER):
                yield path, name

    def _outward(self, links: Iterable[Path]) -> Iterator[str]:
        """Of these links, those among the outputs whose files nothing of the lab holds."""
        lab = self.directory.parent.parent.resolve()
        for link, name in self._named(links):
            if not any(f"{name}/".startswith(f"{output}/") for output in self.outputs):
                continue
            # Many lead nowhere here: the run's container has other paths.
            with contextlib.suppress(OSError, RuntimeError):
                target = link.resolve()
                if lab not in target.parents and (target.is_file() or target.is_dir()):
                    yield name

    def _chosen(
        self, on_closed: Callable[[Path], None], on_link: Callable[[Path], None]
    ) -> Iterator[Path]:
        if not self.everything:
            seen = set()
            for output in self.outputs:
                place = inside(self.directory, output)
                if place.is_symlink():
                    on_link(place)
                    continue
                for path in [place] if place.is_file() else walk(place, on_closed, on_link):
                    if path not in seen:
                        seen.add(path)
                        yield path
            return
        text = self.directory / ".labctl" / "code.json"
        known = set(json.loads(text.read_text())) if text.exists() else set()
        for path in walk(self.directory, on_closed, on_link):
            name = str(path.relative_to(self.directory))
            if not (name.startswith("code/") and name[5:] in known):
                yield path

    def _believe(self, names: Iterable[str]) -> None:
        """Note the hashes that checkpoints' manifests name: `promised`. Where one names them all,
        its files and it need not stand still first: `proved`."""
        for name in () if self.ended and not self.quick else names:
            if name.endswith("/" + MANIFEST):
                listed = read_json(self.directory / name).get("files")
                top, hashes = name[: -len(MANIFEST)], _hashes(listed)
                found = {top + inner: sha256 for inner, sha256 in hashes.items()}
                self.promised.update(found)
                if listed and len(found) == len(listed):
                    self.proved |= {name, *found}

    def _growing(self, name: str) -> bool:
        return not self.ended and _matches(name, GROWING)

    def _whole(self, path: Path, name: str) -> tuple[str, list[Any] | None]:
        """("", [size, mtime_ns, sha256]) of a file that stood still, or (why not, None)."""
        if not self.ended and _matches(name, UNFINISHED):
            return "unfinished by its name", None
        growing = self._growing(name)
        try:
            before = path.stat()
            if not self.ended and not growing and name not in self.proved:
                if age_of(before.st_mtime) < SETTLED_S:
                    return "written just now", None
                if (before.st_dev, before.st_ino) in self.writing:
                    return "still open for writing", None
            known = self.cache.get(name)
            if known and known[:2] == [before.st_size, before.st_mtime_ns] and known[2]:
                return "", known
            if self.quick and not growing and before.st_size > QUICK_BYTES:
                return "", [before.st_size, before.st_mtime_ns, ""]
            sha256 = sha256_of(path, before.st_size if growing else None)
            after = path.stat()
        except FileNotFoundError:
            return "removed meanwhile", None
        except PermissionError:
            return UNREADABLE, None
        moved = (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
        if moved and not (growing and after.st_size >= before.st_size):
            return "still changing", None
        # A growing file is never taken from the cache by its new time, only by the old one.
        return "", [before.st_size, before.st_mtime_ns, sha256]

    def _broken_checkpoints(self, files: Files) -> dict[str, str]:
        """Checkpoint directories (with "/") whose manifest names a file missing or different."""
        broken = {}
        for name in files:
            if not name.endswith("/" + MANIFEST):
                continue
            top = name[: -len(MANIFEST)]
            listed = read_json(self.directory / name).get("files", {})
            for inner, expected in listed.items() if isinstance(listed, dict) else ():
                if isinstance(expected, dict) and not _same(files.get(top + inner), expected):
                    broken[top] = f"its manifest does not match {inner}"
                    break
        return broken


def _hashes(listed: Any) -> dict[str, str]:
    named = listed.items() if isinstance(listed, dict) else ()
    hashed = ((inner, one.get("sha256")) for inner, one in named if isinstance(one, dict))
    return {inner: sha256 for inner, sha256 in hashed if sha256 and isinstance(sha256, str)}


def _same(found: list[Any] | None, expected: dict[str, Any]) -> bool:
    if found is None:
        return False
    return bool(
        expected.get("sha256", found[2]) == found[2] and expected.get("size", found[1]) == found[1]
    )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    parts = name.split("/")
    return any(
        fnmatch.fnmatch(name, p) or any(fnmatch.fnmatch(part, p) for part in parts)
        for p in patterns
    )
