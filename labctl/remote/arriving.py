"""Files on their way in: one stream of what is missing, hashed while it is written."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any, Iterator

from . import parcel
from .files import Target, commit
from .place import CHUNK
from .reply import Failure


def receive(request: dict[str, Any]) -> dict[str, Any]:
    """The "parts" ([path, offset] each) of needed files on standard input, as a stream of blocks
    (parcel.py) after the request's line; then `commit`. What came before a cut stays staged."""
    target = Target(request)
    sizes = {path: size for path, size, _, _ in request["files"]}
    arrived: dict[str, str] = {}
    source = _Source(parcel.blocks(sys.stdin.buffer))
    made: set[str] = set()
    try:
        for path, offset in request["parts"]:
            if path not in sizes:
                raise Failure("usage", f"{path!r} is sent and not due")
            place = target.staged_at(path)
            if (parent := place.rpartition("/")[0]) not in made:
                Path(parent).mkdir(parents=True, exist_ok=True)
                made.add(parent)
            arrived[path] = _arrive(source, place, int(offset), int(sizes[path]))
        source.end()
    except parcel.CutError as error:
        raise Failure("link", "the transfer was cut short", str(error), "labctl push") from None
    return commit(request, arrived, target)


def _arrive(source: _Source, place: str, offset: int, size: int) -> str:
    """Write what comes of one staged file from `offset` on; the hash of the whole of it."""
    digest = hashlib.sha256()
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(place, flags, 0o644)
    try:
        if offset:
            _hash_beginning(descriptor, digest, offset)
        if os.fstat(descriptor).st_size != offset:
            os.ftruncate(descriptor, offset)
        for piece in source.take(size - offset):
            digest.update(piece)
            while piece:
                piece = piece[os.write(descriptor, piece) :]
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _hash_beginning(descriptor: int, digest: Any, length: int) -> None:
    while length > 0:
        block = os.read(descriptor, min(CHUNK, length))
        if not block:
            raise Failure("link", "a staged file lacks its beginning here", "", "labctl push")
        digest.update(block)
        length -= len(block)


class _Source:
    """Blocks, handed out in the lengths that files have."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._left = memoryview(b"")

    def take(self, length: int) -> Iterator[memoryview]:
        """Exactly `length` bytes; parcel.CutError where they do not come."""
        while length > 0:
            if not self._left:
                block = next(self._blocks, None)
                if block is None:
                    raise parcel.CutError("less came than was due")
                self._left = memoryview(block)
            piece = self._left[:length]
            self._left = self._left[len(piece) :]
            length -= len(piece)
            yield piece

    def end(self) -> None:
        if self._left or next(self._blocks, None) is not None:
            raise parcel.CutError("more came than was due")
