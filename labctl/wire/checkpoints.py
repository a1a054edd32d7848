"""Checkpoints in lists of names: the directories with a manifest, whose files belong together."""

from __future__ import annotations

from typing import Iterable

MANIFEST = "manifest.json"


def list_checkpoints(names: Iterable[str]) -> list[str]:
    """Return the directories (with "/") that have a manifest, only the outermost ones."""
    outermost: list[str] = []
    for name in sorted(names, key=len):
        if name.endswith("/" + MANIFEST):
            top = name[: -len(MANIFEST)]
            if not any(top.startswith(outer) for outer in outermost):
                outermost.append(top)
    return outermost


def find_checkpoint(name: str, known: list[str]) -> str:
    """Return the one of these directories that has the file, "" for none."""
    return next((top for top in known if name.startswith(top)), "")
