"""What a push sends, taken in: what is missing lands in the staging directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Iterator

from .files import Target, commit
from .landing import Landing, Part
from .parcel import CutError
from .place import CHUNK
from .reply import Failure


def receive(request: dict[str, Any]) -> dict[str, Any]:
    """The "parts" ([path, offset] each) of needed files on standard input, as a stream of blocks
    (parcel.py) after the request's line; then `commit`. What came before a cut stays staged."""
    target = Target(request)
    stdin: Any = sys.stdin.buffer
    try:
        landing = Landing(_parts(request, target))
        try:
            while not landing.ended and (chunk := stdin.read1(CHUNK)):
                landing.feed(chunk)
            landing.end()
        finally:
            landing.close()
    except CutError as error:
        raise Failure("link", "the transfer was cut short", str(error), "labctl push") from None
    arrived = dict(zip((path for path, _ in request["parts"]), landing.sha256))
    return commit(request, arrived, target)


def _parts(request: dict[str, Any], target: Target) -> Iterator[Part]:
    sizes = {path: size for path, size, _, _ in request["files"]}
    made: set[str] = set()
    for path, offset in request["parts"]:
        if path not in sizes:
            raise Failure("usage", f"{path!r} is sent and not due")
        place = target.staged_at(path)
        if (parent := place.rpartition("/")[0]) not in made:
            Path(parent).mkdir(parents=True, exist_ok=True)
            made.add(parent)
        yield Part(place, int(offset), int(sizes[path]))
