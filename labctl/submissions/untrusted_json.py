"""JSON that a stranger wrote, as a typed value."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from labctl.model import Value

T = TypeVar("T")
UPGRADE = "uv tool upgrade labctl   # or: pipx upgrade labctl"


def decoded(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """The value; ValueError with what is wrong, whatever it is."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _Claim(Value, frozen=True):
    """What a signed part says of itself first."""

    kind: str
    version: int


def is_newer(data: bytes, part: str, kind: str, version: int) -> bool:
    """Whether the object at `part` says that it is of `kind`, and of a later version."""
    try:
        claim = decoded(decoded(data, dict[str, msgspec.Raw])[part], _Claim)
    except (ValueError, KeyError):
        return False
    return claim.kind == kind and claim.version > version
