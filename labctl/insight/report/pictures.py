"""Check of pictures: only small PNG and JPEG files, by their own headers, are shown.

A picture may come from an untrusted evaluation. A file of a few kilobytes may claim to be 60,000
pixels wide, and a browser would try to decode it.
"""

from __future__ import annotations

import base64
import binascii
import struct

MOST_BYTES = 200_000
LONGEST_SIDE = 2_048
PREFIXES = {"data:image/png;base64,": "png", "data:image/jpeg;base64,": "jpeg"}
_START_OF_FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_ALONE = {0x01, *range(0xD0, 0xD9)}


def check_picture(
    picture: str, most_bytes: int = MOST_BYTES, longest_side: int = LONGEST_SIDE
) -> tuple[str, str]:
    """Check a data URI; return (the data URI to show, why it is not shown), one of them ""."""
    for prefix, kind in PREFIXES.items():
        if picture.startswith(prefix):
            try:
                content = base64.b64decode(picture.removeprefix(prefix), validate=True)
            except (binascii.Error, ValueError):
                return "", "it is damaged"
            return _check(content, kind, most_bytes, longest_side)
    return "", "it is not a PNG or JPEG"


def check_bytes(
    content: bytes, most_bytes: int = MOST_BYTES, longest_side: int = LONGEST_SIDE
) -> tuple[str, str]:
    """Check a file's content; return the same as `check_picture`."""
    kind = "png" if content.startswith(b"\x89PNG") else "jpeg"
    return _check(content, kind, most_bytes, longest_side)


def _check(content: bytes, kind: str, most_bytes: int, longest_side: int) -> tuple[str, str]:
    if len(content) > most_bytes:
        return "", f"it is larger than {most_bytes // 1000} kB"
    side = png_size(content) if kind == "png" else jpeg_size(content)
    if side is None:
        return "", "it is damaged or not a picture"
    width, height = side
    if not (0 < width <= longest_side and 0 < height <= longest_side):
        return "", f"it has {width:,} x {height:,} pixels"
    encoded = base64.b64encode(content).decode()
    return f"data:image/{kind};base64,{encoded}", ""


def png_size(content: bytes) -> tuple[int, int] | None:
    """Read width and height in pixels from the header chunk."""
    if len(content) < 33 or content[:8] != b"\x89PNG\r\n\x1a\n" or content[12:16] != b"IHDR":
        return None
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Read width and height in pixels from the first start-of-frame segment."""
    if content[:2] != b"\xff\xd8":
        return None
    offset = 2
    while offset + 9 <= len(content):
        if content[offset] != 0xFF:
            return None
        marker = content[offset + 1]
        if marker in _START_OF_FRAME:
            height, width = struct.unpack(">HH", content[offset + 5 : offset + 9])
            return width, height
        offset += (
            2 if marker in _ALONE else 2 + struct.unpack(">H", content[offset + 2 : offset + 4])[0]
        )
    return None
