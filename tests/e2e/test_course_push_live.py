"""`labctl course push` to a student's real server: files arrive and are updated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from labctl.courses.records.folder import make_private

pytestmark = [pytest.mark.engine, pytest.mark.long]
COURSE = """\
course: ml-2026
server: {provider: local, gpu: none}
image: IMAGE
per_student: {ttl: 1h, max_ttl: 2h}
assignments:
  hw1: {template: hw1}
"""
COMMAND_S = 300
Staff = Callable[..., Any]


@pytest.fixture
def staff(tmp_path: Path, base_image: str, server_image: str, small_image: str) -> Iterator[Staff]:
    """`staff("push")`: the standard output of `labctl course push` in a course with one student."""
    path = tmp_path / "ml-2026"
    (path / "hw1").mkdir(parents=True)
    (path / "course.yaml").write_text(COURSE.replace("IMAGE", small_image))
    (path / "roster.csv").write_text("id,name,email,team,section,active\nalice,Alice,,,,yes\n")
    make_private(path)
    environ = {**os.environ, "HOME": str(tmp_path / "home"), "LABCTL_BASE_IMAGE": base_image}
    Path(environ["HOME"]).mkdir()

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "labctl", "-C", str(path), "course", *words],
            env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=COMMAND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    try:
        yield run
    finally:
        run("down", "--yes", "--discard")


def test_files_of_an_assignment_reach_a_running_server(staff: Staff, tmp_path: Path) -> None:
    template = tmp_path / "ml-2026" / "hw1"
    (template / "train.py").write_text("one\n")
    (template / "net.py").write_text("one\n")
    (template / "run.sh").write_text("#!/bin/sh\n")
    (template / "run.sh").chmod(0o755)
    staff("up", "--yes")
    (seat,) = json.loads(staff("push", "--json"))["seats"]
    assert (seat["error"], [one["assignment"] for one in seat["starters"]]) == ("", ["hw1"])
    listing = staff("ssh", "alice", "--", "cd ~/labctl/*/code && stat -c '%a %n' *")
    assert set(listing.split("\n")) >= {"644 net.py", "755 run.sh", "644 train.py"}

    staff("ssh", "alice", "--", "cd ~/labctl/*/code && echo mine > train.py")
    for name in ("train.py", "net.py"):
        (template / name).write_text("two\n")
    output = staff("push")
    assert "assignments' files in /lab/code: 1 updated, on 1 server" in output
    left = "! alice: train.py of hw1 was changed there; the course's version is in"
    assert left in " ".join(output.split())
    texts = staff("ssh", "alice", "--", "cd ~/labctl/*/code && cat net.py train.py train.py.c*")
    assert texts.split() == ["two", "mine", "two"]
    assert "/lab/code" not in staff("push"), "a second push has nothing to do or to say"
    # The student's own files are saved; those of the course are not.
    saved = staff("down", "--yes")
    assert "2 files edited on the server" in saved, saved
