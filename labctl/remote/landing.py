"""Files on their way in, to either side: one stream, hashed while it is written."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Iterable, NamedTuple

from .parcel import CutError, Unpacking
from .place import CHUNK


class Part(NamedTuple):
    """A file that gets its bytes from `offset` to `size`. `digest` has taken in those before, if
    they were read already."""

    place: str
    offset: int
    size: int
    digest: Any = None


class Landing:
    """Writes a stream (parcel.py) to the `parts`, in their order; `close` it in any case.

    `sha256` are the hashes of the whole files that are complete, `done` the bytes that have come.
    CutError for a stream that ends early or has more than was due; what has come of it stays.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self.sha256: list[str] = []
        self.done = 0
        self._parts = iter(parts)
        self._unpacking = Unpacking()
        self._descriptor = -1
        self._left = 0
        self._digest: Any = None
        self._next()

    @property
    def ended(self) -> bool:
        return self._unpacking.ended

    @property
    def told(self) -> bytes:
        """What the stream said about the files, at its end."""
        return self._unpacking.told

    def feed(self, chunk: bytes) -> None:
        for piece in self._unpacking.feed(chunk):
            self.done += len(piece)
            while piece:
                if self._descriptor < 0:
                    raise CutError("more came than was due")
                part = piece[: self._left]
                piece = piece[len(part) :]
                self._left -= len(part)
                self._digest.update(part)
                while part:
                    part = part[os.write(self._descriptor, part) :]
                if not self._left:
                    self._next()

    def end(self) -> None:
        if not self.ended or self._descriptor >= 0:
            raise CutError("less came than was due")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _next(self) -> None:
        """Open the next file that gets bytes; those that are complete are done on the way."""
        if self._descriptor >= 0:
            self._complete()
        for part in self._parts:
            self._open(part)
            if self._left:
                return
            self._complete()

    def _complete(self) -> None:
        self.close()
        self.sha256.append(self._digest.hexdigest())

    def _open(self, part: Part) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(part.place, flags | (0 if part.offset else os.O_TRUNC), 0o644)
        self._left = part.size - part.offset
        self._digest = part.digest or hashlib.sha256()
        if not part.offset:
            return
        if part.digest is None:
            take_in(self._descriptor, self._digest, part.offset)
        if os.fstat(self._descriptor).st_size != part.offset:
            os.ftruncate(self._descriptor, part.offset)
        os.lseek(self._descriptor, part.offset, os.SEEK_SET)


def take_in(descriptor: int, digest: Any, length: int) -> None:
    """Hash the first `length` bytes of a file that was just opened; CutError if it has fewer."""
    while length > 0:
        block = os.read(descriptor, min(CHUNK, length))
        if not block:
            raise CutError("a file lacks its beginning")
        digest.update(block)
        length -= len(block)
