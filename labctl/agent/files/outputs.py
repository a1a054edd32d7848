"""The outputs of a run for download: `manifest` lists complete files with their hashes."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, Set, Tuple

from ...wire.checkpoints import MANIFEST
from ...wire.files import (
    CompleteFile,
    HashRecord,
    ManifestReply,
    ManifestRequest,
    RunManifest,
    SkippedFile,
)
from ...wire.mirrors import StoredFile
from ...wire.verbs import STATUS_COMMAND
from ..host.paths import HASHES, compute_age_s, hash_file, lab_dir, resolve_inside, run_dir
from ..reply import Failure
from ..runs.records import read_final_record
from ..runs.spec import read_spec
from .checkpoints import PromisedFile, read_checkpoint_manifest
from .files import UNREADABLE, read_rsync_version, walk
from .records import read_records, write_records

# seconds: a file written within this time may still be growing
SETTLED_S = 2.0
UNFINISHED = ("*.tmp", "*.partial", "*.part", ".*.partial-*")
NEVER = (".nfs*", "__pycache__")
# Append-only by convention: their first N bytes are useful while they grow.
GROWING = ("logs/*", "*.log", "*tfevents*")
# bytes: with "quick", larger files are hashed only when they are transferred
QUICK_BYTES = 1024 * 1024
OUTWARD = "a link to a path outside the lab"
Files = Dict[str, CompleteFile]
Open = Set[Tuple[int, int]]


def manifest(request: ManifestRequest) -> ManifestReply:
    """List the complete files of runs.

    Files that are no outputs by their name (NEVER) are neither listed nor skipped. A checkpoint
    directory with a manifest.json counts only if every file in it matches. While a run lives, other
    files count only if no process has them open for writing and their size and time do not change.
    """
    root = lab_dir(request.lab, request.lab_id)
    run_ids = request.runs or [
        d.name for d in sorted((root / "runs").glob("*")) if not d.name.startswith(".")
    ]
    directories = [run_dir(root, name) for name in run_ids]
    for directory in directories:
        if not directory.is_dir():
            what = f"run {directory.name} does not exist on this server"
            raise Failure("missing", what, "", STATUS_COMMAND)
    ended = {d.name: bool(read_final_record(d)) for d in directories}
    writing = _OpenFiles()
    scans = {
        d.name: _RunScan(d, request, ended[d.name], writing).build_manifest() for d in directories
    }
    rsync = read_rsync_version() if request.quick else ""
    return ManifestReply({name: scan._replace(rsync=rsync) for name, scan in scans.items()})


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
        self, directory: Path, request: ManifestRequest, ended: bool, writing: _OpenFiles
    ) -> None:
        self.directory = directory
        self.everything = request.all
        self.ended = ended
        self.writing = writing
        output_names = {*read_spec(directory).outputs, *request.outputs, "logs"}
        self.outputs = sorted(request.only or output_names)
        self.quick = request.quick
        self.cache_path = directory / HASHES
        self.cache = read_records(HashRecord, self.cache_path)
        self.promised: dict[str, str] = {}
        self.proved: set[str] = set()

    def build_manifest(self) -> RunManifest:
        fresh: dict[str, HashRecord] = {}
        files: Files = {}
        closed: set[Path] = set()
        links: set[Path] = set()
        candidates = list(self._name_outputs(self._list_candidates(closed.add, links.add)))
        skipped = [SkippedFile(name, UNREADABLE) for _, name in self._name_outputs(sorted(closed))]
        skipped += [SkippedFile(name, OUTWARD) for name in self._find_outward_links(sorted(links))]
        self._read_promised_hashes(name for _, name in candidates)
        for path, name in candidates:
            reason, record = self._hash_complete(path, name)
            if record is None:
                skipped.append(SkippedFile(name, reason))
                continue
            fresh[name] = record
            sha256 = record.sha256 or self.promised.get(name, "")
            files[name] = CompleteFile(name, record.size, sha256, self._can_grow(name))
        if fresh != self.cache:
            write_records(self.cache_path, {**self.cache, **fresh})
        broken = self._find_broken_checkpoints(files)
        for name, reason in skipped:
            if name.endswith("/" + MANIFEST):
                broken.setdefault(name[: -len(MANIFEST)], f"its manifest: {reason}")
        complete: list[CompleteFile] = []
        for name, file in files.items():
            reason = next((r for top, r in broken.items() if name.startswith(top)), "")
            if reason:
                skipped.append(SkippedFile(name, reason))
            else:
                complete.append(file)
        pulled = read_records(StoredFile, self.directory / ".labctl" / "pulled.json")
        return RunManifest(
            files=tuple(complete),
            skipped=tuple(skipped),
            directory=str(self.directory),
            ended=self.ended,
            unpulled=sum(
                pulled.get(file.path) != StoredFile(file.size, file.sha256) for file in complete
            ),
        )

    def _name_outputs(self, paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
        """Yield the paths that may be outputs, with their names in the run."""
        for path in paths:
            name = str(path.relative_to(self.directory))
            if not name.startswith(".labctl/") and not _is_match(name, NEVER):
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

    def _read_promised_hashes(self, names: Iterable[str]) -> None:
        """Read the hashes in checkpoints' manifests into `promised`.

        If a manifest has a hash for every file, it and its files count at once, without waiting
        until they stop changing: `proved`. Not in a hidden directory: programs write a checkpoint
        there first and then rename the directory.
        """
        for name in () if self.ended and not self.quick else names:
            if name.endswith("/" + MANIFEST):
                manifest = read_checkpoint_manifest(self.directory / name)
                top = name[: -len(MANIFEST)]
                promised = {top + inner: sha256 for inner, sha256 in manifest.hashes.items()}
                self.promised.update(promised)
                is_complete = bool(manifest.names) and len(promised) == len(manifest.names)
                if is_complete and not any(part.startswith(".") for part in top.split("/")):
                    self.proved |= {name, *promised}

    def _can_grow(self, name: str) -> bool:
        return not self.ended and _is_match(name, GROWING)

    def _hash_complete(self, path: Path, name: str) -> tuple[str, HashRecord | None]:
        """Return ("", record) of a stable file, or (reason, None)."""
        if not self.ended and _is_match(name, UNFINISHED):
            return "unfinished by its name", None
        can_grow = self._can_grow(name)
        try:
            before = path.stat()
            if not self.ended and not can_grow and name not in self.proved:
                if compute_age_s(before.st_mtime) < SETTLED_S:
                    return "written just now", None
                if (before.st_dev, before.st_ino) in self.writing:
                    return "still open for writing", None
            cached = self.cache.get(name)
            unhashed = HashRecord(before.st_size, before.st_mtime_ns, "")
            if cached and cached[:2] == unhashed[:2] and cached.sha256:
                return "", cached
            if self.quick and not can_grow and before.st_size > QUICK_BYTES:
                return "", unhashed
            sha256 = hash_file(path, before.st_size if can_grow else None)
            after = path.stat()
        except FileNotFoundError:
            return "removed meanwhile", None
        except PermissionError:
            return UNREADABLE, None
        has_changed = (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns)
        if has_changed and not (can_grow and after.st_size >= before.st_size):
            return "still changing", None
        # The old time: a growing file must never be taken from the cache by its new one.
        return "", unhashed._replace(sha256=sha256)

    def _find_broken_checkpoints(self, files: Files) -> dict[str, str]:
        """Map checkpoint directories (with "/") to how they differ from their manifest."""
        broken = {}
        for name in files:
            if not name.endswith("/" + MANIFEST):
                continue
            top = name[: -len(MANIFEST)]
            for inner, promised in read_checkpoint_manifest(self.directory / name).files.items():
                if not _is_as_promised(files.get(top + inner), promised):
                    broken[top] = f"its manifest does not match {inner}"
                    break
        return broken


def _is_as_promised(file: CompleteFile | None, promised: PromisedFile) -> bool:
    return file is not None and promised.is_match(file.size, file.sha256)


def _is_match(name: str, patterns: tuple[str, ...]) -> bool:
    parts = name.split("/")
    return any(
        fnmatch.fnmatch(name, p) or any(fnmatch.fnmatch(part, p) for part in parts)
        for p in patterns
    )
