"""Code that people created or changed on the server."""

from __future__ import annotations

from pathlib import Path

from ...wire.files import EditedFile, EditsReply, SkippedFile
from ...wire.verbs import LabRequest
from .files import UNREADABLE, is_by_product, read_rsync_version, walk
from .push_target import PushTarget


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
