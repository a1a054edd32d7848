"""The local files of a push: those that change are noticed, and each is hashed once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from labctl.model import FileEntry
from labctl.sync import source_files
from labctl.sync.source_files import SourceFiles, hash_during_transfer


def write(root: Path, name: str, content: bytes) -> FileEntry:
    (root / name).write_bytes(content)
    status = (root / name).stat()
    return FileEntry(
        path=name, size=len(content), sha256="", mode=0o644, mtime_ns=status.st_mtime_ns
    )


def hash_all(root: Path, files: list[FileEntry]) -> dict[str, str]:
    with hash_during_transfer(root, files) as hashes:
        return hashes.result()


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
def test_a_hash_is_that_of_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(source_files, "BLOCK_BYTES", 100)
    content = os.urandom(size)
    entry = write(tmp_path, "file", content)
    assert hash_all(tmp_path, [entry]) == {"file": hashlib.sha256(content).hexdigest()}


def test_a_deleted_file_has_no_hash(tmp_path: Path) -> None:
    files = [write(tmp_path, "gone", b"x"), write(tmp_path, "here", b"y")]
    (tmp_path / "gone").unlink()
    assert hash_all(tmp_path, files) == {"gone": "", "here": hashlib.sha256(b"y").hexdigest()}


def test_changes_before_and_during_the_transfer_are_noticed(tmp_path: Path) -> None:
    files = [write(tmp_path, name, b"content") for name in ("before", "during", "gone", "same")]
    (tmp_path / "before").write_bytes(b"longer content")
    sources = SourceFiles(tmp_path, files)
    assert sources.changed == ["before"]
    assert sources.list_changed() == []
    status = (tmp_path / "during").stat()
    (tmp_path / "during").write_bytes(b"CONTENT")
    os.utime(tmp_path / "during", ns=(status.st_atime_ns, status.st_mtime_ns))
    (tmp_path / "gone").unlink()
    assert sources.list_changed() == ["during", "gone"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_stops_the_push_at_its_start(tmp_path: Path) -> None:
    entry = write(tmp_path, "secret", b"x")
    (tmp_path / "secret").chmod(0)
    with pytest.raises(PermissionError):
        SourceFiles(tmp_path, [entry]).require_readable([entry])


def test_a_file_of_another_user_is_opened_to_see_whether_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = write(tmp_path, "shared", b"x")
    sources = SourceFiles(tmp_path, [entry])
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    def refuse(path: str, flags: int) -> int:
        raise PermissionError(path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError):
        sources.require_readable([entry])
