"""Whether a path from elsewhere stays in the directory that it belongs to.

Names in archives, in buckets and in messages use the first check, paths on this disk the second.
"""

from __future__ import annotations

from pathlib import Path

_ODD_PARTS = frozenset(("", ".", ".."))


def is_contained(path: str) -> bool:
    """Return whether `path`, with "/" between its parts, names something below its directory.

    Not contained are an absolute path, an empty part, ".", ".." and NUL. This reads no disk: a link
    may still lead outside.
    """
    return "\0" not in path and _ODD_PARTS.isdisjoint(path.split("/"))


def find_link_on_way(directory: Path, path: str) -> Path | None:
    """Return the first directory on the way to `directory/path` that is a link; None without one.

    The last part of `path` may be a link.
    """
    parent = directory
    for part in path.split("/")[:-1]:
        parent = parent / part
        if parent.is_symlink():
            return parent
    return None


def is_inside(path: Path, directory: Path) -> bool:
    """Return whether `path` is `directory` or below it, once all links are followed."""
    target, top = path.resolve(), directory.resolve()
    return target == top or top in target.parents
