"""What travels, either way: parts of files as blocks, packed only where the link is slower."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from labctl.remote import outgoing, parcel
from labctl.remote.outgoing import BLOCK_BYTES, BUFFERS_BYTES, Outgoing, Part

ROWS = b"".join(b"%d,%d,0.125\n" % (n, n * n % 97) for n in range(80_000))


class Clock:
    """Time that passes only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(outgoing.time, "monotonic", lambda: self.now)


def made(root: Path, name: str, content: bytes, offset: int = 0) -> Part:
    (root / name).write_bytes(content)
    return name, offset, len(content)


def unpacked(sent: bytes) -> bytes:
    unpacking = parcel.Unpacking()
    contents = b"".join(unpacking.feed(sent))
    assert unpacking.ended
    return contents


def test_small_and_large_files_travel_from_where_they_were_cut(tmp_path: Path) -> None:
    large = os.urandom(3 * BLOCK_BYTES + 5)
    parts = [made(tmp_path, f"{n}", b"%d" % n) for n in range(100)]
    parts += [made(tmp_path, "large", large, 7), made(tmp_path, "empty", b"")]
    heard: list[int] = []
    body = Outgoing(tmp_path, parts, heard.append)
    expected = b"".join(b"%d" % n for n in range(100)) + large[7:]
    assert unpacked(b"".join(body())) == expected
    assert heard == sorted(heard)
    assert heard[-1] == len(expected)
    assert unpacked(b"".join(body())) == expected, "begun again, it is the same"


def test_what_is_gone_or_shorter_by_now_is_filled_up(tmp_path: Path) -> None:
    parts = [made(tmp_path, "gone", b"x" * 5), made(tmp_path, "cut", b"abcdef")]
    parts += [made(tmp_path, "whole", b"end")]
    (tmp_path / "gone").unlink()
    (tmp_path / "cut").write_bytes(b"abc")
    sent = unpacked(b"".join(Outgoing(tmp_path, parts, lambda done: None)()))
    assert sent == bytes(5) + b"abc" + bytes(3) + b"end"


def test_what_is_sent_is_hashed_on_its_way(tmp_path: Path) -> None:
    parts = [made(tmp_path, "a", b"x" * 5), made(tmp_path, "b", b"abcdef", 2)]
    body = Outgoing(tmp_path, parts, lambda done: None, [None, hashlib.sha256(b"ab")])
    next(body())  # a stream that nobody took
    assert unpacked(b"".join(body()))
    assert body.digests[0] is None
    assert body.digests[1].hexdigest() == hashlib.sha256(b"abcdef").hexdigest()


@pytest.mark.parametrize("deed", [lambda path: path.write_bytes(b"abcd"), Path.unlink])
def test_of_what_cannot_be_read_no_hash_is_vouched_for(
    tmp_path: Path, deed: Callable[[Path], object]
) -> None:
    parts = [made(tmp_path, "a", b"abcdef"), made(tmp_path, "b", b"whole")]
    deed(tmp_path / "a")
    body = Outgoing(tmp_path, parts, lambda done: None, [hashlib.sha256(), hashlib.sha256()])
    assert unpacked(b"".join(body())).endswith(bytes(2) + b"whole")
    assert body.digests[0] is None
    assert body.digests[1].hexdigest() == hashlib.sha256(b"whole").hexdigest()


def test_what_is_told_at_the_end_is_no_content(tmp_path: Path) -> None:
    parts = [made(tmp_path, "a", b"12345")]
    sent = b"".join(Outgoing(tmp_path, parts, lambda done: None, about=lambda: b"words")())
    for step in (1, 4, len(sent)):
        unpacking = parcel.Unpacking()
        pieces = [sent[at : at + step] for at in range(0, len(sent), step)]
        assert b"".join(one for piece in pieces for one in unpacking.feed(piece)) == b"12345"
        assert (unpacking.told, unpacking.ended) == (b"words", True)
    twice = b"".join([*parcel.about(b"words"), *parcel.about(b"more")])
    with pytest.raises(parcel.CutError):
        list(parcel.Unpacking().feed(twice))


@pytest.mark.parametrize(("mib_per_s", "packs"), [(2, True), (20, True), (400, False)])
def test_only_a_slow_link_is_helped_by_compression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mib_per_s: int, packs: bool
) -> None:
    clock = Clock(monkeypatch)
    parts = [made(tmp_path, f"{n}.csv", ROWS) for n in range(40)]
    size = 40 * len(ROWS)
    sent = []
    for block in Outgoing(tmp_path, parts, lambda done: None)():
        clock.now += len(block) / (mib_per_s * 1024**2)
        sent.append(block)
    assert unpacked(b"".join(sent)) == ROWS * 40
    assert sent[0][0] == parcel.PACKED, "before the link is known, a little is compressed"
    carried = sum(map(len, sent))
    assert carried < size / 2 if packs else carried > size - 4 * BUFFERS_BYTES


def test_a_very_slow_link_is_helped_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    parts = [made(tmp_path, f"{n}.csv", ROWS) for n in range(40)]
    carried = {}
    for mib_per_s in (2, 20):
        carried[mib_per_s] = 0
        for block in Outgoing(tmp_path, parts, lambda done: None)():
            clock.now += len(block) / (mib_per_s * 1024**2)
            carried[mib_per_s] += len(block)
    assert carried[2] < 0.97 * carried[20]


def test_noise_is_never_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    parts = [made(tmp_path, "noise", os.urandom(12 * BLOCK_BYTES))]
    heads = set()
    for piece in Outgoing(tmp_path, parts, lambda done: None)():
        clock.now += 1.0
        if len(piece) == parcel.HEAD.size:
            heads.add(piece[0])
    assert heads == {parcel.PLAIN}


def test_a_body_that_is_empty_ends(tmp_path: Path) -> None:
    empty: Iterator[bytes] = Outgoing(tmp_path, [made(tmp_path, "a", b"")], lambda done: None)()
    assert list(empty) == [parcel.END]
