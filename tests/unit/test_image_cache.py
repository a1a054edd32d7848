"""The archives of built images on this machine: complete or absent, and within their limit."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_archives import REFERENCE, cut, make_archive, make_manifest_archive

from labctl.errors import DiskFullError, TransferError
from labctl.runs import image_cache
from labctl.runs.image_cache import DamagedArchiveError, ImageCache, read_verified

OTHER = "labctl/built:fedcba9876543210"
LIMIT = 10**7


@pytest.fixture
def cache(tmp_path: Path) -> ImageCache:
    return ImageCache(tmp_path / "images", LIMIT)


def names(cache: ImageCache) -> set[str]:
    return {path.name for path in cache.directory.iterdir()} - {"write.lock"}


def test_an_archive_is_found_with_its_architecture_only(cache: ImageCache) -> None:
    assert cache.find(REFERENCE) is None
    data = make_archive()
    added = cache.add(REFERENCE, "amd64", cut(data))
    assert cache.find(REFERENCE, "amd64") == cache.find(REFERENCE) == added
    assert cache.find(REFERENCE, "arm64") is None
    assert cache.find(OTHER) is None
    assert b"".join(read_verified(cache.path(added), added)) == data
    assert cache.path(added).stat().st_mode & 0o777 == 0o600
    assert cache.directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no tar at all",
        make_archive()[:600],
        make_archive(lost=True),
        make_archive(OTHER),
        make_archive(REFERENCE, "python:3.12-slim"),
        gzip.compress(make_archive()),
        make_manifest_archive(b"[" * 100_000),
        make_manifest_archive(b'[{"Config": 1, "RepoTags": [], "Layers": []}]'),
        make_manifest_archive(b"[5]"),
    ],
    ids=["empty", "other", "cut", "layer", "name", "names", "packed", "deep", "config", "entry"],
)
def test_an_invalid_archive_is_not_stored(cache: ImageCache, data: bytes) -> None:
    with pytest.raises(TransferError, match="no usable archive"):
        cache.add(REFERENCE, "amd64", cut(data))
    assert names(cache) == set()


def test_a_manifest_of_gigabytes_is_not_read_into_memory(
    cache: ImageCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_cache, "MOST_DOCUMENT_BYTES", 10_000)
    data = make_archive(REFERENCE, *(f"labctl/built:{n:016}" for n in range(1000)))
    with pytest.raises(TransferError, match="no usable archive") as caught:
        cache.add(REFERENCE, "amd64", cut(data))
    assert "char" in caught.value.why, "the JSON was cut off"


def test_a_source_that_ends_early_leaves_nothing_and_keeps_the_earlier_archive(
    cache: ImageCache,
) -> None:
    def broken() -> Iterator[bytes]:
        yield make_archive()[:600]
        raise TransferError("the server ended")

    kept = cache.add(REFERENCE, "amd64", cut(make_archive()))
    with pytest.raises(TransferError, match="the server ended"):
        cache.add(REFERENCE, "amd64", broken())
    assert cache.find(REFERENCE) == kept


def test_a_full_disk_leaves_nothing(cache: ImageCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match="cannot write") as caught:
        cache.add(REFERENCE, "amd64", cut(make_archive()))
    assert caught.value.why == "No space left on device"
    assert names(cache) == set()


def test_an_archive_that_exceeds_the_limit_is_not_written_to_the_end(cache: ImageCache) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += 4096
            assert sent <= 2 * LIMIT
            yield b"x" * 4096

    with pytest.raises(DiskFullError, match="no room"):
        cache.add(REFERENCE, "amd64", endless())
    assert names(cache) == set()


def test_the_draft_of_a_killed_process_is_removed(cache: ImageCache) -> None:
    cache.directory.mkdir()
    (cache.directory / "0000-amd64.part").write_bytes(b"half")
    (cache.directory / "1111111111111111-amd64.tar").write_bytes(b"without a record")
    assert cache.list_images() == []
    cache.add(REFERENCE, "amd64", cut(make_archive()))
    assert names(cache) == {"0123456789abcdef-amd64.tar", "0123456789abcdef-amd64.json"}


def test_a_damaged_archive_never_ends_for_its_reader(cache: ImageCache) -> None:
    # Its last block has only the zeros that end a tar file: the other zeros end sooner.
    data = make_archive(layers=(bytes(3 << 20),)).rstrip(b"\0")
    data = data.ljust((4 << 20) + 512, b"\0")
    added = cache.add(REFERENCE, "amd64", cut(data, 1 << 20))
    with cache.path(added).open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"x")
    blocks: list[bytes] = []
    with pytest.raises(DamagedArchiveError, match="is damaged"):
        blocks.extend(read_verified(cache.path(added), added))
    sent = b"".join(blocks)
    assert sent
    assert b"manifest.json" in data
    assert b"manifest.json" not in sent


def test_an_archive_of_another_size_and_a_damaged_record_do_not_count(cache: ImageCache) -> None:
    added = cache.add(REFERENCE, "amd64", cut(make_archive()))
    record = cache.path(added).with_suffix(".json")
    text = record.read_bytes()
    record.write_bytes(b"{")
    assert cache.find(REFERENCE) is None
    record.write_bytes(text)
    assert cache.find(REFERENCE) == added
    with cache.path(added).open("ab") as file:
        file.write(b"more")
    assert cache.find(REFERENCE) is None


def test_room_is_made_from_the_least_recently_used(tmp_path: Path) -> None:
    size = len(make_archive())
    cache = ImageCache(tmp_path, 2 * size)
    first, second = (cache.add(r, "amd64", cut(make_archive(r))) for r in (REFERENCE, OTHER))
    for age_s, image in ((200, first), (100, second)):
        os.utime(cache.path(image), (1e9 - age_s, 1e9 - age_s))
    cache.mark_used(first)
    assert cache.list_images() == [second, first]
    cache.make_room(size)
    assert cache.list_images() == [first]


def test_an_image_that_cannot_fit_costs_no_other_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(make_archive())
    cache = ImageCache(tmp_path, 2 * size)
    kept = cache.add(REFERENCE, "amd64", cut(make_archive()))
    with pytest.raises(DiskFullError, match="has no room"):
        cache.make_room(2 * size + 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=image_cache.RESERVE_BYTES)
    monkeypatch.setattr(image_cache.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DiskFullError, match="has no room"):
        cache.make_room(size + 1)
    assert cache.list_images() == [kept]
    cache.make_room(size)
    assert cache.list_images() == []


def test_the_disk_keeps_a_reserve(cache: ImageCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.make_room(1)
    monkeypatch.setattr(image_cache, "RESERVE_BYTES", 1 << 60)
    with pytest.raises(DiskFullError, match="has no room"):
        cache.make_room(1)


def test_failures_are_reported_once(cache: ImageCache) -> None:
    assert cache.take_failures() == []
    cache.record_failure(REFERENCE, "it was not kept")
    assert cache.take_failures("labctl/built:another") == []
    assert cache.take_failures() == ["it was not kept"]
    assert cache.take_failures() == []


def test_two_at_once_are_written_one_after_the_other(cache: ImageCache) -> None:
    data = make_archive(layers=(bytes(1 << 20),))
    threads = [
        threading.Thread(target=cache.add, args=(REFERENCE, "amd64", cut(data))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    image = cache.find(REFERENCE)
    assert image is not None
    assert b"".join(read_verified(cache.path(image), image)) == data
