"""The code on the server: all of it, and what people created or changed there."""

from __future__ import annotations

import os
from pathlib import Path

from ...wire.files import CodeFilesReply, EditedFile, EditsReply, FilePart, SkippedFile
from ...wire.verbs import LabRequest
from .files import UNREADABLE, is_by_product, read_rsync_version, walk
from .push_target import PushTarget

LINK = "it is a link"


def edits(request: LabRequest) -> EditsReply:
    """List the code files created or changed on the server since the last push."""
    target = PushTarget(request.lab, request.lab_id, "code")
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
        if target.is_edited(name, sha256):
            pushed = target.record.get(name)
            base = pushed.sha256 if pushed else ""
            changed.append(EditedFile(name, path.stat().st_size, sha256, base))
    names = (str(path.relative_to(target.root)) for path in unreadable)
    skipped = [SkippedFile(name, UNREADABLE) for name in names if not is_by_product(name)]
    return EditsReply(tuple(changed), tuple(skipped), str(target.root), read_rsync_version())


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
