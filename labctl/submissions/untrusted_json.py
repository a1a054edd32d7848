"""Decoding untrusted JSON into a typed value."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from labctl import decoding
from labctl.model import Value

T = TypeVar("T")
UPGRADE = "uv tool upgrade labctl   # or: pipx upgrade labctl"


def decode_untrusted_json(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Decode untrusted JSON; every problem is a ValueError."""
    try:
        return decoding.decode_json(data, kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _KindClaim(Value, frozen=True):
    """The kind and version that a signed object claims."""

    kind: str
    version: int


def is_newer_version(data: bytes, part: str, kind: str, version: int) -> bool:
    """Tell whether the object at `part` claims to be of `kind`, in a later version."""
    try:
        claim = decode_untrusted_json(
            decode_untrusted_json(data, dict[str, msgspec.Raw])[part], _KindClaim
        )
    except (ValueError, KeyError):
        return False
    return claim.kind == kind and claim.version > version
