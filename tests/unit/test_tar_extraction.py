"""A tar archive from a server that is not trusted: only requested files are written."""

from __future__ import annotations

import io
import os
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from labctl.errors import LinkLostError, PolicyError, TransferError
from labctl.sync.tar_extraction import BLOCK_BYTES, UNWRITTEN_BYTES, TarExtraction
from labctl.wire.tar import TarError

RECORD_BYTES = 20 * 512
ENDLESS_BYTES = 16 * UNWRITTEN_BYTES


@pytest.fixture
def partial(tmp_path: Path) -> Path:
    (tmp_path / "partial").mkdir()
    return tmp_path / "partial"


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname = size, kind, link
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")


def entry(name: str, content: bytes) -> bytes:
    return header(name, len(content)) + content + bytes(-len(content) % 512)


def end(*members: bytes) -> bytes:
    archive = b"".join(members) + bytes(1024)
    return archive + bytes(-len(archive) % RECORD_BYTES)


def extract(
    partial: Path,
    archive: bytes,
    *paths: str,
    piece: int = 65_537,
    on_bytes: Callable[[int], None] = lambda done: None,
) -> int:
    with TarExtraction(partial, paths, on_bytes) as extraction:
        for start in range(0, len(archive), piece):
            extraction.feed(archive[start : start + piece])
    return extraction.done_bytes


def list_tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("piece", [511, 65_537, 10**8])
def test_requested_files_are_written_in_any_order(partial: Path, piece: int) -> None:
    large = os.urandom(3 * BLOCK_BYTES + 17)
    long = "deep/" * 40 + "name"
    members = [entry("./b/large", large), entry(f"./{long}", b"1"), entry("./empty", b"")]
    done = extract(partial, end(*members), "empty", "b/large", long, "missing", piece=piece)
    assert list_tree(partial) == {"b/large": large, long: b"1", "empty": b""}
    assert done == len(large) + 1


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, b"6", b"S"])
def test_links_and_special_files_are_skipped(partial: Path, kind: bytes) -> None:
    odd = header("./a", 0, kind, link="/etc/passwd")
    extract(partial, end(odd, entry("./a/b", b"inside")), "a", "a/b")
    assert list_tree(partial) == {"a/b": b"inside"}
    assert not (partial / "a").is_symlink()


@pytest.mark.parametrize("name", ["../a", "./../a", "/a", "a", "././a", "./other", "./a/../a"])
def test_a_name_that_was_not_requested_ends_the_transfer(partial: Path, name: str) -> None:
    archive = end(entry("./first", b"1"), entry(name, b"2"), entry("./a", b"3"))
    with pytest.raises(PolicyError, match="did not request"):
        extract(partial, archive, "first", "a")
    assert list_tree(partial.parent) == {"partial/first": b"1"}


def test_a_file_that_comes_twice_ends_the_transfer(partial: Path) -> None:
    with pytest.raises(PolicyError, match="did not request"):
        extract(partial, end(entry("./a", b"1"), entry("./a", b"2")), "a")
    assert list_tree(partial) == {"a": b"1"}


@pytest.mark.parametrize(
    "archive",
    [b"", end()[:512][:100], entry("./a", b"1"), end(entry("./a", b"1"))[:513], b"Welcome!" * 200],
)
def test_a_truncated_or_damaged_archive_is_an_error(partial: Path, archive: bytes) -> None:
    with pytest.raises(TarError):
        extract(partial, archive, "a")


def test_the_caller_ends_a_file_without_end(partial: Path) -> None:
    def limit(done: int) -> None:
        if done > UNWRITTEN_BYTES:
            raise TransferError("more than announced")

    archive = header("./a", 2**60) + bytes(ENDLESS_BYTES)
    with pytest.raises(TransferError, match="more than announced"):
        extract(partial, archive, "a", on_bytes=limit)
    assert (partial / "a").stat().st_size < 4 * UNWRITTEN_BYTES


@pytest.mark.parametrize("start", [b"", end(entry("./a", b"1"))])
def test_headers_and_zeros_without_end_are_cut_off(partial: Path, start: bytes) -> None:
    extended = header("pax", 14 * 36, tarfile.XHDTYPE) + b"14 path=./abc\n" * 36 + bytes(8)
    endless = bytes(1024) if start else extended
    fed: list[int] = []
    with pytest.raises(TransferError, match="more than it announced"):
        extract(partial, start + endless * (ENDLESS_BYTES // 1024), "a", on_bytes=fed.append)
    assert len(fed) * 65_537 < 4 * UNWRITTEN_BYTES


def test_an_error_of_the_disk_is_raised_as_it_is(partial: Path) -> None:
    (partial / "a").mkdir()
    with pytest.raises(IsADirectoryError):
        extract(partial, end(entry("./a", bytes(2 * UNWRITTEN_BYTES))), "a")


def test_an_error_of_the_link_is_not_replaced_and_leaves_no_thread(partial: Path) -> None:
    def transfer() -> None:
        with TarExtraction(partial, ["a"], lambda done: None) as extraction:
            extraction.feed(end(entry("./a", b"1"))[:600])
            raise LinkLostError("the link was lost")

    with pytest.raises(LinkLostError):
        transfer()
    assert "labctl-tar" not in [thread.name for thread in threading.enumerate()]


def test_a_pax_archive_is_read(partial: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("./ä" + "x" * 200)
        member.size, member.mtime = 3, 1.5
        tar.addfile(member, io.BytesIO(b"pax"))
    extract(partial, buffer.getvalue(), "ä" + "x" * 200)
    assert list_tree(partial) == {"ä" + "x" * 200: b"pax"}
