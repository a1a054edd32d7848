"""The transcripts of docs/own-project.md and docs/student.md that need no server, replayed."""

from __future__ import annotations

import re
from pathlib import Path

from guide_session import GUIDE, make_guide_session
from transcripts import list_steps, make_session, matches, parse_steps, replay

STUDENT_PAGE = GUIDE.with_name("student.md")


def test_the_guide_shows_what_labctl_prints(tmp_path: Path) -> None:
    assert "\n".join(replay(GUIDE, "here", make_guide_session(tmp_path))) == ""


def test_the_student_guide_creates_the_sample(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    session = make_session(tmp_path, tmp_path / "empty", {})
    assert "\n".join(replay(STUDENT_PAGE, "here", session)) == ""
    assert (session.directory / "digits" / "train.py").exists()


def test_every_transcript_of_the_guide_is_replayed() -> None:
    # Guards the replay: a pattern that finds no transcript would let it pass.
    text = GUIDE.read_text()
    assert len(list_steps(GUIDE, "here")) > 5
    assert text.count("```console\n") == text.count("<!-- transcript: ")
    assert len(list_steps(STUDENT_PAGE, "server")) == 7


def test_every_task_of_the_guide_has_a_transcript() -> None:
    _, *tasks = re.split(r"^## ", GUIDE.read_text(), flags=re.MULTILINE)
    assert len(tasks) == 8
    assert [task.partition("\n")[0] for task in tasks if "<!-- transcript: " not in task] == []


def test_a_transcript_is_commands_and_what_varies() -> None:
    (first, second) = parse_steps("$ cat <<END\n> text\n> END\ntext\n$ true\n")
    assert (first.command, first.output) == ("cat <<END\ntext\nEND\n", "text\n")
    assert (second.command, second.output) == ("true\n", "")
    assert matches("run …: done\n…\nend\n", "run r1: done\nmore\nand more\nend\n")
    assert matches("…\nend\n", "end\n")
    assert not matches("run …: done\n", "run r1: failed\n")
    assert not matches("run …\n", "run r1\nmore\n")
    assert not matches("", "more\n")
