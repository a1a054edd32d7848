"""Checks of file names from a server before they become local paths."""

from __future__ import annotations

from collections.abc import Sequence

from labctl.errors import PolicyError
from labctl.wire.containment import is_contained

LONGEST_NAME_BYTES = 255


def require_contained(name: str) -> str:
    """Return the relative path `name` from a server; PolicyError if it leads outside."""
    if not is_contained(name):
        raise PolicyError(
            f"the server sent the name {name!a}, which leaves its directory",
            why="a correct agent never sends such a name; labctl wrote nothing to it",
            hint="labctl ssh",
        )
    return name


def find_name_problem(name: str, *, reserved: Sequence[str] = ()) -> str:
    """Say why a contained name is skipped here; "" if it is not.

    PolicyError as in `require_contained`.
    """
    parts = require_contained(name).split("/")
    if parts[0] in reserved or parts[0].startswith(".labctl"):
        return "its name is reserved by labctl"
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):
        return "a control character in its name"
    try:
        encoded = [part.encode() for part in parts]
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if max(map(len, encoded)) > LONGEST_NAME_BYTES:
        return "its name is too long"
    return ""
