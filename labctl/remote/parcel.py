"""Files on one stream: blocks that are compressed or not, and what they are put together from.

A block is a byte that tells how it is packed, its length in four bytes (big-endian), and its
bytes. Unpacked and one after another, blocks are the contents of the files that were named before;
an empty block is the end.
"""

from __future__ import annotations

import struct
import zlib
from typing import BinaryIO, Iterator

from .packing import LEVEL

HEAD = struct.Struct(">BI")
PLAIN, PACKED = 0, 1
MOST_BYTES = 4 * 1024 * 1024
"""No block unpacks to more: what is kept in memory stays small."""
END = HEAD.pack(PLAIN, 0)


class CutError(Exception):
    """The stream ended before its end, or is none."""


def plain(block: bytes) -> bytes:
    return HEAD.pack(PLAIN, len(block)) + block


def packed(block: bytes) -> bytes:
    """The block compressed, or as it is where that is shorter."""
    small = zlib.compress(block, LEVEL)
    return HEAD.pack(PACKED, len(small)) + small if len(small) < len(block) else plain(block)


def blocks(stream: BinaryIO) -> Iterator[bytes]:
    """The unpacked blocks up to the end; CutError where it does not come."""
    while True:
        head = stream.read(HEAD.size)
        if len(head) < HEAD.size:
            raise CutError("the stream was cut")
        kind, length = HEAD.unpack(head)
        if kind not in (PLAIN, PACKED) or length > MOST_BYTES:
            raise CutError("this is no stream of blocks")
        if not length:
            return
        block = stream.read(length)
        if len(block) < length:
            if kind == PLAIN:
                yield block
            raise CutError("the stream was cut")
        yield block if kind == PLAIN else _unpacked(block)


def _unpacked(block: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        found = unpacking.decompress(block, MOST_BYTES)
    except zlib.error as error:
        raise CutError(str(error)) from None
    if not unpacking.eof:
        raise CutError("a block unpacks to too much")
    return found
