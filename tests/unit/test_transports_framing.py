"""Frames around lines, run by real shells and cut at every byte."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.shell import command
from labctl.transports.framing import Frame, MarkedOutputParser, frame

MARK = b"\x01mark\x02"


def executed(
    framed: Frame, stdin: bytes = b""
) -> tuple[int, MarkedOutputParser, MarkedOutputParser, bytes, bytes]:
    done = subprocess.run(["sh", "-c", framed.line], input=stdin, capture_output=True, check=False)
    got: tuple[list[bytes], list[bytes]] = ([], [])
    out = MarkedOutputParser(framed.mark, got[0].append)
    err = MarkedOutputParser(framed.mark, got[1].append, twice=True)
    out.feed(done.stdout)
    err.feed(done.stderr)
    out.finish()
    err.finish()
    return done.returncode, out, err, b"".join(got[0]), b"".join(got[1])


@pytest.mark.parametrize("code", [0, 1, 7, 254, 255])
def test_the_code_passes_and_only_255_is_marked(code: int) -> None:
    got, out, err, stdout, stderr = executed(frame(f"echo a; echo b >&2; exit {code}"))
    assert (got, stdout, stderr) == (code, b"a\n", b"b\n")
    assert out.begun
    assert err.ended_255 == (code == 255)


@pytest.mark.parametrize(
    "line", ["exec true", "true # comment", "cat <<END\nx\nEND", "f() { return 0; }; f", "cd /; :"]
)
def test_any_line_may_stand_in_a_frame(line: str) -> None:
    assert executed(frame(line))[0] == 0


def test_a_line_that_is_no_shell_fails_by_itself() -> None:
    code, out, *_ = executed(frame("if then ("))
    assert code == 2
    assert not out.ended_255


def test_stdin_is_the_commands() -> None:
    assert executed(frame(command("cat")), b"in")[3] == b"in"


def test_marks_differ_from_frame_to_frame() -> None:
    assert frame("true").mark != frame("true").mark


@given(st.lists(st.binary(max_size=12)), st.binary(max_size=20), st.booleans())
def test_output_is_whole_wherever_it_is_cut(pieces: list[bytes], noise: bytes, ended: bool) -> None:
    """Pieces of marks included: bytes come out exactly as they went in."""
    body = MARK[:3].join(pieces)
    text = noise + MARK + body + (MARK if ended else b"")
    for step in (1, 3, len(text)):
        got: list[bytes] = []
        stream = MarkedOutputParser(MARK, got.append, twice=True)
        for at in range(0, len(text), step):
            stream.feed(text[at : at + step])
        stream.finish()
        assert (b"".join(got), stream.noise) == (body, noise)
        assert (stream.begun, stream.ended_255) == (True, ended)


def test_output_is_handed_over_at_once_but_for_a_possible_mark() -> None:
    got: list[bytes] = []
    stream = MarkedOutputParser(MARK, got.append, twice=True)
    stream.feed(MARK + b"abc")
    assert got == [b"abc"]
    stream.feed(b"def\x01ma")
    assert got == [b"abc", b"def"]
    stream.feed(b"!")
    assert got == [b"abc", b"def", b"\x01ma!"]


def test_a_second_mark_is_output_where_none_is_awaited() -> None:
    got: list[bytes] = []
    stream = MarkedOutputParser(MARK, got.append)
    stream.feed(b"banner" + MARK[:2])
    stream.feed(MARK[2:] + b"abc" + MARK)
    stream.feed(MARK[:3])
    assert got == [b"abc" + MARK, MARK[:3]]
    assert (stream.noise, stream.ended_255) == (b"banner", False)


def test_without_a_mark_everything_is_noise() -> None:
    stream = MarkedOutputParser(MARK, lambda chunk: pytest.fail(f"delivered {chunk!r}"))
    stream.feed(b"ssh: connect to host")
    stream.finish()
    assert not stream.begun
    assert stream.noise == b"ssh: connect to host"
