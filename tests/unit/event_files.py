"""TensorBoard event files as bytes, made without TensorBoard, to be cut and damaged at will."""

from __future__ import annotations

import struct

from labctl.insight.scalars import masked_crc


def record(data: bytes) -> bytes:
    """A TFRecord with right checksums."""
    length = struct.pack("<Q", len(data))
    return (
        length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))
    )


def varint(number: int) -> bytes:
    number &= 2**64 - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def event(step: int, *fields: bytes, at: float = 1.7e9) -> bytes:
    body = b"\x09" + struct.pack("<d", at) + b"\x10" + varint(step)
    return record(body + b"".join(fields))


def scalar(tag: str, step: int, value: float, at: float = 1.7e9) -> bytes:
    """An event with one `simple_value`."""
    content = field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
    return event(step, field(5, field(1, content)), at=at)


def tensor(tag: str, step: int, content: bytes) -> bytes:
    """An event with a TensorProto of these bytes, as Keras writes its scalars."""
    return event(step, field(5, field(1, field(1, tag.encode()) + field(8, content))))


def restart(step: int) -> bytes:
    """SessionLog.START: what was logged from `step` on is forgotten."""
    return event(step, field(7, b"\x08\x01"))


def curve(tag: str, values: list[float], every: int = 10, at: float = 1.7e9) -> bytes:
    """One point every so many steps, one a second."""
    return b"".join(
        scalar(tag, (number + 1) * every, value, at + number) for number, value in enumerate(values)
    )
