"""Images as strangers send them: anything may be claimed, little is believed."""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

from PIL import Image, UnidentifiedImageError

from .refusals import RefusedError

# No others: each decoder is code that a stranger's bytes reach.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# What Pillow's decoders raise for damaged files.
BROKEN = (
    *(OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError),
    *(struct.error, zlib.error, MemoryError),
)
BYTES_PER_PIXEL = 4


class Budget:
    """Bytes that may be held at once, by all requests together. Used from several threads."""

    def __init__(self, total: int) -> None:
        self._left = total
        self._lock = threading.Lock()

    @contextmanager
    def share(self) -> Iterator[Share]:
        """What is taken within is given back at the end."""
        one = Share(self)
        try:
            yield one
        finally:
            with self._lock:
                self._left += one.taken

    def take(self, size: int) -> None:
        """RefusedError (busy) where so much is not left."""
        with self._lock:
            if size > self._left:
                text = "too much is being worked on; try again in a second"
                raise RefusedError(503, "busy", text)
            self._left -= size


class Share:
    """What one request has taken; used by one thread after another."""

    def __init__(self, budget: Budget) -> None:
        self.taken = 0
        self._budget = budget

    def take(self, size: int) -> None:
        self._budget.take(size)
        self.taken += size


def unpacked(content: bytes, number: int, max_pixels: int, share: Share) -> Image.Image:
    """An image from a file's bytes; RefusedError where it is none, is damaged or is too large.

    Its size stands in its header, so a bomb is refused before it is unpacked. Of a moving picture
    the first frame counts.
    """
    try:
        picture = Image.open(BytesIO(content), formats=FORMATS)
        width, height = picture.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        text = f"an image may have {max_pixels} pixels"
        raise RefusedError(413, "too_large", text, image=number) from None
    except UnidentifiedImageError:
        text = f"this is no image; {', '.join(FORMATS)} are read"
        raise RefusedError(422, "not_an_image", text, image=number) from None
    except BROKEN:
        text = "this image's header is damaged"
        raise RefusedError(422, "not_an_image", text, image=number) from None
    if width * height > max_pixels:
        text = f"an image may have {max_pixels} pixels, this one has {width} x {height}"
        raise RefusedError(413, "too_large", text, image=number)
    share.take(width * height * BYTES_PER_PIXEL)
    try:
        picture.load()
    except BROKEN:
        text = "this image is damaged or cut off"
        raise RefusedError(422, "not_an_image", text, image=number) from None
    return picture
