"""course comment on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from marking_bed import FILES
from submission_bed import DUE_AT, handed_in, make_receiver, packed

from labctl.courses.records.folder import make_private
from labctl.submissions.receiver import Receiver

Labctl = Callable[..., Any]
COURSE = """\
course: ml
assignments:
  hw3: {due: "2026-11-28T23:59:00+01:00", late: 48h, points: 10, rubric: {code: 10}}
"""


@pytest.fixture
def run(tmp_path: Path, home: Path, labctl: Labctl) -> Labctl:
    course = tmp_path / "ml"
    course.mkdir()
    (course / "course.yaml").write_text(COURSE)
    (course / "roster.csv").write_text("id,name\nalice,Alice\nbob,Bob\n")
    make_private(course)
    make_receiver(course / ".course", late="48h", penalty="10")
    drop = Receiver(course / ".course" / "drop", lambda: DUE_AT - 100)
    handed_in(drop, packed(FILES, student="alice"), "alice")

    def run(*words: str, by: str = "ann") -> Any:
        return labctl("-C", str(course), "course", "--as", by, *words)

    return run


def test_a_line_is_commented_listed_and_removed(run: Labctl) -> None:
    added = run("comment", "hw3", "alice", "train.py:3", "Why 10?\x1b[2J")
    assert (added.code, added.out) == (0, "alice: commented on train.py:3 (1)\n")
    listed = run("comment", "hw3")
    assert listed.out.splitlines() == [
        "alice",
        "   1  train.py:3, submission 1, ann",
        "      Why 10?\ufffd[2J",
    ]
    (comment,) = json.loads(run("comment", "hw3", "alice", "--json").out)["comments"]
    assert (comment["file"], comment["line"], comment["by"]) == ("code/train.py", 3, "ann")
    assert run("comment", "hw3", "bob").out == "bob's submission for hw3 has no comments.\n"
    assert run("comment", "hw3", "--remove", "1", by="ben").code == 0
    again = run("comment", "hw3", "--remove", "1")
    assert again.code == 4
    assert "next: labctl course comment hw3" in again.err


def test_a_comment_on_a_released_grade_names_the_command_that_shows_it(run: Labctl) -> None:
    assert run("comment", "hw3").out == "hw3 has no comments.\n"
    run("mark", "hw3", "alice", "code", "8")
    run("grades", "hw3", "--release")
    added = run("comment", "hw3", "alice", "train.py:3", "Why 10?")
    assert added.err.splitlines() == [
        "alice can read this after the next release.",
        "  next: labctl course grades hw3 --release",
    ]


def test_saved_comments_are_used_by_their_number(run: Labctl) -> None:
    assert run("comment", "--saved").out == "The course has no saved comments.\n"
    assert run("comment", "--save", "Name this.").out == "   1  Name this.\n"
    assert run("comment", "hw3", "alice", "intro.ipynb:2", "--use", "1", by="ben").code == 0
    listed = run("comment", "hw3", "alice").out
    assert "intro.ipynb, cell 2, submission 1, ben" in listed
    assert "Name this." in listed
    assert json.loads(run("comment", "--saved", "--json").out)["saved"][0]["by"] == "ann"
    assert run("comment", "--forget", "1").code == 0
    assert run("comment", "hw3", "alice", "train.py:1", "--use", "1").code == 4


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("hw3", "alice", "train.py:3"), 2, "needs a text"),
        (("hw3", "alice", "train.py:3", "x", "--use", "1"), 2, "needs a text"),
        (("hw3", "alice", "train.py", "x"), 2, "does not name a line"),
        (("hw3", "alice", "train.py:99", "x"), 4, "the last one is 4"),
        (("hw3", "alice", "../course.yaml:1", "x"), 4, "has no file"),
        (("hw3", "bob", "train.py:1", "x"), 4, "no submission"),
        (("hw3", "alic", "train.py:1", "x"), 4, "did you mean alice?"),
        (("hw9",), 4, "hw9"),
        ((), 2, "an assignment is missing"),
    ],
)
def test_wrong_words_say_what_is_wrong(
    run: Labctl, words: tuple[str, ...], code: int, says: str
) -> None:
    result = run("comment", *words)
    assert result.code == code
    assert says in result.err
