"""A strict parser of JSON and query strings, so that the engine reads the same as the broker.

The engine is written in Go, whose decoder uses the last of two equal keys and ignores their case.
So no document may have a key twice, not even with another case.
"""

from __future__ import annotations

import json
from typing import Any, Iterable, NoReturn, TypeVar
from urllib.parse import parse_qsl

Value = TypeVar("Value")
MOST_DIGITS = 20  # Python parses long numbers in quadratic time
MOST_PARAMETERS = 64
# Escapes of Go's encoder for characters with a meaning in HTML and JavaScript
GO_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def parse_json(text: bytes) -> Any:
    """Parse a JSON document in UTF-8. ValueError, with the reason, for anything else."""
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_make_object,
            parse_int=_parse_int,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def encode_json(value: Any) -> bytes:
    """Encode as Go does, byte for byte: an image's id is the hash of its configuration."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(GO_ESCAPES).encode()


def parse_query(text: str) -> dict[str, str]:
    """Parse a query string. ValueError if a parameter occurs twice."""
    if text.count("&") >= MOST_PARAMETERS:
        raise ValueError(f"more than {MOST_PARAMETERS} parameters")
    return _make_object(parse_qsl(text, keep_blank_values=True, errors="strict"))


def _make_object(pairs: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    parsed: dict[str, Value] = {}
    folded: dict[str, str] = {}
    for key, value in pairs:
        # Covers Go's case folding, including the Kelvin sign for k and the long s for s.
        first_spelling = folded.setdefault(key.casefold(), key)
        if key in parsed or first_spelling != key:
            raise ValueError(
                f"it has {_quote(first_spelling)} and {_quote(key)}, which is one key twice"
            )
        parsed[key] = value
    return parsed


def _quote(key: str) -> str:
    return ascii(key[:60])


def _parse_int(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number in it has more than {MOST_DIGITS} digits")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
