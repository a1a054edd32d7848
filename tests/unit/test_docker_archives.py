"""Archives through pipes: a part of one never counts as all of it, in either direction."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from labctl.wire.docker_archives import DockerCommandError, feed_load, open_saved

LARGE = os.urandom(1 << 20)  # does not fit into a pipe


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


def test_the_end_of_a_saved_archive_is_an_error_if_the_command_failed() -> None:
    with open_saved(sh("echo first; echo no layer >&2; exit 3")) as archive:
        assert archive.read(100) == b"first\n"
        with pytest.raises(DockerCommandError, match="no layer") as caught:
            archive.read(100)
    assert caught.value.code == 3


def test_a_saved_archive_that_is_not_read_to_its_end_ends_its_command() -> None:
    with open_saved(sh("exec yes")) as archive:
        assert archive.read(4) == b"y\ny\n"


def test_a_load_gets_the_archive(tmp_path: Path) -> None:
    feed_load(sh(f"cat > {tmp_path}/loaded"), lambda stdin: stdin.write(LARGE))
    assert (tmp_path / "loaded").read_bytes() == LARGE


@pytest.mark.parametrize("content", [LARGE, b"small", b""], ids=["large", "small", "empty"])
def test_a_load_that_does_not_read_says_why(content: bytes) -> None:
    with pytest.raises(DockerCommandError, match="no space left") as caught:
        feed_load(sh("echo no space left >&2; exit 1"), lambda stdin: stdin.write(content))
    assert caught.value.code == 1


def test_a_load_never_gets_the_end_of_an_archive_that_could_not_be_read(tmp_path: Path) -> None:
    def write(stdin: IO[bytes]) -> None:
        stdin.write(LARGE)
        stdin.write(b"still in the buffer")
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        feed_load(sh(f"cat > {tmp_path}/draft && mv {tmp_path}/draft {tmp_path}/loaded"), write)
    assert not (tmp_path / "loaded").exists()


def test_what_was_wrong_with_an_archive_is_not_hidden_by_the_end_of_the_load(
    tmp_path: Path,
) -> None:
    def write(stdin: IO[bytes]) -> None:
        while not (tmp_path / "closed").exists():
            time.sleep(0.01)
        stdin.write(b"in the buffer")
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        feed_load(sh(f"exec <&-; touch {tmp_path}/closed; exec sleep 600"), write)


def test_a_load_can_be_ended_early() -> None:
    @contextmanager
    def end_at_once(end: Callable[[], None]) -> Iterator[None]:
        end()
        yield

    with pytest.raises(DockerCommandError):
        feed_load(sh("exec sleep 600"), lambda stdin: stdin.write(LARGE), end_at_once)
