"""Which images a volume has: whatever is in it, a new server starts."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from labctl.providers.local.volume_images import _read_names


def make_reader(member: tarfile.TarInfo, content: bytes = b"") -> Any:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return SimpleNamespace(get_archive=lambda path: ([buffer.getvalue()], {}))


def test_the_names_of_a_volumes_images_are_read() -> None:
    content = b'{"Repositories": {"python": {"python:3.12": "sha256:1"}}}'
    reader = make_reader(tarfile.TarInfo("repositories.json"), content)
    assert _read_names(reader, "volume") == {"python:3.12"}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_a_link_or_directory_there_is_no_list(kind: bytes) -> None:
    member = tarfile.TarInfo("repositories.json")
    member.type, member.linkname = kind, "/etc/shadow"
    assert _read_names(make_reader(member), "volume") == set()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"Repositories": 1}', b"[" * 100_000])
def test_another_content_is_no_list(content: bytes) -> None:
    reader = make_reader(tarfile.TarInfo("repositories.json"), content)
    assert _read_names(reader, "volume") == set()


def test_a_list_without_end_is_not_read_into_memory() -> None:
    read = 0

    def read_blocks() -> Iterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield bytes(1 << 20)

    reader: Any = SimpleNamespace(get_archive=lambda path: (read_blocks(), {}))
    assert _read_names(reader, "volume") == set()
    assert read < 100


def test_an_empty_archive_is_no_list() -> None:
    reader: Any = SimpleNamespace(get_archive=lambda path: ([b"\0" * 10240], {}))
    assert _read_names(reader, "volume") == set()
