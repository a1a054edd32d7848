"""The scripted fake: it records, answers in order, and does not let a gap pass."""

from __future__ import annotations

import pytest

from labctl.errors import CommandError, LinkLostError
from labctl.shell import command
from labctl.transports import Result
from labctl.transports.fake import FakeTransport, SentCommand


def test_it_records_and_answers_by_the_first_pattern() -> None:
    fake = FakeTransport().reply("^docker ps", "a\n").reply("docker", code=1)
    assert fake.run(command("docker", "ps"), stdin=b"x").stdout == "a\n"
    assert fake.run("docker info", check=False).code == 1
    assert fake.sent == [SentCommand("docker ps", b"x"), SentCommand("docker info")]
    assert fake.lines == ["docker ps", "docker info"]


def test_it_raises_what_the_script_says() -> None:
    fake = FakeTransport().reply("^true", LinkLostError("gone")).reply("^false", code=1)
    with pytest.raises(LinkLostError):
        fake.run("true")
    with pytest.raises(CommandError):
        fake.run("false")


def test_a_reply_may_depend_on_what_is_sent() -> None:
    fake = FakeTransport().reply("cat", lambda line, stdin: Result(code=0, stdout=stdin.decode()))
    assert fake.run("cat", stdin=b"in").stdout == "in"


def test_a_line_without_a_reply_is_a_gap_in_the_script() -> None:
    with pytest.raises(AssertionError, match="rm -rf"):
        FakeTransport().run("rm -rf x")


def test_stream_hands_over_both_streams() -> None:
    fake = FakeTransport().reply("x", Result(code=2, stdout="out", stderr="err"))
    got: list[bytes] = []
    assert fake.stream("x", on_stdout=got.append, on_stderr=got.append) == 2
    assert got == [b"out", b"err"]
    fake.close()
    assert fake.closed
