"""A strict reader of JSON and of query strings: whoever reads them after us reads the same.

The engine is written in Go, whose decoder takes the last of two equal keys and ignores their case.
So no document may name a key twice, not even in another spelling.
"""

from __future__ import annotations

import json
from typing import Any, Iterable, NoReturn
from urllib.parse import parse_qsl

MOST_DIGITS = 20  # Python needs quadratic time for numbers of any length
MOST_PARAMETERS = 64
# What Go's encoder writes for characters that mean something in HTML and JavaScript.
GO_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def parse_json(text: bytes) -> Any:
    """Parse one JSON document in UTF-8; ValueError, with the reason, for anything else."""
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
    """Encode as Go does, byte for byte: the id of an image is the hash of its configuration."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(GO_ESCAPES).encode()


def parse_query(text: str) -> dict[str, str]:
    """Parse a query string; ValueError where it names a parameter twice."""
    if text.count("&") >= MOST_PARAMETERS:
        raise ValueError(f"more than {MOST_PARAMETERS} parameters")
    return _make_object(parse_qsl(text, keep_blank_values=True, errors="strict"))


def _make_object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    folded: dict[str, str] = {}
    for key, value in pairs:
        # Covers Go's folding, with the Kelvin sign for k and the long s for s.
        other = folded.setdefault(key.casefold(), key)
        if key in made or other != key:
            raise ValueError(f"it names {_quote(other)} and {_quote(key)}, which is one key twice")
        made[key] = value
    return made


def _quote(key: str) -> str:
    return ascii(key[:60])


def _parse_int(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number in it has more than {MOST_DIGITS} digits")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
