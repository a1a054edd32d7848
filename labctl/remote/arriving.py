"""What a push sends, taken in: what is missing lands in the staging directory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Container, Iterator

from . import files
from .files import Target, commit
from .landing import Landing, Part
from .parcel import CutError
from .place import CHUNK, write_json
from .reply import Failure


def plan(request: dict[str, Any]) -> dict[str, Any]:
    """`files.plan`. Where "parts" ([path, 0] each) come along on standard input, as for `receive`,
    and nothing else is needed, they are committed at once: the reply then has "bad" too.
    """
    target = Target(request)
    found = files.plan(request, target)
    needed = set(found["needed"])
    refused = found["conflicts"] or found["unsure"] or found["short_bytes"]
    if refused or not needed or not needed <= {path for path, _ in request.get("parts", [])}:
        return found
    landing = _landed(_parts(request, target, needed))
    arrived = _hashes(request, landing)
    wanted = [one for one in request["files"] if one[0] in needed]
    due = {**request, "files": wanted, "removed": found["removed"]}
    return {**found, **commit(due, arrived, target)}


def receive(request: dict[str, Any]) -> dict[str, Any]:
    """The "parts" ([path, offset] each) of needed files on standard input, as a stream of blocks
    (parcel.py) after the request's line; then `commit`. What came before a cut stays staged.

    Hashes that "files" lack ("") are told at the stream's end, as an object by path; a file that
    has none there either did not stand still, and is bad.
    """
    target = Target(request)
    landing = _landed(_parts(request, target, {one[0] for one in request["files"]}))
    arrived = _hashes(request, landing)
    if landing.told:
        told = json.loads(landing.told)
        target.due.update(told)
        write_json(target.due_path, target.due)
        files = [[p, size, sha256 or told.get(p, ""), m] for p, size, sha256, m in request["files"]]
        request = {**request, "files": files}
    return commit(request, arrived, target)


def _landed(parts: Iterator[Part]) -> Landing:
    """Standard input in the places of `parts`."""
    stdin: Any = sys.stdin.buffer
    try:
        landing = Landing(parts)
        try:
            while not landing.ended and (chunk := stdin.read1(CHUNK)):
                landing.feed(chunk)
            landing.end()
        finally:
            landing.close()
    except CutError as error:
        raise Failure("link", "the transfer was cut short", str(error), "labctl push") from None
    return landing


def _hashes(request: dict[str, Any], landing: Landing) -> dict[str, str]:
    return dict(zip((path for path, _ in request["parts"]), landing.sha256))


def _parts(request: dict[str, Any], target: Target, needed: Container[str]) -> Iterator[Part]:
    """Where the parts go: to the staging directory, or nowhere where that is not `needed`."""
    sizes = {path: size for path, size, _, _ in request["files"]}
    made: set[str] = set()
    for path, offset in request["parts"]:
        if path not in sizes:
            raise Failure("usage", f"{path!r} is sent and not due")
        place = target.staged_at(path) if path in needed else os.devnull
        if (parent := place.rpartition("/")[0]) not in made:
            Path(parent).mkdir(parents=True, exist_ok=True)
            made.add(parent)
        yield Part(place, int(offset), int(sizes[path]))
