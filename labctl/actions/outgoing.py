"""What a push sends: the missing parts of files as one stream, compressed where that pays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from labctl.model import FileEntry
from labctl.remote import parcel
from labctl.remote.packing import worth_packing

BLOCK_BYTES = 1024 * 1024
QUICK_BYTES_PER_S = 64e6
"""A link that carries so much gains nothing: zlib's quickest level packs 70 to 150 MB/s."""
BUFFERS_BYTES = 4 * BLOCK_BYTES
"""So much vanishes in pipes and windows before a link shows how quick it is."""


class Outgoing:
    """`parts` (a file and the offset to begin at) below `root`; called, it begins their stream.

    Each part is as long as its entry says: what is missing by now is sent as zeros, and the hash
    tells. `on_bytes` hears how many bytes of the files have gone.
    """

    def __init__(
        self,
        root: Path,
        parts: Sequence[tuple[FileEntry, int]],
        on_bytes: Callable[[int], None],
    ) -> None:
        self.root = root
        self.parts = parts
        self.on_bytes = on_bytes
        self.pack = worth_packing((root / one.path, one.size) for one, _ in parts)

    def __call__(self) -> Iterator[bytes]:
        pace = Pace()
        done = 0
        for block in self._blocks():
            framed = parcel.packed(block) if self.pack and pace.slow else parcel.plain(block)
            begun = time.monotonic()
            yield framed
            pace.took(len(framed), time.monotonic() - begun)
            done += len(block)
            self.on_bytes(done)
        yield parcel.END

    def _blocks(self) -> Iterator[bytes]:
        """Small files together, large ones in pieces."""
        waiting = bytearray()
        for entry, offset in self.parts:
            for piece in _contents(self.root / entry.path, offset, entry.size):
                if not waiting and len(piece) == BLOCK_BYTES:
                    yield piece
                    continue
                waiting += piece
                if len(waiting) >= BLOCK_BYTES:
                    yield bytes(waiting)
                    waiting.clear()
        if waiting:
            yield bytes(waiting)


class Pace:
    """How quick the link is, from how long it takes to get rid of blocks."""

    def __init__(self) -> None:
        self.slow = True
        self._buffered = BUFFERS_BYTES
        self._bytes = 0
        self._s = 0.0

    def took(self, size: int, span_s: float) -> None:
        if self._buffered > 0:
            self._buffered -= size
            return
        self._bytes += size
        self._s += span_s
        self.slow = self._bytes < QUICK_BYTES_PER_S * self._s


def _contents(path: Path, offset: int, size: int) -> Iterator[bytes]:
    """Exactly the bytes from `offset` to `size`."""
    left = size - offset
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while left > 0 and (piece := file.read(min(BLOCK_BYTES, left))):
                left -= len(piece)
                yield piece
    except OSError:
        pass  # gone, or not to be read any more: the server says that it arrived different
    while left > 0:
        zeros = bytes(min(BLOCK_BYTES, left))
        left -= len(zeros)
        yield zeros
