"""Files on one stream: blocks that are compressed or not, and what they are put together from.

A block is a byte that tells how it is packed, its length in four bytes (big-endian), and its
bytes. Unpacked and one after another, blocks are the contents of the files that were named before;
an empty block is the end. One block, before that, may hold what is told about them.
"""

from __future__ import annotations

import struct
import zlib
from typing import Iterator

from .packing import LEVEL

HEAD = struct.Struct(">BI")
PLAIN, PACKED, TOLD = 0, 1, 2
MOST_BYTES = 4 * 1024 * 1024
"""No block unpacks to more: what is kept in memory stays small."""
END = HEAD.pack(PLAIN, 0)


class CutError(Exception):
    """The stream ended before its end, or is none."""


def plain(block: bytes) -> tuple[bytes, bytes]:
    return HEAD.pack(PLAIN, len(block)), block


def packed(block: bytes, level: int = LEVEL) -> tuple[bytes, bytes]:
    """The block compressed, or as it is where that is shorter."""
    small = zlib.compress(block, level)
    return (HEAD.pack(PACKED, len(small)), small) if len(small) < len(block) else plain(block)


def about(text: bytes) -> tuple[bytes, bytes]:
    """`text`, which is no content: what the receiver finds in `Unpacking.told`."""
    return HEAD.pack(TOLD, len(text)), text


class Unpacking:
    """Takes a stream in whatever pieces it comes. `ended` once its end was there."""

    def __init__(self) -> None:
        self.ended = False
        self.told = b""
        self._head = b""
        self._kind = PLAIN
        self._left = 0
        self._packed = bytearray()

    def feed(self, chunk: bytes) -> Iterator[memoryview]:
        """The contents in `chunk`, uncopied where they were not packed; CutError for nonsense."""
        data = memoryview(chunk)
        while data:
            if self.ended:
                raise CutError("more came than was due")
            if not self._left:
                data = self._begin(data)
                continue
            piece = data[: self._left]
            data = data[len(piece) :]
            self._left -= len(piece)
            if self._kind == PLAIN:
                yield piece
                continue
            self._packed += piece
            if not self._left:
                whole, self._packed = bytes(self._packed), bytearray()
                if self._kind == PACKED:
                    yield memoryview(_unpacked(whole))
                else:
                    self.told = whole

    def _begin(self, data: memoryview) -> memoryview:
        """Take a block's head, or the half of one; what is left of `data`."""
        taken = HEAD.size - len(self._head)
        self._head += data[:taken]
        if len(self._head) == HEAD.size:
            self._kind, self._left = HEAD.unpack(self._head)
            self._head = b""
            self.ended = not self._left
            if self._kind > TOLD or self._left > MOST_BYTES or (self.told and self._left):
                raise CutError("this is no stream of blocks")
        return data[taken:]


def _unpacked(block: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        found = unpacking.decompress(block, MOST_BYTES)
    except zlib.error as error:
        raise CutError(str(error)) from None
    if not unpacking.eof:
        raise CutError("a block unpacks to too much")
    return found
