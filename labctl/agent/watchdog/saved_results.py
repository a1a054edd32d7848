"""Results that exist only on this server.

A file is saved once a client has pulled and verified it (verb `pulled`), or the watchdog has
mirrored it: with the same path, size and hash. While runs live, sizes alone give an estimate.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...wire.files import EDITS, MANIFEST, ManifestRequest, PulledRequest
from ...wire.mirrors import StoredFile
from ...wire.runs import STATUS, StatusRequest
from ...wire.verbs import STATUS_COMMAND, Empty, LabRequest, Reply, Request, Verb
from ..files.records import merge_hashes, merge_records, read_hashes, read_records
from ..host.paths import lab_dir, labctl_home, run_dir
from ..program import PROGRAM, call_program
from ..reply import Failure
from ..runs.spec import read_spec
from .activity import LabAccount

MOST_FILES = 20_000
LONG_S = 3600.0


class UnsavedFile(NamedTuple):
    """A file that exists only here. `key` is its path below the lab's own prefix in a store."""

    path: str
    key: str
    name: str
    size: int
    sha256: str


class Unsaved(NamedTuple):
    """Results that are not saved. `broken` are incomplete files, each with the reason."""

    files: list[UnsavedFile]
    broken: list[str]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def record_pulled(request: PulledRequest) -> Empty:
    """Record what a client holds and has verified (verb `pulled`)."""
    root = lab_dir(request.lab, request.lab_id)
    for run, files in (request.runs or {}).items():
        meta = run_dir(root, run) / ".labctl"
        if not meta.is_dir():
            what = f"run {run} does not exist on this server"
            raise Failure("missing", what, "", STATUS_COMMAND)
        records = {file.path: StoredFile(file.size, file.sha256) for file in files}
        merge_records(StoredFile, meta / "pulled.json", records)
    if request.edits:
        edits = {edit.path: edit.sha256 for edit in request.edits}
        merge_hashes(root / ".labctl" / "saved-edits.json", edits)
    return Empty()


def list_saved_files(directory: Path) -> dict[str, StoredFile]:
    """Return the files of a run, by path, that are known to exist elsewhere too."""
    meta = directory / ".labctl"
    mirrored = read_records(StoredFile, meta / "mirrored.json")
    return {**mirrored, **read_records(StoredFile, meta / "pulled.json")}


def list_labs(lab_id: str, every: bool) -> list[tuple[str, str, Path]]:
    """Return (name, id, directory) of this lab, or of every lab on the server."""
    matches = []
    for mark in sorted(labctl_home().glob("*/.labctl/id")):
        found_id, root = mark.read_text().strip(), mark.parent.parent
        if every or found_id == lab_id:
            suffix = f"-{found_id[:6]}"
            name = root.name[: -len(suffix)] if root.name.endswith(suffix) else root.name
            matches.append((name, found_id, root))
    return matches


def estimate_unsaved(lab_id: str, every: bool) -> tuple[int, int]:
    """Return (files, bytes) of outputs not known to exist elsewhere, quickly, by size alone."""
    count = size = 0
    for _, _, root in list_labs(lab_id, every):
        for directory in root.glob("runs/[a-z0-9]*"):
            saved = list_saved_files(directory)
            for output in {*_list_outputs(directory), "logs", "checkpoints"}:
                for path, size_bytes in _sizes(directory / output):
                    saved_file = saved.get(os.path.relpath(path, directory))
                    if saved_file is None or saved_file.size != size_bytes:
                        count, size = count + 1, size + size_bytes
                    if count >= MOST_FILES:
                        return count, size
    return count, size


def _list_outputs(directory: Path) -> tuple[str, ...]:
    """Return the outputs that a run was started with, none if its specification is damaged."""
    try:
        return read_spec(directory).outputs
    except Failure:
        return ()


def _sizes(top: Path) -> list[tuple[str, int]]:
    """List the files of an output with their sizes: those of a directory, or the file itself."""
    if top.is_file():
        return [(str(top), top.stat().st_size)]
    sizes = []
    for folder, _, names in os.walk(top):
        for name in names:
            with suppress(OSError):
                path = os.path.join(folder, name)  # noqa: PTH118 (building a Path for each file is slow)
                sizes.append((path, os.lstat(path).st_size))
    return sizes


def list_unsaved(account: LabAccount, lab_id: str, every: bool) -> Unsaved:
    """Return all files that exist only here, hashed.

    New files outside the outputs and edited code are included.
    """
    files: list[UnsavedFile] = []
    broken: list[str] = []
    for lab, known_id, root in list_labs(lab_id, every):
        lab_request = LabRequest(lab, known_id)
        # Records the end of runs that have ended.
        call_verb(account, STATUS, StatusRequest(lab, known_id))
        manifest_request = ManifestRequest(lab, known_id, all=True)
        for run, manifest in call_verb(account, MANIFEST, manifest_request).runs.items():
            saved = list_saved_files(root / "runs" / run)
            for path, size, sha256, _ in manifest.files:
                if saved.get(path) != StoredFile(size, sha256):
                    path_here = f"{manifest.directory}/{path}"
                    files.append(
                        UnsavedFile(
                            path_here,
                            f"{lab}-{known_id}/runs/{run}/files/{path}",
                            path,
                            size,
                            sha256,
                        )
                    )
            broken += [f"{run}/{p}: {why}" for p, why in manifest.skipped]
        saved_edits = read_hashes(root / ".labctl" / "saved-edits.json")
        edits = call_verb(account, EDITS, lab_request)
        broken += [f"code/{path}: {why}" for path, why in edits.skipped]
        for path, size, sha256, _ in edits.files:
            if saved_edits.get(path) != sha256:
                path_here, key = f"{root}/code/{path}", f"{lab}-{known_id}/server-edits/{path}"
                files.append(UnsavedFile(path_here, key, path, size, sha256))
    return Unsaved(files, broken)


def call_verb(
    account: LabAccount,
    verb: Verb[Request, Reply],
    request: Request,
    python: str = sys.executable,
) -> Reply:
    """Run a verb as the lab's account, in another process of this program; return its reply."""
    return call_program([*account.words, python, str(PROGRAM)], verb, request, LONG_S)
