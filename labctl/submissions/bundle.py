"""The bundle: a plain tar of regular files, manifest first, never compressed.

So its size is that of its contents, and no file has to be unpacked to be inspected. wire/tar.py
reads its headers.
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
from labctl.submissions.manifest import BundleFile, BundleManifest, make_refusal_error
from labctl.wire.judge import judge_file
from labctl.wire.tar import BLOCK_BYTES, TarError, padding_bytes, read_tar_members

CHUNK_BYTES = 1024 * 1024
TYPES = {
    b"1": "a hard link", b"2": "a link", b"3": "a device", b"4": "a device", b"5": "a directory",
    b"6": "a pipe", b"7": "a special file", b"S": "a sparse file", b"g": "a global header",
}  # fmt: skip


class BundleSource(Value, frozen=True):
    """The content of a file for the bundle: a local path, or the bytes themselves."""

    file: BundleFile
    path: Path | None = None
    content: bytes = b""


class BundleMember(Value, frozen=True):
    """A file in a bundle; its content starts at byte `offset`."""

    path: str
    size: int
    offset: int


def packed_bytes(manifest: BundleManifest, sources: Sequence[BundleSource]) -> int:
    """Return the size of the bundle before anything is written."""
    sizes = [(manifests.NAME, len(manifests.encode(manifest)))]
    sizes += [(source.file.path, source.file.size) for source in sources]
    total = sum(len(_header(name, size)) + size + padding_bytes(size) for name, size in sizes)
    return total + 2 * BLOCK_BYTES


def write_bundle(
    manifest: BundleManifest,
    sources: Sequence[BundleSource],
    out: BinaryIO,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> str:
    """Write the bundle and return its SHA-256. The same files make the same bundle.

    TransferError if a file no longer matches the manifest.
    """
    digest = hashlib.sha256()

    def write(block: bytes) -> None:
        digest.update(block)
        out.write(block)

    content = manifests.encode(manifest)
    write(_header(manifests.NAME, len(content)) + content + _padding(len(content)))
    for source in sources:
        write(_header(source.file.path, source.file.size))
        file_digest, size = hashlib.sha256(), 0
        with source.path.open("rb") if source.path else io.BytesIO(source.content) as file:
            while size < source.file.size and (
                block := file.read(min(CHUNK_BYTES, source.file.size - size))
            ):
                file_digest.update(block)
                size += len(block)
                write(block)
                on_bytes(len(block))
            more = file.read(1)
        if more or size != source.file.size or file_digest.hexdigest() != source.file.sha256:
            raise TransferError(
                f"{source.file.path} changed while it was packed",
                why="a bundle must hold exactly the files that were checked",
                hint="labctl submit   # once nothing writes to it any more",
            )
        write(_padding(size))
    write(bytes(2 * BLOCK_BYTES))
    return digest.hexdigest()


def read_members(file: BinaryIO) -> Iterator[BundleMember]:
    """Yield the files of a bundle in order; TransferError for anything but a regular file.

    `file` is read from its start; the caller may seek in it between two members.
    """
    file.seek(0, os.SEEK_END)
    end, at = file.tell(), 0

    def take(size: int) -> bytes:
        nonlocal at
        file.seek(at)
        at += size
        if at > end:
            raise make_refusal_error("it is truncated")
        return file.read(size)

    try:
        for name, size, kind, _ in read_tar_members(take, plain=True):
            if kind != tarfile.REGTYPE:
                described = TYPES.get(kind, "a special file")
                raise make_refusal_error(
                    f"{name!a} is {described}; only regular files are accepted"
                )
            if at + size > end:
                raise make_refusal_error(f"{name!a} is truncated")
            yield BundleMember(path=name, size=size, offset=at)
            at += size + padding_bytes(size)
    except TarError as error:
        raise make_refusal_error(str(error)) from None
    _require_zeros(file)


def inspect(
    file: BinaryIO, on_bytes: Callable[[int], None] = lambda count: None
) -> tuple[BundleManifest, tuple[BundleMember, ...]]:
    """Return a bundle's manifest and files; TransferError if they do not match each other."""
    remaining = read_members(file)
    first = next(remaining, None)
    if first is None or first.path != manifests.NAME:
        raise make_refusal_error(f"it does not start with {manifests.NAME}")
    if first.size > manifests.MOST_BYTES:
        raise make_refusal_error(f"its {manifests.NAME} is too large")
    file.seek(first.offset)
    manifest = manifests.decode(file.read(first.size))
    listed = iter(manifest.files)
    checked = []
    for member in remaining:
        entry = next(listed, None)
        if entry is None or (entry.path, entry.size) != (member.path, member.size):
            raise make_refusal_error(f"{member.path!a} does not match {manifests.NAME}")
        manifests.check_path(member.path)
        if _hash_member(file, member, on_bytes) != entry.sha256:
            raise make_refusal_error(
                f"{member.path!a} was changed: its SHA-256 differs from the manifest's"
            )
        checked.append(member)
    if (missing := next(listed, None)) is not None:
        raise make_refusal_error(f"{missing.path!a} is named in {manifests.NAME}, but missing")
    return manifest, tuple(checked)


class MemberFile(io.RawIOBase):
    """One file in a bundle, as a file object."""

    def __init__(self, file: BinaryIO, member: BundleMember) -> None:
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

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.member.size - self.at))
        self.file.seek(self.member.offset + self.at)
        block = self.file.read(count)
        buffer[: len(block)] = block
        self.at += len(block)
        return len(block)


def open_member(file: BinaryIO, member: BundleMember) -> BinaryIO:
    """Open the content of one member."""
    return cast(BinaryIO, io.BufferedReader(MemberFile(file, member)))


def find_hazards(file: BinaryIO, inside: Iterable[BundleMember]) -> list[str]:
    """List the files that must not be loaded or unpacked, each with the reason."""
    verdicts = (
        (member.path, judge_file(member.path, open_member(file, member), member.size))
        for member in inside
    )
    return [f"{path}: {verdict.hazard}" for path, verdict in verdicts if verdict.hazard]


def unpack(file: BinaryIO, directory: Path) -> BundleManifest:
    """Write the files of a bundle below `directory`, which must not exist yet.

    Only what `inspect` accepts; no file is executable, none is a link.
    """
    manifest, inside = inspect(file)
    directory.mkdir(parents=True)
    for member in inside:
        target = directory / member.path
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(target, flags, 0o644), "wb") as out:
            for block in _read_blocks(file, member):
                out.write(block)
    (directory / manifests.NAME).write_bytes(manifests.encode(manifest))
    return manifest


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _padding(size: int) -> bytes:
    return bytes(padding_bytes(size))


def _require_zeros(file: BinaryIO) -> None:
    while block := file.read(CHUNK_BYTES):
        if block.strip(b"\0"):
            raise make_refusal_error("there is data after its end")


def _hash_member(file: BinaryIO, member: BundleMember, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    for block in _read_blocks(file, member):
        digest.update(block)
        on_bytes(len(block))
    return digest.hexdigest()


def _read_blocks(file: BinaryIO, member: BundleMember) -> Iterator[bytes]:
    file.seek(member.offset)
    remaining = member.size
    while remaining and (block := file.read(min(CHUNK_BYTES, remaining))):
        remaining -= len(block)
        yield block
