"""What people made or changed in the lab's code on this server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .files import BYTECODE, UNREADABLE, rsync_version, walk
from .push_target import Target


def edits(request: dict[str, Any]) -> dict[str, Any]:
    """What was made or changed in the lab's code on the server since the last push.

    Replies files: [path, size, sha256, sha256 that the last push brought or ""] each, and
    "skipped": [path, reason] of what cannot be read.
    """
    target = Target({**request, "target": "code"})
    changed = []
    closed: list[Path] = []
    for path in walk(target.root, closed.append):
        name = str(path.relative_to(target.root))
        if _is_by_product(name):
            continue
        try:
            sha256 = target.present(name)
        except PermissionError:
            closed.append(path)
            continue
        if target.edited(name, sha256):
            base = target.record.get(name, [""])[0]
            changed.append([name, path.stat().st_size, sha256, base])
    names = (str(path.relative_to(target.root)) for path in closed)
    skipped = [[name, UNREADABLE] for name in names if not _is_by_product(name)]
    return {
        "files": changed,
        "skipped": skipped,
        "root": str(target.root),
        "rsync": rsync_version(),
    }


def _is_by_product(name: str) -> bool:
    return any(part in (BYTECODE, ".ipynb_checkpoints") for part in name.split("/"))
