"""An image that an account sends, as it passes: every name in it made the account's own.

Read by a few lines of our own: tarfile takes headers of any length into memory, keeps a record of
every file, and unpacks a bomb at one stroke. What goes on is made anew of what was understood, so
that the engine reads the same. Layers pass as they come; manifest.json and the configurations that
it names follow at the end, built anew. Of all other documents none goes on.
"""

from __future__ import annotations

import tarfile
import zlib
from itertools import chain
from typing import Callable, Iterator, NamedTuple

from .account_images import own_reference
from .http import CHUNK, Refusal
from .image_documents import Entry, encode_manifest, parse_manifest, rebuild_config
from .rules import Account

BLOCK = tarfile.BLOCKSIZE
MANIFEST = "manifest.json"
LEFT_OUT = ("repositories", "index.json", "oci-layout")
LAYER = "/layer.tar"
MOST_DOCUMENT = 1024 * 1024
MOST_DOCUMENTS = 8 * 1024 * 1024  # all that one archive may have held in memory
MOST_HEADER = 64 * 1024
MOST_MEMBERS = 20_000
MOST_NAME = 255  # characters; the names of all members are kept, and `docker save` needs 80
GZIP, BZIP2, XZ = b"\x1f\x8b", b"BZh", b"\xfd7zXZ"
# Frames of zstd (RFC 8878, 3.1.2) that hold nothing, and may stand before one that does.
SKIPPED = tuple(bytes([0x50 + number]) + b"*M\x18" for number in range(16))
# Layers packed so are refused: what they come to cannot be counted as they pass.
CLOSED = (BZIP2, XZ, b"(\xb5/\xfd", *SKIPPED)
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)
EXTENDED = (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
Claim = Callable[[int], None]


class Member(NamedTuple):
    name: str
    size: int
    kind: bytes
    link: str


def claim_nothing(size: int) -> None:
    """For an archive that nobody has to find room for."""


def retagged(
    account: Account, blocks: Iterator[bytes], most: int, claim: Claim = claim_nothing
) -> Iterator[bytes]:
    """A `docker save` with every name in it the account's own.

    Refusal for what is none, and for what comes to more than `most` bytes once it is unpacked,
    whether the archive is packed or a layer in it. `claim` is told of all of these as they come.
    """
    allowance = Allowance(most, claim)
    source = Source(allowance.counted(unpacked(blocks)))
    contents = Contents()
    for number, member in enumerate(_members(source)):
        if number >= MOST_MEMBERS:
            raise _refused(f"it holds more than {MOST_MEMBERS} files")
        contents.admit(member)
        if member.name in LEFT_OUT:
            source.skip(member.size + -member.size % BLOCK)
            continue
        content = source.take(member.size)
        beginning = _beginning(content)
        if contents.is_document(member, beginning):
            contents.hold(member.name, beginning + b"".join(content))
            source.skip(-member.size % BLOCK)
            continue
        yield _header(member)
        yield from allowance.weighed(beginning, content)
        source.skip(-member.size % BLOCK)
        yield bytes(-member.size % BLOCK)
    yield from contents.rebuild(account)
    source.drain()
    yield bytes(2 * BLOCK)


class Contents:
    """What is in an archive: the names of all, and the documents among it."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._links: set[str] = set()
        self._documents: dict[str, bytes] = {}
        self._held_bytes = 0

    def admit(self, member: Member) -> None:
        """Refusal for a second file of one name, or of one that a link gives it: the engine would
        take the later one."""
        if member.name == MANIFEST and (member.kind not in PLAIN or member.size > MOST_DOCUMENT):
            raise _refused(f"its {MANIFEST} is not one small file")
        if self._links & _parents(member.name):
            raise _refused(f"{member.name[:100]!a} in it lies behind a link")
        if member.kind == tarfile.DIRTYPE:
            return
        if member.kind == tarfile.SYMTYPE:
            self._links.add(member.name)
        if member.name in self._names:
            raise _refused(f"{member.name[:100]!a} is in it twice")
        self._names.add(member.name)

    def is_document(self, member: Member, beginning: bytes) -> bool:
        """Whether to hold this file back: nothing else may stand as a configuration."""
        small = member.kind in PLAIN and member.size <= MOST_DOCUMENT
        return member.name == MANIFEST or (small and beginning[:1] == b"{")

    def hold(self, name: str, text: bytes) -> None:
        self._held_bytes += len(text)
        if self._held_bytes > MOST_DOCUMENTS:
            raise _refused(f"its documents are more than {MOST_DOCUMENTS >> 20} MiB")
        self._documents[name] = text

    def rebuild(self, account: Account) -> Iterator[bytes]:
        """manifest.json and the configurations that it names, as the engine may read them."""
        text = self._documents.pop(MANIFEST, None)
        if text is None:
            raise _refused(f"it has no {MANIFEST}")
        try:
            entries = [self._own_entry(account, entry) for entry in parse_manifest(text)]
            manifest = encode_manifest(entries)
        except ValueError as error:
            raise _refused(f"its {MANIFEST} cannot be read: {error}") from None
        for name in dict.fromkeys(entry.config for entry in entries):
            yield from _pack(name, self._rebuild_config(name))
        for name in dict.fromkeys(name for entry in entries for name in entry.layers):
            if name in self._documents:
                yield from _pack(name, self._documents[name])
        yield from _pack(MANIFEST, manifest)

    def _own_entry(self, account: Account, entry: Entry) -> Entry:
        tags = [own_reference(account, tag) for tag in entry.tags]
        if not tags:
            raise _refused("an image in it has no name")
        config = _plain(entry.config)
        layers = [_plain(layer) for layer in entry.layers]
        missing = [name for name in layers if name not in self._names]
        if config not in self._documents:
            missing.append(config)
        if missing:
            raise _refused(f"its {MANIFEST} names {missing[0][:100]!a}, which is not in it")
        if config in layers:
            raise _refused(f"{config[:100]!a} is both a configuration and a layer")
        return Entry(config, tags, layers)

    def _rebuild_config(self, name: str) -> bytes:
        try:
            return rebuild_config(self._documents[name])
        except ValueError as error:
            raise _refused(f"{name[:100]!a} cannot be read: {error}") from None


class Allowance:
    """What an archive may still come to."""

    def __init__(self, most: int, claim: Claim) -> None:
        self.left = most
        self._claim = claim

    def counted(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self._less(len(block))
            yield block

    def weighed(self, beginning: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """The same bytes; where they are a packed layer, what it unpacks to is counted too."""
        if beginning.startswith(CLOSED):
            raise _refused("a layer of it is packed in a way that cannot be looked into")
        packed = _Gzip() if beginning.startswith(GZIP) else None
        for block in chain((beginning,), blocks):
            for piece in packed.pieces(block) if packed else ():
                self._less(len(piece))
            yield block

    def _less(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise Refusal(413, "that image is more than the shared server takes")
        self._claim(size)


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
    if max(len(member.name), len(member.link)) > MOST_NAME or "\0" in member.link:
        raise _refused(
            f"{member.name[:100]!a} in it has a name or a link that is too long or unclear"
        )
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


def _parents(name: str) -> set[str]:
    return {name[:at] for at, character in enumerate(name) if character == "/"}


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


def _pack(name: str, content: bytes) -> Iterator[bytes]:
    yield _header(Member(name, len(content), tarfile.REGTYPE, ""))
    yield content + bytes(-len(content) % BLOCK)


def _refused(why: str) -> Refusal:
    return Refusal(400, f"this is no `docker save` that the shared server takes: {why}")
