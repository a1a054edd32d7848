"""What is sent, from either side: parts of files as one stream, compressed where that pays."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence, Tuple

from . import parcel
from .packing import LEVEL, worth_packing

Part = Tuple[str, int, int]
"""Path below the root, the offset to begin at, the size that the file has."""
BLOCK_BYTES = 512 * 1024
QUICK_BYTES_PER_S = 64e6
"""A link that carries so much gains nothing: zlib's quickest level packs 70 to 150 MB/s."""
SLOW_BYTES_PER_S = 10e6
SLOW_LEVEL = 4
"""Still 35 MB/s or more, and up to a seventh less to carry."""
BUFFERS_BYTES = 4 * 1024 * 1024
"""So much vanishes in pipes and windows before a link shows how quick it is."""


class Outgoing:
    """`parts` of files below `root`; called, it begins their stream.

    Each part is as long as its size says: what cannot be read by now is sent as zeros, and the hash
    tells. `on_bytes` hears how many bytes of the files have gone. `digests`, one for each part or
    none, have taken in what comes before it; those of the stream that was begun last take in what
    is sent too, and are None where that was not all read. `about` is asked at the end for what the
    receiver is to be told.
    """

    def __init__(
        self,
        root: Path,
        parts: Sequence[Part],
        on_bytes: Callable[[int], None],
        digests: Sequence[Any] = (),
        about: Callable[[], bytes] | None = None,
    ) -> None:
        self.root = root
        self.parts = parts
        self.on_bytes = on_bytes
        self.digests = list(digests) or [None] * len(parts)
        self._before = self.digests
        self._about = about
        self.pack = worth_packing((root / path, size - offset) for path, offset, size in parts)

    def __call__(self) -> Iterator[bytes]:
        pace = Pace()
        done = 0
        self.digests = [one and one.copy() for one in self._before]
        for block in self._blocks():
            level = pace.level if self.pack else 0
            framed = parcel.packed(block, level) if level else parcel.plain(block)
            begun = time.monotonic()
            yield from framed
            pace.took(sum(map(len, framed)), time.monotonic() - begun)
            done += len(block)
            self.on_bytes(done)
        if self._about:
            yield from parcel.about(self._about())
        yield parcel.END

    def _blocks(self) -> Iterator[bytes]:
        """Small files together, large ones in pieces."""
        waiting = bytearray()
        for number in range(len(self.parts)):
            for piece in self._pieces(number):
                if not waiting and len(piece) == BLOCK_BYTES:
                    yield piece
                    continue
                waiting += piece
                if len(waiting) >= BLOCK_BYTES:
                    yield bytes(waiting)
                    waiting.clear()
        if waiting:
            yield bytes(waiting)

    def _pieces(self, number: int) -> Iterator[bytes]:
        """Exactly the bytes of one part."""
        path, offset, size = self.parts[number]
        digest = self.digests[number]
        left = size - offset
        for piece in _contents(f"{self.root}/{path}", offset, size):
            left -= len(piece)
            if digest is not None:
                digest.update(piece)
            yield piece
        if left:
            self.digests[number] = None
        while left > 0:
            zeros = bytes(min(BLOCK_BYTES, left))
            left -= len(zeros)
            yield zeros


class Pace:
    """How quick the link is, from how long it takes to get rid of blocks: which of zlib's levels
    pays, 0 for none."""

    def __init__(self) -> None:
        self.level = LEVEL
        self._buffered = BUFFERS_BYTES
        self._bytes = 0
        self._s = 0.0

    def took(self, size: int, span_s: float) -> None:
        if self._buffered > 0:
            self._buffered -= size
            return
        self._bytes += size
        self._s += span_s
        if self._bytes >= QUICK_BYTES_PER_S * self._s:
            self.level = 0
        else:
            self.level = SLOW_LEVEL if self._bytes < SLOW_BYTES_PER_S * self._s else LEVEL


def _contents(path: str, offset: int, size: int) -> Iterator[bytes]:
    """The bytes from `offset` to `size`, as far as they can be read."""
    left = size - offset
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # gone, or not to be read any more: the receiver sees that it arrived different
    try:
        if offset:
            os.lseek(descriptor, offset, os.SEEK_SET)
        while left > 0 and (piece := os.read(descriptor, min(BLOCK_BYTES, left))):
            left -= len(piece)
            yield piece
    except OSError:
        pass  # as above
    finally:
        os.close(descriptor)
