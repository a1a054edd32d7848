"""Uploaded images: checks an archive while it streams, and renames its images to the account's own.

wire/tar.py reads the headers, since tarfile would keep a record of every file, and unpack a bomb at
once. The archive is rebuilt from what was parsed, so that the engine reads the same. Layers pass
unchanged; manifest.json and the configurations that it names follow at the end, rebuilt. All other
documents are dropped.
"""

from __future__ import annotations

import tarfile
import zlib
from itertools import chain
from typing import Callable, Iterator

from ...wire.containment import is_contained
from ...wire.tar import BLOCK_BYTES, TarError, TarMember, padding_bytes, read_tar_members
from .account_images import build_own_reference
from .http import CHUNK, HttpRefusal
from .image_documents import ManifestEntry, encode_manifest, parse_manifest, rebuild_config
from .rules import BrokerAccount

MANIFEST = "manifest.json"
LEFT_OUT = ("repositories", "index.json", "oci-layout")
LAYER = "/layer.tar"
MOST_DOCUMENT = 1024 * 1024
MOST_DOCUMENTS = 8 * 1024 * 1024  # bytes of documents of one archive in memory
MOST_MEMBERS = 20_000
MOST_NAME = 255  # characters; all names are kept in memory, and `docker save` needs 80
GZIP, BZIP2, XZ = b"\x1f\x8b", b"BZh", b"\xfd7zXZ"
# Skippable frames of zstd (RFC 8878, 3.1.2), which may precede one with data.
SKIPPED = tuple(bytes([0x50 + number]) + b"*M\x18" for number in range(16))
# Compressions of layers that are refused: their unpacked size cannot be counted while streaming.
CLOSED = (BZIP2, XZ, b"(\xb5/\xfd", *SKIPPED)
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)
Claim = Callable[[int], None]


def claim_nothing(size: int) -> None:
    """Do nothing, for an archive that needs no room."""


def retag(
    account: BrokerAccount, blocks: Iterator[bytes], most: int, claim: Claim = claim_nothing
) -> Iterator[bytes]:
    """Yield the `docker save` archive with every image renamed to the account's own.

    Refusal if it is no such archive, or if it exceeds `most` bytes unpacked, layers included.
    `claim` is called with the number of those bytes as they arrive.
    """
    allowance = ByteBudget(most, claim)
    source = BlockReader(allowance.count(decompress(blocks)))
    contents = ArchiveContents()
    for number, member in enumerate(_read_members(source)):
        if number >= MOST_MEMBERS:
            raise _refusal(f"it contains more than {MOST_MEMBERS} files")
        contents.admit(member)
        if member.name in LEFT_OUT:
            source.skip(member.size + padding_bytes(member.size))
            continue
        content = source.take(member.size)
        beginning = _read_beginning(content)
        if contents.is_document(member, beginning):
            contents.hold(member.name, beginning + b"".join(content))
            source.skip(padding_bytes(member.size))
            continue
        yield _build_header(member)
        yield from allowance.count_layer(beginning, content)
        source.skip(padding_bytes(member.size))
        yield bytes(padding_bytes(member.size))
    yield from contents.rebuild(account)
    source.drain()
    yield bytes(2 * BLOCK_BYTES)


class ArchiveContents:
    """The names in an archive, and the documents among its files."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._links: set[str] = set()
        self._documents: dict[str, bytes] = {}
        self._held_bytes = 0

    def admit(self, member: TarMember) -> None:
        """Record a member. Refusal for a repeated name, or one below a link.

        The engine would use the later of two files.
        """
        if member.name == MANIFEST and (member.kind not in PLAIN or member.size > MOST_DOCUMENT):
            raise _refusal(f"its {MANIFEST} is not a regular file of at most 1 MiB")
        if self._links & _list_parent_names(member.name):
            raise _refusal(f"{member.name[:100]!a} in it is behind a link")
        if member.kind == tarfile.DIRTYPE:
            return
        if member.kind == tarfile.SYMTYPE:
            self._links.add(member.name)
        if member.name in self._names:
            raise _refusal(f"{member.name[:100]!a} is in it twice")
        self._names.add(member.name)

    def is_document(self, member: TarMember, beginning: bytes) -> bool:
        """Return whether to keep this file back as a possible configuration."""
        is_small = member.kind in PLAIN and member.size <= MOST_DOCUMENT
        return member.name == MANIFEST or (is_small and beginning[:1] == b"{")

    def hold(self, name: str, text: bytes) -> None:
        self._held_bytes += len(text)
        if self._held_bytes > MOST_DOCUMENTS:
            raise _refusal(f"its documents are more than {MOST_DOCUMENTS >> 20} MiB")
        self._documents[name] = text

    def rebuild(self, account: BrokerAccount) -> Iterator[bytes]:
        """Yield manifest.json and the configurations that it names, rebuilt."""
        text = self._documents.pop(MANIFEST, None)
        if text is None:
            raise _refusal(f"it has no {MANIFEST}")
        try:
            entries = [self._own_entry(account, entry) for entry in parse_manifest(text)]
            manifest = encode_manifest(entries)
        except ValueError as error:
            raise _refusal(f"its {MANIFEST} cannot be read: {error}") from None
        for name in dict.fromkeys(entry.config for entry in entries):
            yield from _build_member(name, self._rebuild_config(name))
        for name in dict.fromkeys(name for entry in entries for name in entry.layers):
            if name in self._documents:
                yield from _build_member(name, self._documents[name])
        yield from _build_member(MANIFEST, manifest)

    def _own_entry(self, account: BrokerAccount, entry: ManifestEntry) -> ManifestEntry:
        tags = [build_own_reference(account, tag) for tag in entry.tags]
        if not tags:
            raise _refusal("an image in it has no name")
        config = _clean_name(entry.config)
        layers = [_clean_name(layer) for layer in entry.layers]
        missing = [name for name in layers if name not in self._names]
        if config not in self._documents:
            missing.append(config)
        if missing:
            raise _refusal(f"its {MANIFEST} names {missing[0][:100]!a}, which is not in it")
        if config in layers:
            raise _refusal(f"{config[:100]!a} is both a configuration and a layer")
        return ManifestEntry(config, tags, layers)

    def _rebuild_config(self, name: str) -> bytes:
        try:
            return rebuild_config(self._documents[name])
        except ValueError as error:
            raise _refusal(f"{name[:100]!a} cannot be read: {error}") from None


class ByteBudget:
    """The bytes that an archive may still use."""

    def __init__(self, most: int, claim: Claim) -> None:
        self.left = most
        self._claim = claim

    def count(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self._deduct(len(block))
            yield block

    def count_layer(self, beginning: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the same bytes; of a compressed layer, count the unpacked bytes too."""
        if beginning.startswith(CLOSED):
            raise _refusal("one of its layers uses a compression other than gzip")
        packed = _Gzip() if beginning.startswith(GZIP) else None
        for block in chain((beginning,), blocks):
            for piece in packed.decompress(block) if packed else ():
                self._deduct(len(piece))
            yield block

    def _deduct(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise HttpRefusal(413, "the image is larger than the shared server allows")
        self._claim(size)


class BlockReader:
    """A stream of blocks that is read by the byte."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._block = memoryview(b"")

    def take(self, size: int) -> Iterator[bytes]:
        """Yield the next `size` bytes in pieces. Refusal if there are fewer."""
        while size > 0:
            if not self._block:
                next_block = next(self._blocks, b"")
                if not next_block:
                    raise _refusal("it is truncated")
                self._block = memoryview(next_block)
            piece, self._block = self._block[:size], self._block[size:]
            size -= len(piece)
            yield bytes(piece)

    def drain(self) -> None:
        """Read to the end: a client that is cut off while it sends does not read the response."""
        self._block = memoryview(b"")
        for _ in self._blocks:
            continue

    def skip(self, size: int) -> None:
        for _ in self.take(size):
            continue


def decompress(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the archive, decompressed if necessary, never more than CHUNK bytes at a time."""
    first = _read_beginning(blocks)
    if first.startswith((BZIP2, XZ)):
        raise _refusal("it uses a compression other than gzip")
    if not first.startswith(GZIP):
        yield first
        yield from blocks
        return
    packed = _Gzip()
    for block in chain((first,), blocks):
        yield from packed.decompress(block)


def _read_beginning(blocks: Iterator[bytes]) -> bytes:
    """Return enough bytes to recognize the compression, however small the pieces are."""
    first = b""
    while len(first) < len(XZ) and (block := next(blocks, b"")):
        first += block
    return first


class _Gzip:
    """Concatenated gzip streams, as the engine reads them; other trailing bytes are refused."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(31)

    def decompress(self, block: bytes) -> Iterator[bytes]:
        try:
            while block:
                if self._stream.eof:
                    self._stream = zlib.decompressobj(31)
                yield self._stream.decompress(block, CHUNK)
                block = self._stream.unconsumed_tail or self._stream.unused_data
        except zlib.error:
            raise _refusal("its gzip data is damaged") from None


def _read_members(source: BlockReader) -> Iterator[TarMember]:
    """Yield each file's header, with the source at its content, which the caller reads fully."""
    try:
        for member in read_tar_members(lambda size: b"".join(source.take(size))):
            yield _check_member(member._replace(name=_clean_name(member.name)))
    except TarError as error:
        raise _refusal(str(error)) from None


def _check_member(member: TarMember) -> TarMember:
    """Allow files, directories, and the links by which `docker save` refers to a layer again."""
    if max(len(member.name), len(member.link)) > MOST_NAME or "\0" in member.link:
        raise _refusal(
            f"{member.name[:100]!a} in it has a name or a link that is too long or invalid"
        )
    if member.kind in PLAIN and member.size >= 0 and member.name:
        return member
    if member.kind == tarfile.DIRTYPE:
        return member._replace(size=0)
    links_layers = f"/{member.name}".endswith(LAYER) and member.link.endswith(LAYER)
    if member.kind == tarfile.SYMTYPE and links_layers:
        return member._replace(size=0)
    raise _refusal(f"{member.name[:100]!a} in it is not a regular file")


def _clean_name(name: str) -> str:
    cleaned = "/".join(part for part in name.split("/") if part not in ("", "."))
    if cleaned and not is_contained(cleaned):
        raise _refusal(f"{name[:100]!a} in it is not a valid name")
    return cleaned


def _list_parent_names(name: str) -> set[str]:
    return {name[:at] for at, character in enumerate(name) if character == "/"}


def _build_header(member: TarMember) -> bytes:
    info = tarfile.TarInfo(member.name or ".")
    info.size, info.type, info.linkname = member.size, member.kind, member.link
    info.mode = 0o755 if member.kind == tarfile.DIRTYPE else 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _build_member(name: str, content: bytes) -> Iterator[bytes]:
    yield _build_header(TarMember(name, len(content), tarfile.REGTYPE, ""))
    yield content + bytes(padding_bytes(len(content)))


def _refusal(why: str) -> HttpRefusal:
    return HttpRefusal(400, f"the shared server does not accept this image archive: {why}")
