"""The program as one file: built the same each time, started bare, answering through noise."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.agent import reply
from labctl.agent.runs import follow, images
from labctl.errors import (
    CommandError,
    DiskFullError,
    EngineError,
    LabError,
    NotFoundError,
    PolicyError,
    UsageError,
)
from labctl.model import Endpoint
from labctl.servers import agent as calling
from labctl.servers.agent import (
    MARK,
    NOT_INSTALLED,
    AgentClient,
    _ReplyParser,
    build_program,
    find_reply,
    list_program_files,
    program_name,
    require_success,
)
from labctl.transports import Result
from labctl.transports import bounded_output as kept_output
from labctl.transports.bounded_output import BoundedOutput
from labctl.transports.fake import FakeTransport
from labctl.wire.codec import to_json
from labctl.wire.files import PULLED, PulledRequest
from labctl.wire.runs import (
    FOLLOW_RUN,
    STATUS,
    FollowRunOpening,
    FollowRunRequest,
    StatusRequest,
)
from labctl.wire.verbs import Empty, ErrorReply

JSON = st.dictionaries(st.text(max_size=5), st.text() | st.integers() | st.none(), max_size=4)
QUIET = st.binary(max_size=40).filter(lambda noise: b"\x1e" not in noise)


def test_it_is_built_the_same_each_time() -> None:
    assert (program_name.__wrapped__(), build_program()) == (program_name(), build_program())
    with zipfile.ZipFile(io.BytesIO(build_program())) as archive:
        assert tuple((one, archive.read(one)) for one in archive.namelist()) == list_program_files()
    assert {"__main__.py", "agent/entrypoint.py", "agent/runs/entry.sh", "wire/boot_id.py"} <= {
        path for path, _ in list_program_files()
    }


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "remote.pyz"
    path.write_bytes(build_program())
    return path


def bare(archive: Path, verb: str, request: dict[str, Any]) -> subprocess.CompletedProcess[bytes]:
    """As on a server: no site-packages, nothing of our environment but PATH and a fresh HOME."""
    return subprocess.run(
        [sys.executable, "-S", "-E", "-W", "error", str(archive), verb],
        input=json.dumps(request).encode() + b"\n",
        capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": str(archive.parent)},
        cwd="/",
        check=False,
    )


def test_it_starts_with_nothing_but_the_standard_library(archive: Path) -> None:
    done = bare(archive, "status", {"lab": "digits", "lab_id": "0f1e2d3c4b5a"})
    assert (done.returncode, done.stderr) == (0, b"")
    said = find_reply(done.stdout)
    assert said is not None
    assert said["runs"] == []


def test_it_refuses_what_it_does_not_know(archive: Path) -> None:
    done = bare(archive, "dance", {})
    assert done.returncode == 1
    with pytest.raises(UsageError, match="no verb 'dance'"):
        require_success("dance", find_reply(done.stderr), done.returncode, "")


def test_failures_come_as_values(archive: Path) -> None:
    about = {"lab": "digits", "lab_id": "0f1e2d3c4b5a", "run": "none"}
    for verb in ("cancel", "follow"):
        done = bare(archive, verb, about)
        assert done.returncode == 1
        with pytest.raises(NotFoundError, match="run none does not exist"):
            require_success(verb, find_reply(done.stderr), 1, "")


def by_shell(home: Path, prelude: str = "") -> FakeTransport:
    """A server whose commands a shell of this machine runs, after what its start-up files say."""

    def answer(line: str, stdin: bytes) -> Result:
        done = subprocess.run(
            ["sh", "-c", prelude + line],
            input=stdin,
            capture_output=True,
            env={"PATH": os.environ["PATH"], "HOME": str(home)},
            check=False,
        )
        return Result(
            code=done.returncode, stdout=done.stdout.decode(), stderr=done.stderr.decode()
        )

    return FakeTransport().reply("", answer)


def test_it_is_installed_at_the_first_call_alone(tmp_path: Path) -> None:
    before = "unset PYTHONDONTWRITEBYTECODE; echo Welcome; printf 'no newline'; echo warn >&2; "
    transport = by_shell(tmp_path, before)
    remote = AgentClient(transport)
    for _ in range(2):
        assert remote.call(STATUS, StatusRequest("digits", "0f1e2d3c4b5a")).runs == ()
    assert len(transport.sent) == 4, "asked, installed, asked again; then asked once"
    (folder,) = (tmp_path / ".cache" / "labctl").iterdir()
    assert folder.name == program_name()
    assert folder.stat().st_mode & 0o077 == 0
    assert list(folder.glob("agent/__pycache__/*.pyc")), "compiled once, not at every call"


def test_an_answer_may_say_nothing() -> None:
    transport = FakeTransport().reply("", Result(code=0, stdout=reply.encode_line({}).decode()))
    assert AgentClient(transport).call(PULLED, PulledRequest("digits", "1")) == Empty()


def test_a_stream_is_installed_too_and_hands_on_the_bytes(tmp_path: Path) -> None:
    run = tmp_path / "labctl" / "digits" / "runs" / "r1"
    (run / ".labctl").mkdir(parents=True)
    (run / "logs").mkdir()
    (run.parents[1] / ".labctl").mkdir()
    (run.parents[1] / ".labctl" / "id").write_text("0f1e2d3c4b5a")
    (run / ".labctl" / "record.json").write_text('{"id": "r1", "state": "exited"}')
    (run / "logs" / "run.log").write_text("one\ntwo\nthree\n")
    first: list[FollowRunOpening] = []
    got = bytearray()
    closing = AgentClient(by_shell(tmp_path, "echo Welcome; ")).stream(
        FOLLOW_RUN,
        FollowRunRequest("digits", "0f1e2d3c4b5a", "r1", tail=2, wait=True),
        on_reply=first.append,
        on_bytes=got.extend,
    )
    assert [one.offset for one in first] == [4]
    assert got == b"two\nthree\n"
    assert closing.run.state == "exited"


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("policy", PolicyError), ("disk", DiskFullError), ("engine", EngineError),
        ("gpu", LabError), ("anything", LabError),
    ],
)  # fmt: skip
def test_kinds_of_failure(kind: str, error: type[LabError]) -> None:
    body = to_json(ErrorReply(reply.Failure(kind, "what", "why", "hint").report))
    with pytest.raises(error) as caught:
        require_success("x", body, 1, "")
    assert (caught.value.what, caught.value.why, caught.value.hint) == ("what", "why", "hint")


def test_a_program_that_died_is_told_with_its_last_words() -> None:
    with pytest.raises(CommandError, match="exit 1") as caught:
        require_success("plan", None, 1, "MemoryError\n")
    assert caught.value.why == "MemoryError"
    with pytest.raises(CommandError, match="no python3"):
        require_success("plan", None, 127, "sh: python3: not found")
    assert NOT_INSTALLED not in (1, 126, 127, 255)


@given(noise=QUIET, bodies=st.lists(JSON, min_size=1, max_size=3), after=QUIET)
def test_the_last_reply_is_found_whatever_surrounds_it(
    noise: bytes, bodies: list[dict[str, Any]], after: bytes
) -> None:
    output = noise + b"".join(reply.encode_line(body) for body in bodies) + after
    assert find_reply(output) == bodies[-1]


@given(noise=QUIET)
def test_no_reply_is_none(noise: bytes) -> None:
    assert find_reply(noise) is None


@pytest.mark.parametrize("hostile", [b"[" * 100_000, b"[]", b"7", b'"x"', b"null"])
def test_a_server_that_answers_nonsense_is_told_of(hostile: bytes) -> None:
    """A student is root on their server, and the keeper reads what it answers."""
    assert find_reply(MARK + hostile + b"\n") is None
    splitter = _ReplyParser(lambda reply: None, lambda block: None)
    with pytest.raises(LabError, match="this version does not understand"):
        splitter.feed(MARK + hostile + b"\n")


def test_what_never_answers_is_not_heard_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "MOST_REPLY_BYTES", 1000)
    splitter = _ReplyParser(lambda reply: None, lambda block: None)
    with pytest.raises(LabError, match="does not understand"):
        splitter.feed(b"x" * 1001)
    kept = BoundedOutput(Endpoint(host="h", port=22, user="u"))
    monkeypatch.setattr(kept_output, "MOST_BYTES", 1000)
    kept.out(b"x" * 600)
    kept.err(b"y" * 400)
    assert (len(kept.stdout), len(kept.stderr)) == (600, 400)
    with pytest.raises(LabError, match="on u@h printed more than"):
        kept.err(b"z")


@pytest.mark.parametrize("cut", [MARK, MARK + b'{"a":', MARK + b'{"a": 1'])
def test_a_reply_cut_short_is_none(cut: bytes) -> None:
    assert find_reply(b"banner\n" + cut) is None


@given(data=st.data(), noise=QUIET, body=JSON, rest=st.binary(max_size=200))
def test_a_stream_may_be_cut_anywhere(
    data: st.DataObject, noise: bytes, body: dict[str, Any], rest: bytes
) -> None:
    output = noise + reply.encode_line(body) + rest
    cuts = sorted(data.draw(st.sets(st.integers(1, len(output)), max_size=20)) | {len(output)})
    replies: list[dict[str, Any]] = []
    got = bytearray()
    splitter = _ReplyParser(replies.append, got.extend)
    for start, end in zip([0, *cuts], cuts, strict=False):
        splitter.feed(output[start:end])
    assert (replies, bytes(got)) == ([body], rest)


@given(content=st.binary(max_size=300).map(lambda b: b.replace(b"\r", b"\n")), lines=st.integers(1))
def test_where_the_last_lines_begin(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, lines: int
) -> None:
    log = tmp_path_factory.getbasetemp() / "tail.log"
    log.write_bytes(content)
    rows = content.split(b"\n")
    kept = rows[:-1] if content.endswith(b"\n") else rows
    expected = b"\n".join(kept[-lines:]) + (b"\n" if content.endswith(b"\n") else b"")
    assert content[follow.find_tail_offset(log, lines) :] == expected


def test_the_tail_of_a_log_longer_than_a_block(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    rows = [b"%07d " % number + b"x" * 99 + b"\n" for number in range(3 * follow.BLOCK // 108)]
    content = b"".join(rows)
    log.write_bytes(content)
    for lines in (1, 2000, 2427, 2428, 5000, len(rows) - 1, len(rows), len(rows) + 1):
        assert content[follow.find_tail_offset(log, lines) :] == b"".join(rows[-lines:])
    log.write_bytes(b"y" * (2 * follow.BLOCK + 5))
    assert follow.find_tail_offset(log, 1) == 0


CLASSIC = [
    "Step 1/3 : FROM base",
    " ---> 123",
    "Step 2/3 : RUN pip install nothing-of-this-name",
    "ERROR: no matching distribution",
    "The command returned a non-zero code: 1",
]
BUILDKIT = [
    "#1 [internal] load build definition",
    "#6 [2/3] RUN pip install nothing-of-this-name",
    "#6 1.234 ERROR: no matching distribution",
    "#6 ERROR: process did not complete successfully: exit code: 1",
]


@pytest.mark.parametrize(("lines", "begins"), [(CLASSIC, 2), (BUILDKIT, 1)])
def test_the_failing_step_and_its_last_lines(lines: list[str], begins: int) -> None:
    assert images.pick_failing_lines(lines) == lines[begins:]
    long = [*lines[: begins + 1], *(f"row {n}" for n in range(50)), *lines[begins + 1 :]]
    told = images.pick_failing_lines(long)
    assert (told[0], len(told)) == (lines[begins], 13)
    assert told[1:] == long[-12:]


def test_a_build_without_steps_shows_its_end() -> None:
    assert images.pick_failing_lines(["error: bad flag"]) == ["error: bad flag"]
    assert images.pick_failing_lines([]) == []
