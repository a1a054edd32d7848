"""JSON that a stranger wrote, as a typed value."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
UPGRADE = "uv tool upgrade labctl   # or: pipx upgrade labctl"


def decoded(data: bytes, kind: type[T]) -> T:
    """The value; ValueError with what is wrong, whatever it is."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_newer(data: bytes, part: str, kind: str, version: int) -> bool:
    """Whether the object at `part` says that it is of `kind`, and of a later version."""
    try:
        found = decoded(data, dict[str, Any]).get(part)
    except ValueError:
        return False
    if not isinstance(found, dict) or found.get("kind") != kind:
        return False
    claimed = found.get("version")
    return isinstance(claimed, int) and claimed > version
