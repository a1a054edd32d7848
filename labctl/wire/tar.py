"""The headers of a tar archive from elsewhere, and its files as a stream.

`tarfile` loads a header of any length into memory, keeps a record of every file, and obeys headers
about links and sparse files. This reads headers of a limited length, one file at a time.
"""

from __future__ import annotations

import re
import tarfile
from typing import BinaryIO, Callable, Iterator, NamedTuple

BLOCK_BYTES = tarfile.BLOCKSIZE
MOST_HEADER_BYTES = 64 * 1024
_LONG_NAMES = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
_SETTINGS = ("path", "linkpath", "size")
_PLAIN_SETTINGS = ("path", "size")
_POSIX_MAGIC = b"ustar\0"


class TarError(Exception):
    """This is not a tar archive, or a header in it is not acceptable; the text says why."""


class TarMember(NamedTuple):
    """A file of an archive. `kind` is one of tarfile's types, `link` the target of a link."""

    name: str
    size: int
    kind: bytes
    link: str


def padding_bytes(size: int) -> int:
    """Return how many bytes fill the last block of a content of `size` bytes."""
    return -size % BLOCK_BYTES


def read_tar_members(take: Callable[[int], bytes], *, plain: bool = False) -> Iterator[TarMember]:
    """Yield the header of each file, up to the end of the archive. Raises TarError.

    `take` returns the next bytes, exactly as many as its argument says. Before it asks for the next
    file, the caller moves past the content of this one and its padding. With `plain`, the archive
    must be ustar or pax, without GNU's extensions, and an extended header may only set a name and
    a size, once for a file. Names are not checked.
    """
    settings: dict[str, str] = {}
    while True:
        block = take(BLOCK_BYTES)
        if block == bytes(BLOCK_BYTES):
            return
        header = _parse_header(block, plain)
        if header.type == tarfile.XHDTYPE or (header.type in _LONG_NAMES and not plain):
            if settings and plain:
                raise TarError("two headers in it are for the same file")
            settings.update(_read_extended(header, take, plain))
            continue
        size = int(settings.get("size", header.size))
        name, link = settings.get("path", header.name), settings.get("linkpath", header.linkname)
        settings = {}
        yield TarMember(name, size, header.type, link)


class TarStream:
    """An archive that is read once, from its start: iterate over its files, and `read` each.

    What the caller leaves unread of a file is skipped. Raises TarError, also where the stream ends
    too early.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._left = 0  # bytes of the present file that are still unread

    def __iter__(self) -> Iterator[TarMember]:
        for member in read_tar_members(self._take):
            if member.size < 0:
                raise TarError("a file in it has a negative size")
            self._left = member.size
            yield member
            while self.read():
                pass
            self._take(padding_bytes(member.size))

    def read(self, size: int = MOST_HEADER_BYTES) -> bytes:
        """Return up to `size` bytes of the present file; none at its end."""
        block = self._take(min(size, self._left))
        self._left -= len(block)
        return block

    def _take(self, size: int) -> bytes:
        block = b""
        while len(block) < size:
            part = self._stream.read(size - len(block))
            if not part:
                raise TarError("it is truncated")
            block += part
        return block


def _parse_header(block: bytes, plain: bool) -> tarfile.TarInfo:
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, ValueError):
        raise TarError("it is not a plain tar archive, or damaged: a header is invalid") from None
    if plain:
        if block[257:263] != _POSIX_MAGIC:
            raise TarError("it is not a plain tar (ustar or pax)")
        numbers = _parse_octal(block[124:136]), _parse_octal(block[148:156])
        if numbers != (header.size, sum(block[:148]) + sum(block[156:]) + 8 * 32):
            raise TarError("a header in it has a size or checksum that readers read differently")
    return header


def _parse_octal(field: bytes) -> int | None:
    digits = field.rstrip(b"\0 ")
    return int(digits, 8) if re.fullmatch(b"[0-7]+", digits) else None


def _read_extended(
    header: tarfile.TarInfo, take: Callable[[int], bytes], plain: bool
) -> dict[str, str]:
    """Read the settings that precede a file's own header."""
    if not 0 <= header.size <= MOST_HEADER_BYTES:
        raise TarError("a header in it is too long")
    text = take(header.size)
    take(padding_bytes(header.size))
    try:
        if header.type in _LONG_NAMES:
            return {_LONG_NAMES[header.type]: text.rstrip(b"\0").decode()}
        settings = _parse_pax(text, plain)
    except ValueError:
        raise TarError("a header in it cannot be read") from None
    if not re.fullmatch("[0-9]{1,19}", settings.get("size", "0")):
        raise TarError("a header in it sets an invalid size")
    return settings


def _parse_pax(text: bytes, plain: bool) -> dict[str, str]:
    """Parse the records of a pax header, each "LENGTH KEY=VALUE". ValueError if one is damaged."""
    settings: dict[str, str] = {}
    while text:
        length = text.partition(b" ")[0]
        end = int(length)
        key, equals, value = text[len(length) + 1 : end - 1].partition(b"=")
        if end <= len(length) + 1 or text[end - 1 : end] != b"\n" or not equals:
            raise ValueError
        name = key.decode("ascii", "replace")
        if plain and (name not in _PLAIN_SETTINGS or name in settings):
            raise TarError(f"a header in it sets {name!a}, or sets it twice")
        if name in _SETTINGS:
            settings[name] = value.decode()
        text = text[end:]
    return settings
