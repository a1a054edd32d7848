"""Decides whether loading or unpacking a file could do harm, by its content and not its name.

There are two kinds of callers. One that accepts a stranger's weights lets a pickle of tensors pass,
and checks `hazard`. One that loads the file next accepts no pickle at all: loading a pickle runs
any code in it, and a list of harmless names is never complete.
"""

from __future__ import annotations

import ast
import json
import re
import struct
import tarfile
import zipfile
import zlib
from pathlib import PurePosixPath
from typing import BinaryIO, NamedTuple, cast

from . import archives, pickles
from .archives import ArchiveError
from .text import bytes_text

MAX_UNPACKED_BYTES = 1024**3
# An archive may unpack to MAX_UNPACKED_BYTES, or to this many times its own size.
BOMB_FACTOR = 20
# The bound of the safetensors library itself.
MAX_SAFETENSORS_HEADER_BYTES = 100_000_000
_HEAD_BYTES = 512
_MAX_ARRAY_HEADER_BYTES = 64 * 1024
_ARRAY_MARK, _GZIP_MARK = b"\x93NUMPY", b"\x1f\x8b"
_NUMBERS = re.compile(r"[<>|=]?(?:[biufcSUVmM]\d{1,9}|\?|b1)(?:\[\w{1,8}\])?")
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, struct.error, ValueError, EOFError, OSError, RuntimeError,
    NotImplementedError,
)  # fmt: skip


class FileVerdict(NamedTuple):
    """The judgment of a file. Both texts are "" for a file that contains only data.

    `pickle` completes "the file is ...": how it contains a pickle, harmless or not.
    `hazard` says why it must be neither loaded nor unpacked.
    """

    pickle: str = ""
    hazard: str = ""


def judge_file(path: str, file: BinaryIO, size: int) -> FileVerdict:
    """Judge one file. `path` is its name; `file` must be seekable, and its position changes."""
    file.seek(0)
    head = file.read(_HEAD_BYTES)
    claims_pickle = _has_pickle_suffix(path)
    if _is_tar(head):
        # PyTorch's first format, which torch.load tries before a pickle, so it is tried first here
        # too: a tar begins with a name, which may be a complete pickle, an empty zip or an array.
        reason = "it is a tar archive, which torch.load reads as a pickle"
        return FileVerdict("a tar archive, PyTorch's first format", reason)
    if archives.is_archive(file, size):
        return _judge_archive(file, size)
    if head.startswith(_ARRAY_MARK):
        return _judge_array(file, size)
    file.seek(0)
    if pickles.is_pickle(head):
        kind = "" if _is_safetensors(path, file, size) else "a pickle"
        file.seek(0)
        return FileVerdict(kind, pickles.find_hazard(file, size, promised=claims_pickle))
    if claims_pickle:
        kind = f"called {PurePosixPath(path).suffix}, as pickles are"
        return FileVerdict(kind, pickles.find_hazard(file, size, promised=True) if size else "")
    kind = "called .bin, as pickles of models are" if path.lower().endswith(".bin") and size else ""
    return FileVerdict(kind, _judge_gzip(file, size) if head.startswith(_GZIP_MARK) else "")


def _has_pickle_suffix(path: str) -> bool:
    return any(suffix.lower() in pickles.SUFFIXES for suffix in PurePosixPath(path).suffixes)


def _is_tar(head: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True


def _is_safetensors(path: str, file: BinaryIO, size: int) -> bool:
    """Return whether it begins as safetensors do: the length of a JSON object, and the object.

    Such a length may look like the first bytes of a pickle.
    """
    if not path.lower().endswith(".safetensors"):
        return False
    length = int.from_bytes(file.read(8), "little")
    if length > min(size, MAX_SAFETENSORS_HEADER_BYTES):
        return False
    try:
        return isinstance(json.loads(file.read(length)), dict)
    except (ValueError, RecursionError):
        return False


def _judge_archive(file: BinaryIO, size: int) -> FileVerdict:
    try:
        members = archives.read_directory(file, size)
        if reason := _find_bomb(members, size):
            return FileVerdict(hazard=reason)
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            inside = sorted(archive.infolist(), key=lambda info: info.header_offset)
            # The check above and the reader below must use the same bytes.
            if [(i.header_offset, i.compress_size, i.file_size) for i in inside] != [
                (m.offset, m.packed_size, m.size) for m in members
            ]:
                raise ArchiveError("Python reads its directory differently")
            verdicts = [_judge_member(archive, info) for info in inside]
    except ArchiveError as error:
        return FileVerdict(hazard=f"readers of this archive may not agree on its content: {error}")
    except _DAMAGE as error:
        return FileVerdict(hazard=f"it is a damaged archive ({error!s:.60})")
    has_pickle = any(verdict.pickle for verdict in verdicts)
    return FileVerdict(
        "an archive of pickles, as torch.save writes it" if has_pickle else "",
        next((verdict.hazard for verdict in verdicts if verdict.hazard), ""),
    )


def _find_bomb(members: list[archives.ZipMember], size: int) -> str:
    """Refuse an archive by the sizes that it declares; more than those is never unpacked."""
    total = sum(member.size for member in members)
    if total > max(MAX_UNPACKED_BYTES, BOMB_FACTOR * size):
        return f"it would unpack to {bytes_text(total)} from {size} bytes"
    return ""


def _judge_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> FileVerdict:
    with archive.open(info) as stream:
        head = stream.read(_HEAD_BYTES)
    claims_pickle = _has_pickle_suffix(info.filename)
    name = info.filename.lower()  # PyTorch compares names without case
    verdict = FileVerdict()
    if head.startswith(archives.STARTS):
        verdict = FileVerdict(hazard="it contains another archive, which cannot be inspected")
    elif head.startswith(_ARRAY_MARK):
        with archive.open(info) as stream:
            verdict = _judge_array(cast(BinaryIO, stream), info.file_size)
    elif pickles.is_pickle(head) or (claims_pickle and info.file_size):
        with archive.open(info) as stream:
            file = cast(BinaryIO, stream)
            reason = pickles.find_hazard(file, info.file_size, promised=claims_pickle)
        verdict = FileVerdict("a pickle", reason)
    elif "/code/" in f"/{name}" and name.endswith(".py"):
        verdict = FileVerdict(hazard="it is TorchScript, which is a program and not only weights")
    if verdict.hazard:
        return FileVerdict(verdict.pickle, f"{info.filename!a} in it: {verdict.hazard}")
    return verdict


def _judge_array(file: BinaryIO, size: int) -> FileVerdict:
    """Judge a NumPy array: one of Python objects is a pickle behind a header."""
    file.seek(0)
    start = file.read(8)
    width = 2 if start[6:7] == b"\x01" else 4
    length = int.from_bytes(file.read(width), "little")
    unreadable = FileVerdict(hazard="it is a damaged NumPy array")
    if not 0 < length <= _MAX_ARRAY_HEADER_BYTES:
        return unreadable
    try:
        header = ast.literal_eval(file.read(length).decode("latin-1").strip())
        kind = header["descr"]
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError):
        return unreadable
    if _has_only_numbers(kind):
        return FileVerdict()
    reason = pickles.find_hazard(file, size - 8 - width - length, promised=True)
    return FileVerdict("a NumPy file with a pickle in it", reason)


def _has_only_numbers(kind: object) -> bool:
    """Return whether a dtype, as its header describes it, has only numbers and texts."""
    if isinstance(kind, str):
        return _NUMBERS.fullmatch(kind) is not None
    if isinstance(kind, list):
        return all(isinstance(f, tuple) and len(f) > 1 and _has_only_numbers(f[1]) for f in kind)
    return isinstance(kind, tuple) and bool(kind) and _has_only_numbers(kind[0])


def _judge_gzip(file: BinaryIO, size: int) -> str:
    """Count the unpacked bytes, up to what is allowed."""
    limit = max(MAX_UNPACKED_BYTES, BOMB_FACTOR * size)
    file.seek(0)
    unpacker, total = zlib.decompressobj(31), 0
    try:
        while block := file.read(64 * 1024):
            while block:
                total += len(unpacker.decompress(block, 1024 * 1024))
                block = unpacker.unconsumed_tail
                if total > limit:
                    return f"it would unpack to more than {bytes_text(limit)} from {size} bytes"
                if unpacker.eof:
                    block = unpacker.unused_data
                    if not block.strip(b"\0"):
                        break
                    unpacker = zlib.decompressobj(31)
    except zlib.error:
        return "it is a damaged gzip file"
    return ""
