"""Names from a server: what may become a path here."""

from __future__ import annotations

from collections.abc import Sequence

from labctl.errors import PolicyError

LONGEST_NAME_BYTES = 255


def contained(name: str) -> str:
    """`name`, a relative path from a server; PolicyError where it could lead anywhere else."""
    parts = name.split("/")
    if name.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\0" in name:
        raise PolicyError(
            f"the server sent the name {name!a}, which leaves its directory",
            why="no honest server does that; nothing was written under it",
            hint="labctl ssh",
        )
    return name


def unwelcome(name: str, *, reserved: Sequence[str] = ()) -> str:
    """Why a contained name is left out here, "" if it is not. PolicyError as `contained`."""
    parts = contained(name).split("/")
    if parts[0] in reserved or parts[0].startswith(".labctl"):
        return "its name is labctl's own"
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):
        return "a control character in its name"
    try:
        encoded = [part.encode() for part in parts]
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if max(map(len, encoded)) > LONGEST_NAME_BYTES:
        return "its name is too long"
    return ""
