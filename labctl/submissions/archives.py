"""What hides inside of a file: pickles in PyTorch's and NumPy's archives, and archives that unpack
to far more than they are."""

from __future__ import annotations

import ast
import re
import struct
import zipfile
import zlib
from pathlib import PurePosixPath
from typing import BinaryIO, cast

from labctl.model import Value
from labctl.submissions import pickles

MOST_UNPACKED_BYTES = 1024**3
"""An archive may unpack to so much, or to BOMB_FACTOR times its own size."""
BOMB_FACTOR = 20
MOST_MEMBERS = 50_000
HEAD_BYTES = 512
PACKED = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"(\xb5/\xfd": "zstd",
    b"7z\xbc\xaf": "7z",
}  # fmt: skip
MOST_HEADER_BYTES = 64 * 1024
_NUMBERS = re.compile(r"[<>|=]?(?:[biufcSUVmM]\d{1,9}|\?|b1)(?:\[\w{1,8}\])?")
_READABLE = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Hazard(Value, frozen=True):
    """A file of a bundle that must not be loaded or unpacked, and why."""

    path: str
    reason: str


def hazards(path: str, file: BinaryIO, size: int) -> list[Hazard]:
    """What is wrong with one file, whatever its name says it is. `file` can be moved in."""
    file.seek(0)
    head = file.read(HEAD_BYTES)
    said = []
    promises = bool(pickles.SUFFIXES & set(_suffixes(path)))
    archive = _is_zip(file)
    array = head.startswith(b"\x93NUMPY")
    if pickles.is_pickle(head) or (promises and not archive and not array and size):
        file.seek(0)
        said.append(pickles.hazard(file, size, promised=promises and not archive))
    if array:
        said.append(_array(file, size))
    if archive:
        said.append(_zip(file, size, promised=head.startswith(b"PK")))
    kind = next((name for magic, name in PACKED.items() if head.startswith(magic)), "")
    if kind == "gzip":
        said.append(_gzip(file, size))
    return [Hazard(path=path, reason=reason) for reason in dict.fromkeys(said) if reason]


def _suffixes(path: str) -> list[str]:
    return [suffix.lower() for suffix in PurePosixPath(path).suffixes]


def _is_zip(file: BinaryIO) -> bool:
    file.seek(0)
    return zipfile.is_zipfile(file)


def _zip(file: BinaryIO, size: int, *, promised: bool) -> str:
    """What is wrong with an archive: its own word for sizes is believed only to refuse it."""
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            inside = archive.infolist()
            if len(inside) > MOST_MEMBERS:
                return f"it holds {len(inside)} files"
            total = sum(one.file_size for one in inside)
            if total > max(MOST_UNPACKED_BYTES, BOMB_FACTOR * size):
                return f"it would unpack to {_gib(total)} from {size} bytes"
            if said := _overlapping(inside, size):
                return said
            return next(filter(None, (_member(archive, one) for one in inside)), "")
    except (zipfile.BadZipFile, zlib.error, struct.error, ValueError, EOFError, OSError) as error:
        return f"it is a damaged archive ({error!s:.60})" if promised else ""


def _overlapping(inside: list[zipfile.ZipInfo], size: int) -> str:
    """Files that share their bytes are how a small archive holds a large one many times."""
    if sum(one.compress_size for one in inside) > size:
        return "the files in it overlap, as those of a zip bomb do"
    return ""


def _member(archive: zipfile.ZipFile, one: zipfile.ZipInfo) -> str:
    if one.flag_bits & 1 or one.compress_type not in _READABLE:
        return f"{one.filename!a} in it is encrypted or packed in a way that cannot be looked into"
    with archive.open(one) as file:
        head = file.read(HEAD_BYTES)
    promises = bool(pickles.SUFFIXES & set(_suffixes(one.filename)))
    said = ""
    if head.startswith(b"\x93NUMPY"):
        with archive.open(one) as file:
            said = _array(cast(BinaryIO, file), one.file_size)
    elif pickles.is_pickle(head) or (promises and one.file_size):
        with archive.open(one) as file:
            said = pickles.hazard(cast(BinaryIO, file), one.file_size, promised=promises)
    elif head.startswith(b"PK\x03\x04"):
        said = "an archive lies in it, and cannot be looked into"
    elif "/code/" in f"/{one.filename}" and one.filename.endswith(".py"):
        said = "it is TorchScript: a program, not weights alone"
    return f"{one.filename!a} in it: {said}" if said else ""


def _array(file: BinaryIO, size: int) -> str:
    """A NumPy array of Python objects is a pickle behind a header."""
    file.seek(0)
    start = file.read(8)
    width = 2 if start[6:7] == b"\x01" else 4
    length = int.from_bytes(file.read(width), "little")
    if not 0 < length <= MOST_HEADER_BYTES:
        return "it is no NumPy array that can be read"
    try:
        described = ast.literal_eval(file.read(length).decode("latin-1").strip())
        kind = described["descr"]
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError):
        return "it is no NumPy array that can be read"
    if _holds_numbers(kind):
        return ""
    return pickles.hazard(file, size - 8 - width - length, promised=True)


def _holds_numbers(kind: object) -> bool:
    """Whether a dtype, as its header describes it, is of numbers and texts through and through."""
    if isinstance(kind, str):
        return _NUMBERS.fullmatch(kind) is not None
    if isinstance(kind, list):
        return all(isinstance(f, tuple) and len(f) > 1 and _holds_numbers(f[1]) for f in kind)
    return isinstance(kind, tuple) and bool(kind) and _holds_numbers(kind[0])


def _gzip(file: BinaryIO, size: int) -> str:
    """How much comes out is counted, up to what is allowed."""
    most = max(MOST_UNPACKED_BYTES, BOMB_FACTOR * size)
    file.seek(0)
    unpacker, total = zlib.decompressobj(31), 0
    try:
        while block := file.read(64 * 1024):
            while block:
                total += len(unpacker.decompress(block, 1024 * 1024))
                block = unpacker.unconsumed_tail
                if total > most:
                    return f"it would unpack to more than {_gib(most)} from {size} bytes"
                if unpacker.eof:
                    block = unpacker.unused_data
                    if not block.strip(b"\0"):
                        break
                    unpacker = zlib.decompressobj(31)
    except zlib.error:
        return "it is no whole gzip file"
    return ""


def _gib(size: int) -> str:
    return f"{size / 1024**3:.1f} GiB"
