"""Marks, excuses, free days, regrade requests and released grades of before."""

from __future__ import annotations

from pathlib import Path

import pytest
from frozen import TESTS, Frozen

from labctl.courses.collect import collect
from labctl.courses.grades import list_grades
from labctl.courses.marking import list_excuses, list_marking_tasks
from labctl.courses.records.folder import CourseFolder
from labctl.courses.regrades import list_regrades
from labctl.submissions.receiver import Receiver


@pytest.fixture
def folder(tmp_path: Path) -> CourseFolder:
    return CourseFolder(Frozen(tmp_path, TESTS / "fixtures" / "marks").unpack("course"))


def test_marks_and_their_graders_still_count(folder: CourseFolder) -> None:
    grades = {one.student: one for one in list_grades(folder, "hw1")}
    alice = grades["alice"]
    assert (alice.score, alice.stamp.penalty, alice.stamp.free_days.used) == (28, 0, 3)
    assert [(one.name, one.mark and (one.mark.points, one.mark.by)) for one in alice.items] == [
        ("code", (8, "ann")),
        ("talk", (20, "ben")),
    ]
    assert alice.unreleased is not None
    assert (alice.unreleased.score, alice.change) == (29, "code marked 9")
    assert (grades["bob"].score, grades["carol"].problem) == (25, "not marked yet: talk")
    assert [one.seat for one in list_marking_tasks(folder, "hw1")] == ["team-1"]


def test_excuses_and_late_days_still_hold(folder: CourseFolder) -> None:
    assert [(one.student, one.why) for one in list_excuses(folder)] == [("bob", "ill")]
    grades = {one.student: one for one in list_grades(folder, "hw2")}
    assert (grades["alice"].final, grades["bob"].excused) == (8, True)
    late = {one.seat: one for one in collect(folder, "hw1").submissions}["alice"]
    assert (late.late_s, late.penalty, late.free_days.text) == (
        3 * 86_400 - 100,
        0,
        "uses 3 of 4 free days",
    )


def test_requests_and_answers_are_still_read(folder: CourseFolder) -> None:
    answered, waiting = list_regrades(folder, "hw1")
    assert (answered.student, answered.answer, answered.accepted) == ("alice", "it does: 9", True)
    assert (waiting.student, waiting.text, waiting.is_open) == ("bob", "why 15?", True)


def test_released_feedback_has_the_marks(folder: CourseFolder) -> None:
    feedback = Receiver(folder.drop).feedback("hw1", "alice")
    assert feedback is not None
    assert "code: 8 of 10 (ann) clear names" in feedback.text
    assert "uses 3 of 4 free days: final score 28" in feedback.text
