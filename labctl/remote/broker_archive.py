"""An image that an account sends, as it passes: every name in it made the account's own.

Read by a few lines of our own: tarfile takes headers of any length into memory, keeps a record of
every file, and unpacks a bomb at one stroke. What goes on is made anew of what was understood, so
that the engine reads the same. Nothing may take manifest.json's place once it has passed.
"""

from __future__ import annotations

import json
import tarfile
import zlib
from itertools import chain
from typing import Iterator, NamedTuple

from .broker_http import CHUNK, Refusal
from .broker_images import own_reference
from .broker_rules import Account

BLOCK = tarfile.BLOCKSIZE
MANIFEST = "manifest.json"
LEFT_OUT = ("repositories", "index.json", "oci-layout")
LAYER = "/layer.tar"
MOST_MANIFEST = 4 * 1024 * 1024
MOST_HEADER = 64 * 1024
MOST_MEMBERS = 20_000
GZIP, BZIP2, XZ = b"\x1f\x8b", b"BZh", b"\xfd7zXZ"
SKIPPED = tuple(bytes([0x50 + number]) + b"*M\x18" for number in range(16))
"""Frames of zstd (RFC 8878, 3.1.2) that hold nothing, and may stand before one that does."""
CLOSED = (BZIP2, XZ, b"(\xb5/\xfd", *SKIPPED)
"""Layers packed so are refused: what they come to cannot be counted as they pass."""
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)
EXTENDED = (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class Member(NamedTuple):
    name: str
    size: int
    kind: bytes
    link: str


def retagged(account: Account, blocks: Iterator[bytes], most: int) -> Iterator[bytes]:
    """A `docker save` with every name in it the account's own.

    Refusal for what is none, and for what comes to more than `most` bytes once it is unpacked,
    whether the archive is packed or a layer in it.
    """
    left = Allowance(most)
    source = Source(left.counted(unpacked(blocks)))
    seen = False
    for number, member in enumerate(_members(source)):
        if number >= MOST_MEMBERS:
            raise _refused(f"it holds more than {MOST_MEMBERS} files")
        if member.name in LEFT_OUT:
            source.skip(member.size + -member.size % BLOCK)
        elif member.name == MANIFEST:
            if seen or member.kind not in PLAIN or member.size > MOST_MANIFEST:
                raise _refused(f"its {MANIFEST} is not one file")
            text, seen = _manifest(account, b"".join(source.take(member.size))), True
            source.skip(-member.size % BLOCK)
            yield _header(member._replace(size=len(text))) + text + bytes(-len(text) % BLOCK)
        else:
            yield _header(member)
            yield from left.weighed(source.take(member.size))
            source.skip(-member.size % BLOCK)
            yield bytes(-member.size % BLOCK)
    if not seen:
        raise _refused(f"it has no {MANIFEST}")
    source.drain()
    yield bytes(2 * BLOCK)


class Allowance:
    """What an archive may still come to."""

    def __init__(self, most: int) -> None:
        self.left = most

    def counted(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self._less(len(block))
            yield block

    def weighed(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """The same bytes; where they are a packed layer, what it unpacks to is counted too."""
        head = _beginning(blocks)
        if head.startswith(CLOSED):
            raise _refused("a layer of it is packed in a way that cannot be looked into")
        packed = _Gzip() if head.startswith(GZIP) else None
        for block in chain((head,), blocks):
            for piece in packed.pieces(block) if packed else ():
                self._less(len(piece))
            yield block

    def _less(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise Refusal(413, "that image is more than the shared server takes")


class Source:
    """Blocks, to be read by the byte."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._block = memoryview(b"")

    def take(self, size: int) -> Iterator[bytes]:
        """The next `size` bytes, in pieces; Refusal where there are fewer."""
        while size > 0:
            if not self._block:
                found = next(self._blocks, b"")
                if not found:
                    raise _refused("it breaks off")
                self._block = memoryview(found)
            piece, self._block = self._block[:size], self._block[size:]
            size -= len(piece)
            yield bytes(piece)

    def drain(self) -> None:
        """Read what stands behind the end: a client that is hung up on hears no answer."""
        self._block = memoryview(b"")
        for _ in self._blocks:
            continue

    def skip(self, size: int) -> None:
        for _ in self.take(size):
            continue


def unpacked(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The archive itself, of one that may be packed, never more than CHUNK at a time."""
    first = _beginning(blocks)
    if first.startswith((BZIP2, XZ)):
        raise _refused("it is packed with another program than gzip")
    if not first.startswith(GZIP):
        yield first
        yield from blocks
        return
    packed = _Gzip()
    for block in chain((first,), blocks):
        yield from packed.pieces(block)


def _beginning(blocks: Iterator[bytes]) -> bytes:
    """Enough of it to know how it is packed, however small the pieces are."""
    first = b""
    while len(first) < len(XZ) and (block := next(blocks, b"")):
        first += block
    return first


class _Gzip:
    """One gzip stream after another, as the engine reads them; anything else behind is refused."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(31)

    def pieces(self, block: bytes) -> Iterator[bytes]:
        try:
            while block:
                if self._stream.eof:
                    self._stream = zlib.decompressobj(31)
                yield self._stream.decompress(block, CHUNK)
                block = self._stream.unconsumed_tail or self._stream.unused_data
        except zlib.error:
            raise _refused("what is packed in it cannot be unpacked") from None


def _members(source: Source) -> Iterator[Member]:
    """Each file's head, the source at its content; whoever asks for the next has read it all."""
    said: dict[str, str] = {}
    while True:
        block = b"".join(source.take(BLOCK))
        if block == bytes(BLOCK):
            return
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.HeaderError, ValueError):
            raise _refused("it is no archive of `docker save`") from None
        if info.type in EXTENDED:
            if info.size > MOST_HEADER or info.size < 0:
                raise _refused("a header in it is too long")
            text = b"".join(source.take(info.size))
            source.skip(-info.size % BLOCK)
            said.update(_extended(info.type, text))
            continue
        size = int(said.get("size", info.size))
        made = Member(
            _plain(said.get("path", info.name)),
            size,
            info.type,
            said.get("linkpath", info.linkname),
        )
        said = {}
        yield _checked(made)


def _checked(member: Member) -> Member:
    """Files and directories, and the links with which `docker save` names one layer twice."""
    if member.kind in PLAIN and member.size >= 0 and member.name:
        return member
    if member.kind == tarfile.DIRTYPE:
        return member._replace(size=0)
    layers = f"/{member.name}".endswith(LAYER) and member.link.endswith(LAYER)
    if member.kind == tarfile.SYMTYPE and layers:
        return member._replace(size=0)
    raise _refused(f"{member.name[:100]!a} in it is no plain file")


def _plain(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise _refused(f"{name[:100]!a} in it is no plain name")
    return "/".join(parts)


def _extended(kind: bytes, text: bytes) -> dict[str, str]:
    """What a header before a file's own says of its name, its link and its size."""
    try:
        if kind == tarfile.GNUTYPE_LONGNAME:
            return {"path": text.rstrip(b"\0").decode()}
        if kind == tarfile.GNUTYPE_LONGLINK:
            return {"linkpath": text.rstrip(b"\0").decode()}
        found = {}
        while text:
            length, _, _ = text.partition(b" ")
            end = int(length)
            key, equals, value = text[len(length) + 1 : end - 1].partition(b"=")
            if end <= len(length) + 1 or text[end - 1 : end] != b"\n" or not equals:
                raise ValueError
            if key in (b"path", b"linkpath", b"size"):
                found[key.decode()] = value.decode()
            text = text[end:]
        int(found.get("size", "0"))
    except ValueError:
        raise _refused("a header in it cannot be read") from None
    return found


def _header(member: Member) -> bytes:
    info = tarfile.TarInfo(member.name or ".")
    info.size, info.type, info.linkname = member.size, member.kind, member.link
    info.mode = 0o755 if member.kind == tarfile.DIRTYPE else 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _manifest(account: Account, text: bytes) -> bytes:
    try:
        listed = json.loads(text)
        for one in listed:
            one["RepoTags"] = [own_reference(account, tag) for tag in one.get("RepoTags") or []]
            if not one["RepoTags"]:
                raise _refused("an image in it has no name")
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise _refused(f"its {MANIFEST} cannot be read") from None
    return json.dumps(listed).encode()


def _refused(why: str) -> Refusal:
    return Refusal(400, f"this is no `docker save` that the shared server takes: {why}")
