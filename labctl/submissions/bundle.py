"""The bundle: one plain tar of regular files, manifest first. Never compressed: what arrives is as
large as what it holds, and no file in it is unpacked to be looked at.

Read by our own few lines: tarfile follows what a stranger's header says of sparse files, links
and sizes, and takes a header of any length into memory.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from labctl.errors import TransferError
from labctl.model import Value
from labctl.submissions import manifest as manifests
from labctl.submissions.manifest import BundleFile, Manifest, refused
from labctl.wire.judge import judge_file

BLOCK = 512
CHUNK_BYTES = 1024 * 1024
MOST_HEADER_BYTES = 64 * 1024
TYPES = {
    b"1": "a hard link", b"2": "a link", b"3": "a device", b"4": "a device", b"5": "a directory",
    b"6": "a pipe", b"7": "a special file", b"S": "a sparse file", b"g": "a header for all",
}  # fmt: skip


class Source(Value, frozen=True):
    """Where a file of the bundle lies: a path here, or the bytes themselves."""

    file: BundleFile
    path: Path | None = None
    content: bytes = b""


class Member(Value, frozen=True):
    """A file inside of a bundle: its content begins at `offset`."""

    path: str
    size: int
    offset: int


def packed_bytes(manifest: Manifest, sources: Sequence[Source]) -> int:
    """How large the bundle will be, before anything is written."""
    sizes = [(manifests.NAME, len(manifests.encode(manifest)))]
    sizes += [(source.file.path, source.file.size) for source in sources]
    total = sum(len(_header(name, size)) + _padded(size) for name, size in sizes)
    return total + 2 * BLOCK


def pack(
    manifest: Manifest,
    sources: Sequence[Source],
    out: BinaryIO,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> str:
    """Write the bundle; its sha256. The same files make the same bundle, byte for byte.

    TransferError where a file is not what the manifest says: it was changed meanwhile.
    """
    digest = hashlib.sha256()

    def write(block: bytes) -> None:
        digest.update(block)
        out.write(block)

    content = manifests.encode(manifest)
    write(_header(manifests.NAME, len(content)) + content + _padding(len(content)))
    for source in sources:
        write(_header(source.file.path, source.file.size))
        found, size = hashlib.sha256(), 0
        with source.path.open("rb") if source.path else io.BytesIO(source.content) as file:
            while size < source.file.size and (
                block := file.read(min(CHUNK_BYTES, source.file.size - size))
            ):
                found.update(block)
                size += len(block)
                write(block)
                on_bytes(len(block))
            more = file.read(1)
        if more or size != source.file.size or found.hexdigest() != source.file.sha256:
            raise TransferError(
                f"{source.file.path} was changed while it was packed",
                why="a bundle holds what was checked, or nothing",
                hint="labctl submit   # once nothing writes there any more",
            )
        write(_padding(size))
    write(bytes(2 * BLOCK))
    return digest.hexdigest()


def members(file: BinaryIO) -> Iterator[Member]:
    """The files of a bundle in order; TransferError at what is no plain file with a plain name.

    `file` is read from its beginning and may be moved between two members.
    """
    file.seek(0, os.SEEK_END)
    end, at = file.tell(), 0
    named: dict[str, str] = {}
    while True:
        file.seek(at)
        block = file.read(BLOCK)
        if len(block) < BLOCK:
            raise refused("it breaks off")
        if block == bytes(BLOCK):
            _only_zeros(file)
            return
        kind, name, size = _read_header(block)
        at += BLOCK
        if kind == b"x":
            if size > MOST_HEADER_BYTES:
                raise refused("a header in it is too long")
            named = _extended(file.read(size))
        else:
            name, size = named.get("path", name), int(named.get("size", size))
            named = {}
            if at + size > end:
                raise refused(f"{name!a} breaks off")
            yield Member(path=name, size=size, offset=at)
        at += _padded(size)


def inspect(
    file: BinaryIO, on_bytes: Callable[[int], None] = lambda count: None
) -> tuple[Manifest, tuple[Member, ...]]:
    """The manifest of a bundle and its files, each as the manifest says; TransferError if not."""
    inside = members(file)
    first = next(inside, None)
    if first is None or first.path != manifests.NAME:
        raise refused(f"it does not begin with {manifests.NAME}")
    if first.size > manifests.MOST_BYTES:
        raise refused(f"its {manifests.NAME} is too large")
    file.seek(first.offset)
    found = manifests.decode(file.read(first.size))
    wanted = iter(found.files)
    kept = []
    for member in inside:
        promised = next(wanted, None)
        if promised is None or (promised.path, promised.size) != (member.path, member.size):
            raise refused(f"{member.path!a} is not what {manifests.NAME} names there")
        manifests.check_path(member.path)
        if _hash(file, member, on_bytes) != promised.sha256:
            raise refused(f"{member.path!a} was changed: its SHA-256 is not the manifest's")
        kept.append(member)
    if (lacking := next(wanted, None)) is not None:
        raise refused(f"{lacking.path!a} is named by {manifests.NAME} and not there")
    return found, tuple(kept)


class Span(io.RawIOBase):
    """One file inside of a bundle, as a file."""

    def __init__(self, file: BinaryIO, member: Member) -> None:
        self.file = file
        self.member = member
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.member.size}[whence]
        self.at = max(0, base + offset)
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.member.size - self.at))
        self.file.seek(self.member.offset + self.at)
        block = self.file.read(count)
        buffer[: len(block)] = block
        self.at += len(block)
        return len(block)


def opened(file: BinaryIO, member: Member) -> BinaryIO:
    """The content of one member."""
    return cast(BinaryIO, io.BufferedReader(Span(file, member)))


def find_hazards(file: BinaryIO, inside: Iterable[Member]) -> list[str]:
    """The files that must be neither loaded nor unpacked, each with the reason."""
    verdicts = ((one.path, judge_file(one.path, opened(file, one), one.size)) for one in inside)
    return [f"{path}: {verdict.hazard}" for path, verdict in verdicts if verdict.hazard]


def unpack(file: BinaryIO, directory: Path) -> Manifest:
    """Write the files of a bundle below `directory`, which must not be there yet.

    Only what `inspect` accepts; nothing is executable and nothing leads anywhere.
    """
    found, inside = inspect(file)
    directory.mkdir(parents=True)
    for member in inside:
        target = directory / member.path
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(target, flags, 0o644), "wb") as out:
            for block in _blocks(file, member):
                out.write(block)
    (directory / manifests.NAME).write_bytes(manifests.encode(found))
    return found


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _padding(size: int) -> bytes:
    return bytes(_padded(size) - size)


def _read_header(block: bytes) -> tuple[bytes, str, int]:
    """(kind, name, size) of one block."""
    try:
        total = int(block[148:156].rstrip(b"\0 ").decode("ascii"), 8)
        size = int(block[124:136].rstrip(b"\0 ").decode("ascii"), 8)
        name = block[:100].split(b"\0")[0].decode()
        prefix = block[345:500].split(b"\0")[0].decode()
    except ValueError:
        raise refused("it is no plain tar: a header cannot be read") from None
    if block[257:263] != b"ustar\0":
        raise refused("it is no plain tar (ustar or pax)")
    if total != sum(block[:148]) + sum(block[156:]) + 8 * 32 or size < 0:
        raise refused("it is damaged: a header's sum is wrong")
    kind = block[156:157]
    full = f"{prefix}/{name}" if prefix else name
    if kind not in (b"0", b"x"):
        raise refused(f"{full!a} is {TYPES.get(kind, 'no plain file')}; only plain files are taken")
    return kind, full, size


def _extended(data: bytes) -> dict[str, str]:
    """What a pax header says; only a name or a size that do not fit into the plain one."""
    found: dict[str, str] = {}
    while data:
        try:
            length, _, rest = data.partition(b" ")
            record = rest[: int(length) - len(length) - 2]
            key, _, value = record.partition(b"=")
            if rest[len(record) : len(record) + 1] != b"\n":
                raise ValueError
            found[key.decode("ascii")] = value.decode()
            data = data[int(length) :]
        except ValueError:
            raise refused("a header in it cannot be read") from None
    if not set(found) <= {"path", "size"} or not found.get("size", "0").isdecimal():
        raise refused(f"a header in it sets {', '.join(sorted(found))!a}")
    return found


def _only_zeros(file: BinaryIO) -> None:
    while block := file.read(CHUNK_BYTES):
        if block.strip(b"\0"):
            raise refused("something stands after its end")


def _hash(file: BinaryIO, member: Member, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    for block in _blocks(file, member):
        digest.update(block)
        on_bytes(len(block))
    return digest.hexdigest()


def _blocks(file: BinaryIO, member: Member) -> Iterator[bytes]:
    file.seek(member.offset)
    left = member.size
    while left and (block := file.read(min(CHUNK_BYTES, left))):
        left -= len(block)
        yield block
