"""Large files are hashed while later ones still travel, with the rsync of this machine."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from labctl.commands import rsync
from labctl.errors import TransferError
from labctl.model import Endpoint
from labctl.sync import background_hashes, durability, growing_hash
from labctl.sync.background_hashes import BackgroundHasher
from labctl.transports import RemoteShell
from labctl.transports.rsync import copy, find_program

NAMES = ["a", "deep/é \\#101", "z"]
SIZES = {**dict.fromkeys(NAMES, 300_000), "small": 1}


@pytest.fixture(autouse=True)
def _small_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_hashes, "SMALLEST_BYTES", 1000)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "deep").mkdir(parents=True)
    here.mkdir()
    for name in NAMES:
        (there / name).write_bytes(os.urandom(300_000))
    (there / "small").write_bytes(b"x")
    return there, here


def pull(there: Path, here: Path, hasher: BackgroundHasher) -> None:
    """Copy as a pull does, over a shell that stays on this machine."""
    shell = RemoteShell(words=("sh", "-c", 'shift; exec "$@"', "sh"), host="there")
    transfer = rsync.Transfer(shell.words, f"there:{there}/", f"{here}/", names_files=True)
    argv = rsync.transfer_argv(find_program(), transfer)
    names = rsync.name_list([*NAMES, "small"])
    copy(Endpoint(host="there"), shell, argv, names, lambda done: None, hasher.add)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_rsync_has_completed_is_hashed_during_the_transfer(folders: tuple[Path, Path]) -> None:
    there, here = folders
    with BackgroundHasher(here, SIZES) as hasher:
        pull(there, here, hasher)
    for name in NAMES:
        found = hasher.find(name)
        assert found is not None, name
        assert found[0] == sha256(there / name)
    assert hasher.find("small") is None


def test_a_hash_ends_with_the_content_it_belongs_to(folders: tuple[Path, Path]) -> None:
    there, here = folders
    with BackgroundHasher(here, SIZES) as hasher:
        pull(there, here, hasher)
    status = (here / "a").stat()
    with (here / "a").open("r+b") as file:
        file.write(b"other")
    os.utime(here / "a", ns=(status.st_atime_ns, status.st_mtime_ns))
    (here / "z").unlink()
    assert hasher.find("a") is None
    assert hasher.find("z") is None


def test_only_expected_files_are_read(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, here = folders
    (tmp_path / "secret").write_bytes(bytes(5000))
    (here / "link").symlink_to(tmp_path / "secret")
    with BackgroundHasher(here, {"link": 5000}) as hasher:
        hasher.add("../secret")
        hasher.add("link")
    assert hasher.find("../secret") is None
    assert hasher.find("link") is None


def test_a_cut_does_not_wait_for_the_hashes(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, _ = folders
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()

    def hash_slowly(path: Path) -> tuple[str, os.stat_result]:
        begun.set()
        released.wait(10)
        ended.set()
        return "", path.stat()

    monkeypatch.setattr(background_hashes, "hash_on_disk", hash_slowly)
    with suppress(ConnectionError), BackgroundHasher(there, SIZES) as hasher:
        hasher.add("a")
        assert begun.wait(10)
        raise ConnectionError
    assert not ended.is_set()
    released.set()


def test_a_disk_that_fails_is_reported_at_the_end(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, flags: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(durability, "_sync", fail)
    with (
        pytest.raises(TransferError, match="the disk of this machine failed"),
        BackgroundHasher(folders[0], SIZES) as hasher,
    ):
        hasher.add("a")


STEP = 4096
WHOLE = bytes(range(256)) * 64


@pytest.fixture
def growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to which files arrive in steps of STEP bytes."""
    monkeypatch.setattr(background_hashes, "STEP_BYTES", STEP)
    monkeypatch.setattr(background_hashes, "POLL_S", 0.005)
    monkeypatch.setattr(growing_hash, "STEP_BYTES", STEP)
    return tmp_path


def wait_for_bytes(hasher: BackgroundHasher, path: str, count: int) -> None:
    deadline = time.monotonic() + 10
    while hasher.get_hashed_bytes(path) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_new_file_is_hashed_while_it_grows(growing: Path) -> None:
    with BackgroundHasher(growing, {"model": len(WHOLE)}, follow=True) as hasher:
        with (growing / "model").open("wb", buffering=0) as file:
            file.write(WHOLE[: STEP + 5])
            wait_for_bytes(hasher, "model", STEP)
            assert hasher.get_hashed_bytes("model") == STEP
            file.write(WHOLE[STEP + 5 :])
        hasher.add("model")
    found = hasher.find("model")
    assert found is not None
    assert found[0] == sha256(growing / "model")


def test_rsync_writes_a_file_again_and_all_of_it_is_hashed_again(growing: Path) -> None:
    with BackgroundHasher(growing, {"model": len(WHOLE)}, follow=True) as hasher:
        (growing / "model").write_bytes(WHOLE)
        wait_for_bytes(hasher, "model", STEP)
        hasher.add("model")
        with (growing / "model").open("r+b") as file:
            file.write(b"other")
        hasher.add("model")
    found = hasher.find("model")
    assert found is not None
    assert found[0] == sha256(growing / "model") != hashlib.sha256(WHOLE).hexdigest()


def test_what_is_written_after_the_file_was_complete_ends_its_hash(growing: Path) -> None:
    with BackgroundHasher(growing, {"model": len(WHOLE)}, follow=True) as hasher:
        (growing / "model").write_bytes(WHOLE)
        wait_for_bytes(hasher, "model", STEP)
        hasher.add("model")
    with (growing / "model").open("r+b") as file:
        file.write(b"other")
    assert hasher.find("model") is None


@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_resumed_or_shortened_file_is_hashed_as_a_whole(growing: Path, is_resumed: bool) -> None:
    model = growing / "model"
    if is_resumed:
        model.write_bytes(bytes(2 * STEP))
    with BackgroundHasher(growing, {"model": len(WHOLE)}, follow=True) as hasher:
        if not is_resumed:
            model.write_bytes(bytes(2 * STEP))
            wait_for_bytes(hasher, "model", 2 * STEP)
            os.truncate(model, STEP)
            while hasher.get_hashed_bytes("model"):
                time.sleep(0.005)
        model.write_bytes(WHOLE)
        assert hasher.get_hashed_bytes("model") == 0
        hasher.add("model")
    found = hasher.find("model")
    assert found is not None
    assert found[0] == sha256(model)


def test_files_of_a_real_transfer_are_followed(growing: Path, folders: tuple[Path, Path]) -> None:
    there, here = folders
    with BackgroundHasher(here, SIZES, follow=True) as hasher:
        pull(there, here, hasher)
    for name in NAMES:
        found = hasher.find(name)
        assert found is not None, name
        assert found[0] == sha256(there / name)
