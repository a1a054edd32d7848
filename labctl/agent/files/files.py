"""Uploads to the server: a good file is never replaced by one that did not arrive complete.

`plan` lists what is needed and what was edited on the server, and changes nothing that counts.
rsync or tar fills the staging directory. commit.py checks what arrived and renames it. Downloads
are in outputs.py.
"""

from __future__ import annotations

import base64
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence

from ...wire.files import CommitReply, PlanReply, PlanRequest, PushedFile
from ..host.paths import count_free_bytes
from .commit import BYTECODE, commit_staged, normalize_mode, note_due, remove_files
from .push_target import NOT_A_FILE, PushTarget, stat_or_none

# Bytes that a transfer leaves free: a full disk stops Docker and sshd too.
RESERVE_BYTES = 64 * 1024 * 1024
UNREADABLE = "this user may not read it"


def plan(request: PlanRequest) -> PlanReply:
    """Compare the client's files with the tree on the server; list what is needed.

    If all that is needed came with the request, it is committed at once.
    """
    target = PushTarget(request.lab, request.lab_id, request.target)
    _drop_fetched(target)
    comparison = _compare(target, request.files, request.force)
    needed = comparison.needed
    complete, staged_bytes = _inspect_staged(target, needed)
    free = count_free_bytes(target.root)
    missing_bytes = sum(entry.size for entry in needed) - staged_bytes
    short_bytes = missing_bytes + RESERVE_BYTES - free if needed else 0
    reply = PlanReply(
        needed=tuple(entry.path for entry in needed),
        whole=tuple(complete),
        staged_bytes=staged_bytes,
        unsure=tuple(comparison.unsure),
        conflicts=tuple(sorted(set(comparison.conflicts))),
        removed=tuple(comparison.removed),
        short_bytes=max(0, short_bytes),
        free_bytes=free,
        staging=str(target.staging),
    )
    try:
        if reply.conflicts or reply.unsure or reply.short_bytes:
            return reply
        if needed:
            return _stage_or_commit(target, needed, request, reply)
        target.root.mkdir(parents=True, exist_ok=True)
        remove_files(target, comparison.removed)
        return reply
    finally:
        target.save()


class _Comparison(NamedTuple):
    """What a push would do to the tree: send `needed`, remove `removed`, overwrite `conflicts`.

    The client has to hash the files of `unsure` first. All but `needed` are paths.
    """

    needed: list[PushedFile]
    unsure: list[str]
    conflicts: list[str]
    removed: list[str]


def _compare(target: PushTarget, files: Sequence[PushedFile], force: bool) -> _Comparison:
    """Compare the client's files with the tree; of equal files, adjust record and mode."""
    removed, conflicts = _find_removed(target, {entry.path for entry in files}, force)
    comparison = _Comparison([], [], conflicts, removed)
    for entry in files:
        present, present_stat = target.inspect_file(entry.path)
        if present == NOT_A_FILE:
            conflicts += _list_obstacles(Path(target.at(entry.path)), target.root, removed, force)
            present = ""
        elif not entry.sha256 and present_stat is not None and present_stat.st_size == entry.size:
            comparison.unsure.append(entry.path)
            continue
        elif present == entry.sha256 and present_stat is not None:
            if target.is_edited(entry.path, present):
                target.record_file(entry.path, entry.sha256, present_stat)
            if (present_stat.st_mode ^ entry.mode) & 0o100:
                Path(target.at(entry.path)).chmod(normalize_mode(entry.mode))
            continue
        if target.is_edited(entry.path, present) and not force:
            conflicts.append(entry.path)
        else:
            comparison.needed.append(entry)
    return comparison


def _stage_or_commit(
    target: PushTarget, needed: list[PushedFile], request: PlanRequest, reply: PlanReply
) -> PlanReply:
    """Commit the needed files if they came with the request; else prepare their transfer."""
    _stage(target, needed)
    contents = request.contents or {}
    committed = _commit_inline(target, needed, contents, reply.removed, request.force)
    if committed:
        return reply._replace(bad=committed.bad, conflicts=committed.conflicts)
    basis = str(target.root) if target.root.is_dir() else ""
    return reply._replace(basis=basis, rsync=read_rsync_version())


def _commit_inline(
    target: PushTarget,
    needed: list[PushedFile],
    contents: dict[str, str],
    removed: tuple[str, ...],
    force: bool,
) -> CommitReply | None:
    """Commit the files that came with the request; None if others are needed too."""
    if not {entry.path for entry in needed} <= contents.keys():
        return None
    for entry in needed:
        _write_staged(target, entry.path, base64.b64decode(contents[entry.path]))
    return commit_staged(target, needed, removed, force)


def read_rsync_version() -> str:
    """Return the output of `rsync --version`, "" without rsync."""
    try:
        done = subprocess.run(["rsync", "--version"], stdin=subprocess.DEVNULL, capture_output=True)
    except OSError:
        return ""
    return done.stdout.decode(errors="replace")


def _drop_fetched(target: PushTarget) -> None:
    """Remove a fetched data set: it is nobody's work, and a push replaces it."""
    if target.fetched_path.exists():
        shutil.rmtree(target.root, ignore_errors=True)
        target.fetched_path.unlink()


def _find_removed(target: PushTarget, pushed: set[str], force: bool) -> tuple[list[str], list[str]]:
    """Return (pushed paths that no longer exist on the client, those among them edited here)."""
    removed, conflicts = [], []
    for path in sorted(set(target.record) - pushed):
        present = target.hash_present(path)
        if present not in ("", NOT_A_FILE) and target.is_edited(path, present) and not force:
            conflicts.append(path)
        else:
            removed.append(path)
    return removed, conflicts


def _list_obstacles(path: Path, root: Path, removed: list[str], force: bool) -> list[str]:
    """List the files that keep a pushed file from replacing the link or directory at `path`."""
    if path.is_symlink() or not path.is_dir():
        return [] if force else [str(path.relative_to(root))]
    removed_names = set(removed)
    files = (str(p.relative_to(root)) for p in walk(path) if BYTECODE not in p.parts)
    return [name for name in files if name not in removed_names]


def _inspect_staged(target: PushTarget, needed: list[PushedFile]) -> tuple[list[str], int]:
    """Return (needed paths staged complete by an earlier try, bytes of those and of parts)."""
    complete: list[str] = []
    total = 0
    for entry in needed if target.staging.is_dir() else ():
        is_complete = (
            target.due.get(entry.path) == entry.sha256 and target.find_staged(entry) is not None
        )
        staged_stat = stat_or_none(target.staged_at(entry.path))
        if is_complete:
            complete.append(entry.path)
        if staged_stat is not None and stat.S_ISREG(staged_stat.st_mode):
            total += min(staged_stat.st_size, entry.size)
    return complete, total


def _stage(target: PushTarget, needed: list[PushedFile]) -> None:
    """Prepare the staging directory: remove everything that is not one of the `needed` files."""
    needed_paths = {entry.path for entry in needed}
    for folder, folders, names in os.walk(target.staging, topdown=False):
        for entry_name in (*folders, *names):
            staged = Path(folder) / entry_name
            name = str(staged.relative_to(target.staging))
            if staged.is_dir() and not staged.is_symlink():
                if name in needed_paths or not any(staged.iterdir()):
                    shutil.rmtree(staged)
            elif name not in needed_paths or not staged.is_file() or staged.is_symlink():
                staged.unlink()
    target.staging.mkdir(parents=True, exist_ok=True)
    target.staging.chmod(0o700)
    note_due(target, needed)


def _write_staged(target: PushTarget, path: str, content: bytes) -> None:
    staged = Path(target.staged_at(path))
    staged.parent.mkdir(parents=True, exist_ok=True)
    staged.unlink(missing_ok=True)
    staged.write_bytes(content)


def is_by_product(name: str) -> bool:
    """Return whether a program made the file beside the code, as Python and Jupyter do."""
    return any(part in (BYTECODE, ".ipynb_checkpoints") for part in name.split("/"))


def walk(
    root: Path,
    on_closed: Callable[[Path], None] | None = None,
    on_link: Callable[[Path], None] | None = None,
) -> Iterator[Path]:
    """Yield the regular files below `root` in order of name, never through links.

    `on_closed` is called with each directory, or file in one, that this user may not read, and
    `on_link` with each symbolic link.
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
