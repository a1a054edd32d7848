"""Decode JSON into typed values, from several threads at once.

msgspec examines a type when it first decodes it, and may crash the process if two threads do that
at the same time. Here one thread examines each type before any decodes it.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_lock = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode_json(content: bytes | str | msgspec.Raw, kind: type[T]) -> T:
    """Decode JSON as a value of this type; msgspec.DecodeError if it is not one."""
    value: T = _get_decoder(kind).decode(content)
    return value


def convert_value(value: object, kind: type[T], *, strict: bool = True) -> T:
    """Convert plain values, as JSON has them, to this type; msgspec.ValidationError otherwise.

    If not `strict`, a string may stand for a number or for true and false.
    """
    _get_decoder(kind)
    return msgspec.convert(value, kind, strict=strict)


def _get_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.get(kind) or msgspec.json.Decoder(kind)
            _decoders[kind] = decoder
    return decoder
