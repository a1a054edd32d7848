"""rsync's command lines as values, and what its words and codes mean."""

from __future__ import annotations

import pytest

from labctl.actions.rsync import _judge
from labctl.commands.rsync import Way, parse_progress, parse_version, pull_argv
from labctl.errors import ConnectError, DiskFullError, LabError, LinkLostError, TransferError
from labctl.model import Endpoint

WAY = Way(ssh_line="ssh -F /c -T", host="box-1", version=(3, 2))
ENDPOINT = Endpoint(host="gpu.example")


def test_pull_line() -> None:
    assert pull_argv(WAY, "/home/s/run", "/my lab/", "/tmp/names") == [
        "rsync",
        "--protect-args",
        "--files-from=/tmp/names",
        "--from0",
        "--append",
        "--no-links",
        "--no-devices",
        "--no-specials",
        "--chmod=Du+rwx,Fu+rw",
        "--info=progress2,name0",
        "--no-human-readable",
        "--outbuf=N",
        "-e",
        "ssh -F /c -T",
        "--",
        "box-1:/home/s/run/",
        "/my lab/",
    ]


def test_an_old_rsync_is_not_asked_for_progress() -> None:
    old = Way(ssh_line="ssh", host="box", version=(3, 0))
    assert not any(word.startswith("--info") for word in pull_argv(old, "/a", "/b", "/n"))


def test_only_rsyncs_that_know_zstd_or_lz4_pack() -> None:
    packed = pull_argv(WAY, "/a", "/b", "/n", pack=True)
    assert [word for word in packed if "compress" in word] == ["--compress", "--compress-level=1"]
    old = Way(ssh_line="ssh", host="box", version=(3, 1))
    assert pull_argv(old, "/a", "/b", "/n", pack=True) == pull_argv(old, "/a", "/b", "/n")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("rsync  version 3.2.7  protocol version 31\n", (3, 2)),
        ("rsync  version v3.4.1  protocol version 32\n", (3, 4)),
        ("rsync  version 2.6.9  protocol version 29\n", (2, 6)),
        ("openrsync: protocol version 29\nrsync version 2.6.9 compatible\n", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_versions(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("segment", "count"),
    [
        (b"      1,234,567  98%   10.00MB/s    0:00:01 (xfr#1, to-chk=0/2)", 1234567),
        (b"     32768   0%    0.00kB/s", 32768),
        (b"building file list", None),
        (b"", None),
    ],
)
def test_progress(segment: bytes, count: int | None) -> None:
    assert parse_progress(segment) == count


@pytest.mark.parametrize(
    ("code", "words", "error"),
    [
        (11, "write failed: No space left on device (28)", DiskFullError),
        (12, "write failed: Disk quota exceeded (122)", DiskFullError),
        (12, "connection unexpectedly closed", LinkLostError),
        (-9, "", TransferError),
        (20, "received SIGINT", TransferError),
        (3, "mkdir failed", TransferError),
    ],
)
def test_what_a_failure_means(code: int, words: str, error: type[LabError]) -> None:
    with pytest.raises(error) as caught:
        _judge(code, words, ENDPOINT, "labctl pull")
    assert "labctl pull" in caught.value.hint


@pytest.mark.parametrize(
    ("code", "words", "usable"),
    [
        (0, "", True),
        (24, "file has vanished", True),
        (127, "rsync: command not found", False),
        (2, "protocol version mismatch -- is your shell clean?", False),
        (12, "protocol version mismatch -- is your shell clean?", False),
        (1, "unknown option", False),
    ],
)
def test_what_rsync_can_be_used_for(code: int, words: str, usable: bool) -> None:
    assert _judge(code, words, ENDPOINT, "labctl pull") is usable


def test_a_255_is_a_failed_login_before_anything_was_sent_and_a_lost_link_after() -> None:
    words = "unexplained error (code 255)"
    with pytest.raises(ConnectError) as before:
        _judge(255, words, ENDPOINT, "labctl pull")
    assert not isinstance(before.value, LinkLostError)
    with pytest.raises(LinkLostError):
        _judge(255, words, ENDPOINT, "labctl pull", begun=True)
