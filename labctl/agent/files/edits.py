"""Code that people created or changed on the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .files import BYTECODE, UNREADABLE, read_rsync_version, walk
from .push_target import PushTarget


def edits(request: dict[str, Any]) -> dict[str, Any]:
    """List the code files created or changed on the server since the last push.

    Replies "files": [path, size, sha256, sha256 that the last push brought or ""] each, and
    "skipped": [path, reason] of files that cannot be read.
    """
    target = PushTarget({**request, "target": "code"})
    changed = []
    unreadable: list[Path] = []
    for path in walk(target.root, unreadable.append):
        name = str(path.relative_to(target.root))
        if _is_by_product(name):
            continue
        try:
            sha256 = target.hash_present(name)
        except PermissionError:
            unreadable.append(path)
            continue
        if target.is_edited(name, sha256):
            base = target.record.get(name, [""])[0]
            changed.append([name, path.stat().st_size, sha256, base])
    names = (str(path.relative_to(target.root)) for path in unreadable)
    skipped = [[name, UNREADABLE] for name in names if not _is_by_product(name)]
    return {
        "files": changed,
        "skipped": skipped,
        "root": str(target.root),
        "rsync": read_rsync_version(),
    }


def _is_by_product(name: str) -> bool:
    return any(part in (BYTECODE, ".ipynb_checkpoints") for part in name.split("/"))
