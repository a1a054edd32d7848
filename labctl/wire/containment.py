"""Whether a path from elsewhere stays in the directory that it belongs to.

Names in archives, in buckets and in messages use the first check, paths on this disk the second.
"""

from pathlib import Path

_ODD_PARTS = frozenset(("", ".", ".."))


def is_contained(path: str) -> bool:
    """Return whether `path`, with "/" between its parts, names something below its directory.

    Not contained are an absolute path, an empty part, ".", ".." and NUL. This reads no disk: a link
    may still lead outside.
    """
    return "\0" not in path and _ODD_PARTS.isdisjoint(path.split("/"))


def is_inside(path: Path, directory: Path) -> bool:
    """Return whether `path` is `directory` or below it, once all links are followed."""
    target, top = path.resolve(), directory.resolve()
    return target == top or top in target.parents
