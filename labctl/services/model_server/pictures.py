"""Decode images from untrusted clients within limits of size, pixels and memory."""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

from PIL import Image, UnidentifiedImageError

from .refusals import RefusedError

# Only these formats: each decoder is code that untrusted bytes reach.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# The exceptions of Pillow's decoders for damaged files.
BROKEN = (
    *(OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError),
    *(struct.error, zlib.error, MemoryError),
)
BYTES_PER_PIXEL = 4


class MemoryBudget:
    """The bytes that all requests together may hold at once. Thread-safe."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._lock = threading.Lock()

    @contextmanager
    def share(self) -> Iterator[MemoryShare]:
        """Give a request its share; returns what it took at the end."""
        share_ = MemoryShare(self)
        try:
            yield share_
        finally:
            with self._lock:
                self._free += share_.taken

    def take(self, size: int) -> None:
        """Take `size` bytes; RefusedError (busy) if they are not available."""
        with self._lock:
            if size > self._free:
                text = "the server is busy; try again in a second"
                raise RefusedError(503, "busy", text)
            self._free -= size


class MemoryShare:
    """The bytes that one request has taken; used by one thread after another."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.taken = 0
        self._budget = budget

    def take(self, size: int) -> None:
        self._budget.take(size)
        self.taken += size


def decode_image(content: bytes, number: int, max_pixels: int, share: MemoryShare) -> Image.Image:
    """Decode an image; RefusedError if the bytes are not an image, damaged, or too large.

    Its size is checked in its header, so that a decompression bomb is refused before it is decoded.
    Of an animation, only the first frame is used.
    """
    try:
        picture = Image.open(BytesIO(content), formats=FORMATS)
        width, height = picture.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        text = f"an image may have at most {max_pixels} pixels"
        raise RefusedError(413, "too_large", text, image=number) from None
    except UnidentifiedImageError:
        text = f"not an image; supported formats: {', '.join(FORMATS)}"
        raise RefusedError(422, "not_an_image", text, image=number) from None
    except BROKEN:
        text = "the image's header is damaged"
        raise RefusedError(422, "not_an_image", text, image=number) from None
    if width * height > max_pixels:
        text = f"an image may have at most {max_pixels} pixels; this one is {width} x {height}"
        raise RefusedError(413, "too_large", text, image=number)
    share.take(width * height * BYTES_PER_PIXEL)
    try:
        picture.load()
    except BROKEN:
        text = "the image is damaged or truncated"
        raise RefusedError(422, "not_an_image", text, image=number) from None
    return picture
