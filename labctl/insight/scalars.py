"""Read TensorBoard's scalars, the curves that a run has logged, without TensorBoard.

An event file is a row of TFRecords: length (uint64), masked CRC-32C of it, data, masked CRC-32C of
the data, all little-endian. The data is a `tensorflow.Event`, of which only steps, times, scalars
and restarts are read here. Formats: tensorflow/core/lib/io/record_writer.h, and event.proto,
summary.proto, tensor.proto of TensorFlow. The files may be untrusted, incomplete or damaged: all
readable parts are read, and `Scalars.flaws` lists the others.
"""

from __future__ import annotations

import functools
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from labctl.model import Value

MOST_FILES = 500
MOST_TAGS = 2_000
MOST_POINTS = 500_000
# A scalar takes about 50 bytes; larger records (images, graphs) are skipped.
LARGEST_RECORD_BYTES = 64 * 1024
LONGEST_TAG = 300
TRAINING = {"train", "training"}
# Words of a tag for curves that were measured on held-out data.
HELD_OUT = {"val", "valid", "validation", "eval", "test", "dev", "heldout"}

_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_MASK = 0xA282EAD8
# DataType of tensor.proto: float, double, int32, int64, half.
_TENSOR_FORMATS = {1: "<f", 2: "<d", 3: "<i", 9: "<q", 19: "<e"}
# Its fields float_val and double_val; int_val (7) and int64_val (10) are varints.
_TENSOR_LISTS = {5: "<f", 6: "<d"}


def split_words(tag: str) -> set[str]:
    """Split a tag into words: `train/epoch_loss` -> train, epoch, loss; also `trainLoss`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", tag)
    return {word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word}


class Series(Value, frozen=True):
    """One curve, in order of its steps. A value may be NaN or infinite. Times are Unix seconds."""

    tag: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    times: tuple[float, ...]


class Flaw(Value, frozen=True):
    """An unreadable part of a file. `cut`: the file ends within a record, as a growing one may."""

    file: str
    at_byte: int
    what: str
    cut: bool = False


class Scalars(Value, frozen=True):
    """All curves below a directory, by tag; `files` is the number of event files."""

    series: tuple[Series, ...] = ()
    files: int = 0
    flaws: tuple[Flaw, ...] = ()

    def get(self, tag: str) -> Series | None:
        return next((series for series in self.series if series.tag == tag), None)


class _CurvePoint(NamedTuple):
    step: int
    time: float
    value: float


class _LimitError(Exception):
    """The files hold more than the limits allow to read."""


def read_scalars(directory: Path) -> Scalars:
    """Read every curve of the event files below `directory`; empty if that does not exist.

    A file in a subdirectory gets its path as a prefix of the tag, as in TensorBoard:
    `validation/epoch_loss`. As there, a restart discards what was logged from its step on. Links
    are not followed. OSError if an existing file cannot be read.
    """
    paths = _event_files(directory)
    curves = _Curves()
    flaws: list[Flaw] = []
    for path in paths[:MOST_FILES]:
        name = path.relative_to(directory).as_posix()
        group = name.rpartition("/")[0]
        try:
            with path.open("rb") as file:
                flaws += _read_file(file, name, group, curves)
        except _LimitError as limit:
            flaws.append(Flaw(file=name, at_byte=0, what=str(limit)))
            break
    if len(paths) > MOST_FILES:
        what = f"{len(paths)} files: only the first {MOST_FILES} were read"
        flaws.append(Flaw(file="", at_byte=0, what=what))
    return Scalars(series=curves.series(), files=len(paths), flaws=tuple(flaws))


def _event_files(directory: Path) -> list[Path]:
    """List event files by name, which is by time: names begin with the time of creation."""
    paths = []
    for folder, folders, names in os.walk(directory):
        folders.sort()
        directory = Path(folder)
        paths += [directory / name for name in sorted(names) if "tfevents" in name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


class _Curves:
    """Collects points by directory and tag."""

    def __init__(self) -> None:
        self.points: dict[str, dict[str, list[_CurvePoint]]] = {}
        self.count = 0

    def add(self, group: str, tag: str, point: _CurvePoint) -> None:
        points = self.points.setdefault(group, {}).setdefault(tag, [])
        # A repeated step replaces the earlier points: the run was restarted before it.
        while points and points[-1].step >= point.step:
            points.pop()
        points.append(point)
        self.count += 1
        if self.count > MOST_POINTS:
            raise _LimitError(f"more than {MOST_POINTS:,} points: only the first were read")
        if len(points) == 1 and sum(map(len, self.points.values())) > MOST_TAGS:
            raise _LimitError(f"more than {MOST_TAGS:,} curves: only the first were read")

    def restart(self, group: str, step: int) -> None:
        """Discard the points of a directory from `step` on."""
        for points in self.points.get(group, {}).values():
            while points and points[-1].step >= step:
                points.pop()

    def series(self) -> tuple[Series, ...]:
        return tuple(
            Series(
                tag=f"{group}/{tag}" if group else tag,
                steps=tuple(point.step for point in points),
                values=tuple(point.value for point in points),
                times=tuple(point.time for point in points),
            )
            for group, tags in sorted(self.points.items())
            for tag, points in sorted(tags.items())
            if points
        )


def _read_file(file: BinaryIO, name: str, group: str, curves: _Curves) -> list[Flaw]:
    damaged: list[int] = []
    flaw: Flaw | None = None
    for offset, data in _records(file):
        if isinstance(data, str):
            flaw = Flaw(file=name, at_byte=offset, what=data, cut=data == CUT)
        elif data is None:
            damaged.append(offset)
        else:
            try:
                _event(data, group, curves)
            except (ValueError, struct.error):
                damaged.append(offset)
    flaws = [flaw] if flaw else []
    if damaged:
        records = "record" if len(damaged) == 1 else "records"
        what = f"skipped {len(damaged)} damaged {records}"
        flaws.insert(0, Flaw(file=name, at_byte=damaged[0], what=what))
    return flaws


CUT = "it ends in the middle of a record"


def _records(file: BinaryIO) -> Iterator[tuple[int, bytes | str | None]]:
    """Yield (offset, data) of each record. Data is None if damaged, or why the rest is missing."""
    size = os.fstat(file.fileno()).st_size
    offset = 0
    while head := file.read(_HEAD.size):
        if len(head) < _HEAD.size:
            yield offset, CUT
            return
        length, crc = _HEAD.unpack(head)
        if masked_crc(head[:8]) != crc:
            # Only this number tells where the next record begins.
            yield offset, "damaged; the rest was not read"
            return
        end = offset + _HEAD.size + length + _CRC.size
        if end > size:
            yield offset, CUT
            return
        if length > LARGEST_RECORD_BYTES:
            file.seek(end)
        else:
            data = file.read(length)
            (crc,) = _CRC.unpack(file.read(_CRC.size))
            yield offset, data if masked_crc(data) == crc else None
        offset = end


@functools.cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return tuple(table)


def masked_crc(data: bytes) -> int:
    """Compute CRC-32C (Castagnoli, RFC 3720 appendix B.4), masked as in TFRecords."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


Field = tuple[int, int | bytes]


def _fields(data: bytes) -> Iterator[Field]:
    """(number, value) of a protobuf message: an int for a varint, else bytes. ValueError."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        kind, number = key & 7, key >> 3
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == 2:
            length, at = _varint(data, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + length > end:
            raise ValueError("a field is longer than its message")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number without an end")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _signed(number: int) -> int:
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


def _event(data: bytes, group: str, curves: _Curves) -> None:
    """event.proto: 1 wall_time, 2 step, 5 summary, 7 session_log."""
    step, time, summary, restart = 0, 0.0, b"", False
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            (time,) = struct.unpack("<d", value)
        elif number == 2 and isinstance(value, int):
            step = _signed(value)
        elif number == 5 and isinstance(value, bytes):
            summary = value
        elif number == 7 and isinstance(value, bytes):
            restart = (1, 1) in _fields(value)  # its status is START
    if restart:
        curves.restart(group, step)
    for number, value in _fields(summary):
        if number == 1 and isinstance(value, bytes):
            _scalar(value, group, step, time, curves)


def _scalar(data: bytes, group: str, step: int, time: float, curves: _Curves) -> None:
    """summary.proto, Value: 1 tag, 2 simple_value, 8 tensor."""
    tag, scalar = "", None
    for number, value in _fields(data):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            tag = value.decode("utf-8", errors="replace")[:LONGEST_TAG]
        elif number == 2:
            (scalar,) = struct.unpack("<f", value)
        elif number == 8:
            scalar = _parse_tensor(value)
    if tag and scalar is not None:
        curves.add(group, tag, _CurvePoint(step, time, scalar))


def _parse_tensor(data: bytes) -> float | None:
    """Return the single number of a tensor; None for text, or more than one number."""
    kind, content, numbers = 0, b"", []
    for number, value in _fields(data):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number == 4 and isinstance(value, bytes):
            content = value
        elif number in _TENSOR_LISTS and isinstance(value, bytes):
            numbers += [item for (item,) in struct.iter_unpack(_TENSOR_LISTS[number], value)]
        elif number in (7, 10):
            numbers += [_signed(item) for item in _varints(value)]
    layout = _TENSOR_FORMATS.get(kind)
    if layout is None:
        return None
    if len(content) == struct.calcsize(layout):
        numbers = [struct.unpack(layout, content)[0]]
    return float(numbers[0]) if len(numbers) == 1 else None


def _varints(value: int | bytes) -> Iterator[int]:
    if isinstance(value, int):
        yield value
        return
    at = 0
    while at < len(value):
        number, at = _varint(value, at)
        yield number
