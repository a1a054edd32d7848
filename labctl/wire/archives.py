"""Check that every reader finds the same files in a zip archive.

Readers differ: Python's `zipfile` corrects offsets if something precedes the archive, PyTorch's
reader does not; one trusts the directory, another the headers before the data. So an archive can
show harmless files to one reader and a program to another. Only an archive that leaves no such
room is accepted: its files follow each other from the first byte to the directory, the directory
ends where the end record begins, and headers and directory agree on every file. Features that
honest writers use are accepted: data descriptors, zip64 fields, padding in extra fields, a comment
at the end.
"""

from __future__ import annotations

import struct
from typing import BinaryIO, NamedTuple

MAX_MEMBERS = 50_000
MAX_DIRECTORY_BYTES = 32 * 1024 * 1024
STORED, DEFLATED = 0, 8
STARTS = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_LOCAL_MARK, _CENTRAL_MARK, _END_MARK = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_END64_MARK, _LOCATOR_MARK, _DESCRIPTOR_MARK = b"PK\x06\x06", b"PK\x06\x07", b"PK\x07\x08"
_MAX_COMMENT = 0xFFFF
_MAX_OFFSET = 2**62
_IN_EXTRA_16, _IN_EXTRA_32 = 0xFFFF, 0xFFFFFFFF
_ZIP64, _UNICODE_PATH = 0x0001, 0x7075
_DESCRIPTOR_FLAG = 1 << 3
_UNREADABLE_FLAGS = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 13  # encrypted, or a patch of another file


class ArchiveError(Exception):
    """Readers of this archive may not agree on its content; the text says where."""


class ZipMember(NamedTuple):
    """A file of an archive, as its directory describes it. `name` is raw bytes."""

    name: bytes
    flags: int
    method: int
    crc: int
    packed_size: int
    size: int
    offset: int


class _End(NamedTuple):
    """Where the end record says that the directory is, and where the records after it begin."""

    members: int
    directory_size: int
    directory_offset: int
    begin: int


def is_archive(file: BinaryIO, size: int) -> bool:
    """Return whether any reader would accept this file as a zip archive, wherever it begins."""
    file.seek(0)
    if file.read(4) in STARTS:
        return True
    tail, start = _read_tail(file, size)
    at = tail.rfind(_END_MARK, 0, max(0, len(tail) - _END.size + 4))
    if at < 0:
        return False
    # Random bytes may look like an end record. A real one has its directory where it says, or just
    # before it.
    length, offset = _END.unpack_from(tail, at)[5:7]
    directory_offsets = (offset, start + at - length)
    located = tail[max(0, at - _LOCATOR.size) : at].startswith(_LOCATOR_MARK)
    return located or any(
        _read_at(file, directory_offset, 4) == _CENTRAL_MARK
        for directory_offset in directory_offsets
    )


def read_directory(file: BinaryIO, size: int) -> list[ZipMember]:
    """Return the members of an archive, in the order of their data.

    Raises ArchiveError if readers may disagree on its content, or if it is damaged.
    """
    end = _read_end(file, size)
    if end.members > MAX_MEMBERS:
        raise ArchiveError(f"it contains {end.members} files, more than {MAX_MEMBERS}")
    if end.directory_size > MAX_DIRECTORY_BYTES:
        raise ArchiveError(f"its directory is longer than {MAX_DIRECTORY_BYTES} bytes")
    if end.directory_offset + end.directory_size != end.begin:
        raise ArchiveError("its directory does not end where its end record begins")
    data = _read_at(file, end.directory_offset, end.directory_size)
    members = sorted(_parse_directory(data, end.members), key=lambda member: member.offset)
    _refuse_duplicates(members)
    position = 0
    for number, member in enumerate(members):
        if member.offset != position:
            raise ArchiveError(f"{member.name!r} in it does not begin where the file before ends")
        is_last = number + 1 == len(members)
        position = end.directory_offset if is_last else members[number + 1].offset
        _check_member(file, member, position)
    if position != end.directory_offset:
        raise ArchiveError("bytes before its directory belong to no file")
    return members


def _read_tail(file: BinaryIO, size: int) -> tuple[bytes, int]:
    """Return the bytes that may contain an end record, and their offset."""
    start = max(0, size - _END.size - _MAX_COMMENT - _LOCATOR.size)
    return _read_at(file, start, size - start), start


def _read_at(file: BinaryIO, offset: int, length: int) -> bytes:
    """Read bytes: fewer at the end of the file, none at an impossible offset."""
    if not 0 <= offset <= _MAX_OFFSET:
        return b""
    file.seek(offset)
    return file.read(length)


def _read_end(file: BinaryIO, size: int) -> _End:
    tail, start = _read_tail(file, size)
    at = tail.rfind(_END_MARK)
    if at < 0 or len(tail) - at < _END.size:
        raise ArchiveError("it has no end record, or more than one")
    disk, first_disk, here, count, length, offset, comment = _END.unpack_from(tail, at)[1:]
    if len(tail) - at - _END.size != comment:
        raise ArchiveError("its end record is not at its end")
    if disk or first_disk or here != count:
        raise ArchiveError("it is a part of an archive in several files")
    plain = _End(count, length, offset, start + at)
    if at >= _LOCATOR.size and tail.startswith(_LOCATOR_MARK, at - _LOCATOR.size):
        end64 = _read_end64(file, start + at - _LOCATOR.size)
        _check_end64(plain, end64)
        end = end64
    else:
        if count == _IN_EXTRA_16 or _IN_EXTRA_32 in (length, offset):
            raise ArchiveError("its end record refers to a second one, which is missing")
        end = plain
    # Another end record before the last one would mislead readers that stop early.
    between = _read_at(file, end.begin, start + at - end.begin)
    if _END_MARK in between:
        raise ArchiveError("it has more than one end record")
    return end


def _read_end64(file: BinaryIO, locator_at: int) -> _End:
    """Read the zip64 end record, which must be just before its locator."""
    disk, offset64, disks = _LOCATOR.unpack(_read_at(file, locator_at, _LOCATOR.size))[1:]
    data = _read_at(file, offset64, _END64.size)
    if (
        disk
        or disks > 1
        or offset64 + _END64.size != locator_at
        or not data.startswith(_END64_MARK)
    ):
        raise ArchiveError("its zip64 end record is not where it should be")
    _, length, _, _, own, first, here, count, directory, offset = _END64.unpack(data)
    if length != _END64.size - 12 or own or first or here != count:
        raise ArchiveError("its zip64 end record contradicts itself")
    return _End(count, directory, offset, offset64)


def _check_end64(plain: _End, long: _End) -> None:
    """Check that a reader without zip64 support finds the same, or nothing."""
    agrees = (
        plain.members in (long.members, _IN_EXTRA_16)
        and plain.directory_size in (long.directory_size, _IN_EXTRA_32)
        and plain.directory_offset in (long.directory_offset, _IN_EXTRA_32)
    )
    if not agrees:
        raise ArchiveError("its two end records contradict each other")


def _parse_directory(data: bytes, count: int) -> list[ZipMember]:
    members: list[ZipMember] = []
    at = 0
    while at < len(data):
        if len(members) == count:
            raise ArchiveError("its directory has more files than its end record counts")
        if len(data) - at < _CENTRAL.size or not data.startswith(_CENTRAL_MARK, at):
            raise ArchiveError("its directory cannot be read")
        fields = _CENTRAL.unpack_from(data, at)
        flags, method = fields[3:5]
        crc, packed, size, name_length, extra_length, comment_length, disk = fields[7:14]
        offset = fields[16]
        at += _CENTRAL.size
        name = data[at : at + name_length]
        extra = _parse_extra(name, data[at + name_length : at + name_length + extra_length])
        at += name_length + extra_length + comment_length
        if at > len(data):
            raise ArchiveError("its directory cannot be read")
        if disk or any(byte < 32 or byte == 127 for byte in name) or not name:
            raise ArchiveError(f"{name!r} in it has a name that readers interpret differently")
        size, packed, offset = _resolve(name, extra, (size, packed, offset))
        members.append(ZipMember(name, flags, method, crc, packed, size, offset))
    if len(members) != count:
        raise ArchiveError("its directory has fewer files than its end record counts")
    return members


def _parse_extra(name: bytes, extra: bytes) -> dict[int, bytes]:
    """Return the extra fields by their ids. Zeros that pad the end are no field."""
    fields: dict[int, bytes] = {}
    at = 0
    while at < len(extra) and extra[at:].strip(b"\0"):
        key, length = struct.unpack_from("<2H", extra, at) if len(extra) - at >= 4 else (0, -1)
        value = extra[at + 4 : at + 4 + length]
        if len(value) != length or (key in fields and key in (_ZIP64, _UNICODE_PATH)):
            raise ArchiveError(f"{name!r} in it has extra fields that cannot be read")
        fields[key] = value
        at += 4 + length
    if fields.get(_UNICODE_PATH, b"\0" * 5 + name)[5:] != name:
        raise ArchiveError(f"{name!r} in it has a second name")
    return fields


def _resolve(name: bytes, extra: dict[int, bytes], values: tuple[int, ...]) -> list[int]:
    """Return the values; those that did not fit come from the zip64 field, which has only them."""
    long = extra.get(_ZIP64, b"")
    if len(long) != 8 * values.count(_IN_EXTRA_32):
        raise ArchiveError(f"{name!r} in it has sizes that contradict each other")
    numbers = iter(struct.unpack(f"<{len(long) // 8}Q", long))
    return [next(numbers) if value == _IN_EXTRA_32 else value for value in values]


def _refuse_duplicates(members: list[ZipMember]) -> None:
    """Raise ArchiveError for names that are equal without case, as PyTorch compares them."""
    seen = set()
    for member in members:
        folded = member.name.decode("utf-8", "surrogateescape").casefold()
        if folded in seen:
            raise ArchiveError(f"{member.name!r} is in it twice")
        seen.add(folded)


def _check_member(file: BinaryIO, member: ZipMember, end: int) -> None:
    """Check that a file's header and the bytes after its data agree with the directory.

    `end` is where the next file begins.
    """
    head = _read_at(file, member.offset, _LOCAL.size)
    if len(head) < _LOCAL.size or not head.startswith(_LOCAL_MARK):
        raise ArchiveError(f"{member.name!r} is not where its directory says")
    flags, method, _, _, crc, packed, size, name_length, extra_length = _LOCAL.unpack(head)[2:]
    rest = file.read(name_length + extra_length)
    name, extra = rest[:name_length], _parse_extra(member.name, rest[name_length:])
    if (name, flags, method) != (member.name, member.flags, member.method):
        raise ArchiveError(f"{member.name!r} in it has a different header")
    if flags & _UNREADABLE_FLAGS or method not in (STORED, DEFLATED):
        raise ArchiveError(f"{member.name!r} in it is encrypted or uses an unknown compression")
    if method == STORED and member.size != member.packed_size:
        raise ArchiveError(f"{member.name!r} in it has sizes that contradict each other")
    described = bool(flags & _DESCRIPTOR_FLAG)
    if not _is_consistent(member, extra, (crc, size, packed), described):
        raise ArchiveError(f"{member.name!r} in it has another size or checksum in its own header")
    data_end = member.offset + _LOCAL.size + name_length + extra_length + member.packed_size
    if data_end > end:
        raise ArchiveError(f"{member.name!r} in it overlaps the next file")
    after = _read_at(file, data_end, min(end - data_end, 25))
    if after not in (_descriptors(member) if described else (b"",)):
        raise ArchiveError(f"bytes after {member.name!r} in it belong to no file")


def _is_consistent(
    member: ZipMember, extra: dict[int, bytes], header_values: tuple[int, int, int], described: bool
) -> bool:
    """Return whether a header's (checksum, size, packed size) are those of the directory.

    If a descriptor follows the data they may be zero, and PyTorch's zip64 field then has what was
    known when the header was written: sizes, zero, or the offset of the header itself.
    """
    crc, size, packed = header_values
    expected = (member.crc, member.size, member.packed_size)
    if described and _IN_EXTRA_32 not in (size, packed):
        long = extra.get(_ZIP64, b"")
        if len(long) % 8:
            return False
        allowed = {0, member.size, member.packed_size, member.offset}
        in_extra = set(struct.unpack(f"<{len(long) // 8}Q", long))
        return in_extra <= allowed and all(
            value in (0, right)
            for value, right in ((crc, expected[0]), (size, expected[1]), (packed, expected[2]))
        )
    size, packed = _resolve(member.name, extra, (size, packed))
    if described:
        return crc in (0, expected[0]) and size in (0, expected[1]) and packed in (0, expected[2])
    return (crc, size, packed) == expected


def _descriptors(member: ZipMember) -> list[bytes]:
    """Return every form in which a data descriptor may follow this member."""
    forms = [struct.pack("<L2Q", member.crc, member.packed_size, member.size)]
    if max(member.packed_size, member.size) <= _IN_EXTRA_32:
        forms.append(struct.pack("<3L", member.crc, member.packed_size, member.size))
    return [mark + form for form in forms for mark in (b"", _DESCRIPTOR_MARK)]
