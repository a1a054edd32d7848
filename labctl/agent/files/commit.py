"""The end of an upload: what arrived complete is renamed into place.

A new tree appears in one rename. Files that were edited on the server are left alone.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Sequence, Tuple

from ...wire.files import CommitReply, CommitRequest, PushedFile
from ...wire.verbs import HintPart
from ..host.paths import resolve_inside
from ..reply import Failure
from .push_target import NOT_A_FILE, PushTarget
from .records import write_records

BYTECODE = "__pycache__"

# path, sha256, mode, and the stat of the staged file
Ready = Tuple[str, str, int, os.stat_result]


def commit(request: CommitRequest) -> CommitReply:
    """Remove what is `removed`, check the staged files and rename each into place.

    Repeating it is safe: its work is done already.
    """
    target = PushTarget(request.lab, request.lab_id, request.target)
    note_due(target, request.files)
    try:
        return commit_staged(target, request.files, request.removed, request.force)
    finally:
        target.save()


def commit_staged(
    target: PushTarget, entries: Sequence[PushedFile], removed: tuple[str, ...], force: bool
) -> CommitReply:
    bad: list[str] = []
    ready: list[Ready] = []
    for entry in entries:
        staged_stat = target.find_staged(entry) if entry.sha256 else None
        if staged_stat is not None:
            ready.append((entry.path, entry.sha256, entry.mode, staged_stat))
        elif not entry.sha256 or target.hash_present(entry.path) != entry.sha256:
            bad.append(entry.path)
    to_remove: list[str] = []
    conflicts: list[str] = []
    for path in removed:
        present = target.hash_present(path)
        edited = present != NOT_A_FILE and target.is_edited(path, present)
        (conflicts if edited and not force else to_remove).append(path)
    remove_files(target, to_remove)
    if not _publish_staging(target, ready):
        conflicts += _rename_each(target, ready, force)
    if not bad:
        shutil.rmtree(target.staging, ignore_errors=True)
    return CommitReply(len(ready), tuple(bad), tuple(conflicts))


def _publish_staging(target: PushTarget, ready: list[Ready]) -> bool:
    """Rename the staging directory to the tree, in one step, if there is no tree yet.

    Returns False, and changes nothing, where that is not possible.
    """
    staged_count = sum(len(names) for _, _, names in os.walk(target.staging))
    if os.path.lexists(target.root) or not ready or staged_count != len(ready):
        return False
    for path, _, mode, staged_stat in ready:
        _give_mode(target.staged_at(path), mode, staged_stat)
    target.root.parent.mkdir(parents=True, exist_ok=True)
    target.staging.chmod(0o755)
    target.staging.rename(target.root)
    for path, sha256, _, staged_stat in ready:
        target.record_file(path, sha256, staged_stat)
    return True


def _rename_each(target: PushTarget, ready: list[Ready], force: bool) -> list[str]:
    """Rename each file into place; return the paths left alone because they were edited here."""
    conflicts: list[str] = []
    known_parents: set[str] = set()
    for path, sha256, mode, staged_stat in ready:
        present, present_stat = target.inspect_file(path)
        if target.is_edited(path, present) and not force:
            conflicts += [] if present == sha256 else [path]
            continue
        if present_stat is not None and not stat.S_ISREG(present_stat.st_mode):
            _clear_path(target, path)
        _rename_into_place(target, path, sha256, mode, staged_stat, known_parents)
    return conflicts


def _clear_path(target: PushTarget, path: str) -> None:
    target_path = resolve_inside(target.root, path)
    if target_path.is_dir() and not target_path.is_symlink() and not _clear_if_empty(target_path):
        raise Failure("policy", f"{target_path} is a directory on the server but a file locally")


def _rename_into_place(
    target: PushTarget,
    path: str,
    sha256: str,
    mode: int,
    staged_stat: os.stat_result,
    known_parents: set[str],
) -> None:
    """Rename a staged file into place; `known_parents` are directories known to exist."""
    final, staged = target.at(path), target.staged_at(path)
    parent = final.rpartition("/")[0]
    if parent not in known_parents:
        try:
            Path(parent).mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            what = f"{parent} is a file on the server but a directory locally"
            raise Failure("policy", what, "", HintPart("ssh", f"rm {parent}")) from None
        known_parents.add(parent)
    _give_mode(staged, mode, staged_stat)
    os.replace(staged, final)  # noqa: PTH105 (building a Path for each file is slow)
    target.record_file(path, sha256, staged_stat)


def _give_mode(staged: str, mode: int, staged_stat: os.stat_result) -> None:
    if stat.S_IMODE(staged_stat.st_mode) != normalize_mode(mode):
        Path(staged).chmod(normalize_mode(mode))


def note_due(target: PushTarget, entries: Sequence[PushedFile]) -> None:
    due = {entry.path: entry.sha256 for entry in entries}
    if target.due != due or not target.due_path.exists():
        target.due = due
        write_records(target.due_path, due)


def remove_files(target: PushTarget, paths: list[str]) -> None:
    """Remove files that pushes brought, and directories that this leaves empty."""
    for path in paths:
        file = resolve_inside(target.root, path)
        if file.is_file() and not file.is_symlink():
            file.unlink()
        target.record.pop(path, None)
        for parent in file.parents:
            if parent == target.root or not _clear_if_empty(parent):
                break


def _clear_if_empty(directory: Path) -> bool:
    """Remove a directory that is empty or holds only bytecode; return whether it is gone."""
    if not directory.is_dir() or directory.is_symlink():
        return not directory.exists()
    if any(inner.name != BYTECODE for inner in directory.iterdir()):
        return False
    shutil.rmtree(directory)
    return True


def normalize_mode(mode: int) -> int:
    return 0o755 if mode & 0o100 else 0o644
