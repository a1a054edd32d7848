"""Checks of file names from a server before they become local paths."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from labctl.errors import PolicyError
from labctl.wire.containment import is_contained

LONGEST_NAME_BYTES = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def require_contained(name: str) -> str:
    """Return the relative path `name` from a server; PolicyError if it leads outside."""
    if not is_contained(name):
        raise PolicyError(
            f"the server sent the name {name!a}, which leaves its directory",
            why="a correct agent never sends such a name; labctl wrote nothing to it",
            hint="labctl ssh",
        )
    return name


def escape_controls(name: str) -> str:
    """Return the name under which a file from a server is stored: a newline in it becomes %0A.

    Two names stay different, unless one of them has the escaped text itself: in a part with control
    characters, "%" is escaped too. PolicyError as in `require_contained`.
    """
    parts = require_contained(name).split("/")
    return "/".join(_escape(part) if _CONTROL.search(part) else part for part in parts)


def _escape(part: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f-\x9f%]", _percent, part)


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())


def find_stored_name_problem(
    name: str, others: Collection[str], *, reserved: Sequence[str] | None = ()
) -> str:
    """Say why a file cannot be stored under its escaped name; "" if it can.

    `others` are the names of all files that are stored with it. PolicyError as in
    `require_contained`.
    """
    stored = escape_controls(name)
    if stored != name and stored in others:
        return f"another file is named {stored}"
    return find_name_problem(stored, reserved=reserved)


def find_name_problem(name: str, *, reserved: Sequence[str] | None = ()) -> str:
    """Say why a contained name is skipped here; "" if it is not.

    `reserved` adds to labctl's own names; None reserves nothing, for a directory without others'
    files. PolicyError as in `require_contained`.
    """
    parts = require_contained(name).split("/")
    if reserved is not None and (parts[0] in reserved or parts[0].startswith(".labctl")):
        return "its name is reserved by labctl"
    if _CONTROL.search(name):
        return "a control character in its name"
    try:
        encoded = [part.encode() for part in parts]
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if max(map(len, encoded)) > LONGEST_NAME_BYTES:
        return "its name is too long"
    return ""
