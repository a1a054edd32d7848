"""The parsed form of small YAML files, kept in the cache directory.

To import PyYAML and parse a lab.yaml takes about a tenth of a command such as `labctl status`.
Only a file without problems is kept. It is used for a file with the same bytes alone, so an edit
needs no clean-up; anything that cannot be read is parsed again.
"""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path

import msgspec

from labctl.config.document import Node, parse
from labctl.config.identity import write_private
from labctl.errors import Problem
from labctl.model import Value

# Goes up when `document.parse` returns something else for the same bytes.
VERSION = 1


class ParsedFile(Value, frozen=True):
    """The nodes of a file with these bytes, for problems reported under `origin`."""

    version: int
    origin: str
    data: bytes
    top: Node


_DECODER = msgspec.msgpack.Decoder(ParsedFile)


def parse_or_recall(
    data: bytes, origin: str, problems: list[Problem], cache_dir: Path
) -> Node | None:
    """Do what `document.parse` does, from the cache if it has these bytes."""
    file = cache_dir / "parsed" / f"{zlib.crc32(data):08x}.msgpack"
    if (top := _recall(file, data, origin)) is not None:
        return top
    known = len(problems)
    top = parse(data, origin, problems)
    if top is not None and len(problems) == known:
        kept = ParsedFile(version=VERSION, origin=origin, data=data, top=top)
        # A full or read-only disk costs the next command its time and nothing else.
        with contextlib.suppress(OSError):
            write_private(file, msgspec.msgpack.encode(kept))
    return top


def _recall(file: Path, data: bytes, origin: str) -> Node | None:
    try:
        kept = _DECODER.decode(file.read_bytes())
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
    is_same = (kept.version, kept.origin, kept.data) == (VERSION, origin, data)
    return kept.top if is_same else None
