"""Decide from a sample whether to compress a transfer."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

SAMPLES = 16
SAMPLE_BYTES = 64 * 1024
# Smaller transfers are so short that compression does not pay.
LEAST_BYTES = 128 * 1024
# If a sample shrinks to this share or less, the fastest levels save more time than they take.
WORTH = 0.8
LEVEL = 1


def is_compressible(files: Iterable[tuple[Path, int]]) -> bool:
    """Whether `files`, each with its size in bytes, shrink enough. Unreadable files are left out.

    Reads and compresses at most 16 pieces of 64 KiB, spread evenly over all bytes: about 20 ms.
    """
    sized = [(path, size) for path, size in files if size > 0]
    total = sum(size for _, size in sized)
    if total < LEAST_BYTES:
        return False
    read_bytes = packed_bytes = 0
    for path, offset in _spread(sized, total):
        try:
            with path.open("rb") as file:
                file.seek(offset)
                piece = file.read(SAMPLE_BYTES)
        except OSError:
            continue
        read_bytes += len(piece)
        packed_bytes += len(zlib.compress(piece, LEVEL))
    return read_bytes > 0 and packed_bytes <= WORTH * read_bytes


def _spread(sized: list[tuple[Path, int]], total: int) -> list[tuple[Path, int]]:
    """Return (file, offset) of each piece to read, the same number of bytes apart."""
    step = max(SAMPLE_BYTES, total // SAMPLES)
    pieces, start = [], 0
    position = 0
    for path, size in sized:
        while position < start + size:
            pieces.append((path, position - start))
            position += step
        start += size
    return pieces
