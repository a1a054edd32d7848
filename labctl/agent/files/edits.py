"""The code on the server: all of it, and what people created or changed there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import FrozenSet, Tuple

from ...wire.files import DELIVERED, CodeFilesReply, EditedFile, EditsReply, FilePart, SkippedFile
from ...wire.verbs import LabRequest
from ..host.paths import hash_file
from .files import UNREADABLE, is_by_product, read_rsync_version, walk
from .push_target import PushTarget

LINK = "it is a link"
# paths in the code, with the hashes of what assignments wrote there
DeliveredFiles = FrozenSet[Tuple[str, str]]


def edits(request: LabRequest) -> EditsReply:
    """List the code files created or changed on the server since the last push.

    What the course handed out, and nobody changed, is not among them.
    """
    target = PushTarget(request.lab, request.lab_id, "code")
    delivered = _hash_delivered(target.root.parent / DELIVERED)
    changed: list[EditedFile] = []
    unreadable: list[Path] = []
    for path in walk(target.root, unreadable.append):
        name = str(path.relative_to(target.root))
        if is_by_product(name):
            continue
        try:
            sha256 = target.hash_present(name)
        except PermissionError:
            unreadable.append(path)
            continue
        if target.is_edited(name, sha256) and (name, sha256) not in delivered:
            pushed = target.record.get(name)
            base = pushed.sha256 if pushed else ""
            changed.append(EditedFile(name, path.stat().st_size, sha256, base))
    names = (str(path.relative_to(target.root)) for path in unreadable)
    skipped = [SkippedFile(name, UNREADABLE) for name in names if not is_by_product(name)]
    return EditsReply(tuple(changed), tuple(skipped), str(target.root), read_rsync_version())


def _hash_delivered(directory: Path) -> DeliveredFiles:
    """Return the path and hash of each file that assignments wrote into the code."""
    if directory.is_symlink() or not directory.is_dir():
        return frozenset()
    files = ((path, path.relative_to(directory).parts[1:]) for path in walk(directory))
    return frozenset(("/".join(parts), hash_file(path)) for path, parts in files if parts)


def list_code_files(request: LabRequest) -> CodeFilesReply:
    """List all code files, wherever they come from. No file is read, and no link is followed."""
    target = PushTarget(request.lab, request.lab_id, "code")
    files: list[FilePart] = []
    unreadable: list[Path] = []
    links: list[Path] = []
    for path in walk(target.root, unreadable.append, links.append):
        name = str(path.relative_to(target.root))
        if is_by_product(name):
            continue
        if not os.access(path, os.R_OK):
            unreadable.append(path)
            continue
        files.append(FilePart(name, path.lstat().st_size))
    reasons = [(path, UNREADABLE) for path in unreadable] + [(path, LINK) for path in links]
    skipped = (SkippedFile(str(path.relative_to(target.root)), reason) for path, reason in reasons)
    return CodeFilesReply(tuple(files), tuple(skipped), str(target.root), read_rsync_version())
