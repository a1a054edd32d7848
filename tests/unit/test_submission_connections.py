"""What one student's connection may take on the receiver's machine."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from submission_bed import make_receiver

from labctl.courses.records.folder import make_private
from labctl.errors import BusyError
from labctl.submissions.connection_limits import MAX_CONNECTIONS, MAX_MEMORY_BYTES, hold_connection

HELLO = b'{"do": "hello", "assignment": "hw3"}\n'


def command(folder: Path, kind: str) -> list[str]:
    """The forced command of a receiver, or of a course's keeper, for alice."""
    if kind == "receive":
        make_receiver(folder)
        return ["receive", "serve", str(folder / "drop"), "alice"]
    course = folder / "ml"
    course.mkdir()
    (course / "course.yaml").write_text("course: ml\nassignments: {hw3: {}}\n")
    (course / "roster.csv").write_text("id,name,email,team,section,active\nalice,,,,,yes\n")
    make_private(course)
    make_receiver(course / ".course")
    return ["course", "door", str(course), "alice"]


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="there is no /proc here")
@pytest.mark.parametrize("kind", ["receive", "course"])
def test_a_connection_has_its_bound_of_memory(tmp_path: Path, kind: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "labctl", *command(tmp_path, kind)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(HELLO)
        process.stdin.flush()
        reply = json.loads(process.stdout.readline())
        assert reply["hello"]["student"] == "alice"
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        process.stdin.close()
    (row,) = (line for line in limits.splitlines() if line.startswith("Max address space"))
    assert row.split()[3] == str(MAX_MEMORY_BYTES)


def test_a_student_with_too_many_connections_waits_and_nobody_else(tmp_path: Path) -> None:
    words = command(tmp_path, "receive")
    places = tmp_path / "drop" / "connections"
    with ExitStack() as held:
        for _ in range(MAX_CONNECTIONS):
            held.enter_context(hold_connection(places, "alice"))
        with pytest.raises(BusyError, match="has 12 connections"):
            held.enter_context(hold_connection(places, "alice"))
        with hold_connection(places, "bob"):
            pass
        done = subprocess.run(
            [sys.executable, "-P", "-m", "labctl", *words], input=HELLO, capture_output=True
        )
        assert json.loads(done.stdout)["error"]["kind"] == "BusyError"
    with hold_connection(places, "alice"):
        pass
