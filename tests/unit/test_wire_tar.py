"""The headers of a tar archive that a stranger may have written."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labctl.wire.tar import (
    MOST_HEADER_BYTES,
    TarError,
    TarMember,
    TarStream,
    padding_bytes,
    read_tar_members,
)

NAMES = st.lists(st.text("aä/._-", min_size=1, max_size=150), min_size=1, max_size=4, unique=True)


def read(data: bytes, *, plain: bool = False) -> list[TarMember]:
    file = io.BytesIO(data)

    def take(size: int) -> bytes:
        assert size <= MOST_HEADER_BYTES
        block = file.read(size)
        if len(block) < size:
            raise EOFError
        return block

    members = []
    for member in read_tar_members(take, plain=plain):
        members.append(member)
        file.seek(max(0, member.size) + padding_bytes(member.size), io.SEEK_CUR)
    return members


def header(
    name: str = "a", size: int = 0, kind: bytes = b"0", form: int = tarfile.USTAR_FORMAT
) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, "elsewhere"
    return info.tobuf(form, "utf-8", "strict")


def padded(content: bytes) -> bytes:
    return content + bytes(padding_bytes(len(content)))


def pax(*records: bytes) -> bytes:
    text = b""
    for record in records:
        length = len(record) + 2
        while len(str(length)) + len(record) + 2 != length:
            length += 1
        text += f"{length} ".encode() + record + b"\n"
    return header("pax", len(text), b"x") + padded(text)


def forge(block: bytes, at: int, field: bytes) -> bytes:
    """Change a field of a header, and its checksum with it."""
    changed = bytearray(block)
    changed[at : at + len(field)] = field
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed)
    return bytes(changed)


END = bytes(1024)


@settings(deadline=None, max_examples=50)
@given(NAMES, st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_honest_archives_are_read_as_tarfile_reads_them(names: list[str], form: int) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=form) as tar:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = 300 * number
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
        expected = [(info.name, info.size) for info in tar.getmembers()]
    members = read(packed.getvalue())
    assert [(member.name.rstrip("/"), member.size) for member in members] == [
        (name.rstrip("/"), size) for name, size in expected
    ]
    if form == tarfile.PAX_FORMAT:
        assert read(packed.getvalue(), plain=True) == members
    else:
        with pytest.raises(TarError, match="ustar or pax"):
            read(packed.getvalue(), plain=True)


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"S", b"g", b"\0"])
@pytest.mark.parametrize("plain", [True, False])
def test_the_kind_of_each_member_is_there_to_be_judged(kind: bytes, plain: bool) -> None:
    assert [member.kind for member in read(header(kind=kind) + END, plain=plain)] == [kind]


def test_the_same_member_twice_is_listed_twice() -> None:
    assert [member.name for member in read(header() + header() + END)] == ["a", "a"]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    "data",
    [
        b"x" * 512,
        b"\x1f\x8b" + bytes(510),
        header()[:-1] + b"x",  # another checksum
        forge(header(), 0, b"\xff"),  # a name that is not UTF-8
        forge(header(), 124, b"9999999999\0"),
        pax(b"size=-1") + header(),
        pax(b"size=1_0") + header(),
        pax("size=\u0661".encode()) + header(),
        pax(b"size=" + b"9" * 5000) + header(),
        pax(b"path=\xff") + header(),
        header("pax", 512, b"x") + b"9 path=..x".ljust(512, b"\0"),
        header("pax", 512, b"x") + b"-3 path=x\n".ljust(512, b"\0"),
        header("pax", MOST_HEADER_BYTES + 1, b"x"),
        header("pax", 7 * 1024**3, b"x"),
    ],
)
def test_damaged_headers_are_refused(data: bytes, plain: bool) -> None:
    with pytest.raises(TarError):
        read(data + END, plain=plain)


@pytest.mark.parametrize(
    "data",
    [
        header(form=tarfile.GNU_FORMAT),
        header("x" * 200, form=tarfile.GNU_FORMAT),
        forge(header(), 124, b"\x80" + bytes(10) + b"\x05"),  # a size in base 256
        forge(header(), 124, b"\xff" * 12),  # -1 in base 256
        forge(header(), 257, b"ustar  \0"),
        forge(header(), 257, bytes(8)),
        pax(b"path=b", b"path=c") + header(),
        pax(b"path=b") + pax(b"path=c") + header(),
        pax(b"linkpath=/etc/passwd") + header(),
        pax(b"GNU.sparse.size=9") + header(),
        pax(b"mtime=1") + header(),
    ],
)
def test_a_plain_archive_leaves_nothing_to_interpret(data: bytes) -> None:
    read(data + END)
    with pytest.raises(TarError):
        read(data + END, plain=True)


def test_an_extended_header_counts_for_one_file_only() -> None:
    members = read(pax(b"path=b", b"size=0") + header() + header() + END, plain=True)
    assert [member.name for member in members] == ["b", "a"]
    named = header("L", 4, b"L", tarfile.GNU_FORMAT) + padded(b"b/c\0")
    linked = header("K", 3, b"K", tarfile.GNU_FORMAT) + padded(b"../")
    [member] = read(named + linked + header(kind=b"2") + END)
    assert (member.name, member.link) == ("b/c", "../")


def write_archive(**contents: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w|") as tar:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


class Trickle(io.BytesIO):
    """A connection: it returns a few bytes at a time."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(size or 0, 100))


def test_a_stream_yields_each_file_and_skips_what_is_not_read() -> None:
    long = bytes(range(256)) * 1000
    stream = TarStream(Trickle(write_archive(one=b"1", skipped=long, two=long, empty=b"")))
    contents = {}
    for member in stream:
        if member.name != "skipped":
            contents[member.name] = b"".join(iter(lambda: stream.read(70_000), b""))
    assert contents == {"one": b"1", "two": long, "empty": b""}


@pytest.mark.parametrize("length", [1, 511, 512, 600, 1024, 1500])
def test_a_stream_that_ends_too_early_is_refused(length: int) -> None:
    data = write_archive(one=b"1" * 700)[:length]
    with pytest.raises(TarError, match="truncated"):
        list(TarStream(io.BytesIO(data)))


def test_a_stream_with_a_negative_size_is_refused() -> None:
    block = bytearray(header("a"))
    block[124:136] = b"\xff" * 12
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    with pytest.raises(TarError, match="negative size"):
        list(TarStream(io.BytesIO(bytes(block) + bytes(1024))))
