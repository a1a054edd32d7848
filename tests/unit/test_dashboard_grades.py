"""Grades on the dashboard: what people decided is added to the automatic grading."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl.config.course_schema import AssignmentConfig
from labctl.courses.grading.record import FILE, RESULTS, GradeRecord, encode
from labctl.courses.grading.results import GradeResults
from labctl.courses.records.excuses import draft_excuse_line
from labctl.courses.records.gradebook import Grade, Stamp
from labctl.courses.records.ledger_entries import CourseLedgerDraft, CourseLedgerEntry
from labctl.courses.records.marks import draft_mark_line
from labctl.courses.records.released_grades import draft_released_line
from labctl.courses.records.student import Student
from labctl.web import grades as web_grades
from labctl.web.grades import Grades, read_decisions
from labctl.web.ledger_view import LedgerView
from labctl.web.view import GradeView

ADA = Student(id="ada")
RULES = {"hw3": AssignmentConfig(points=100, rubric={"code": 20, "talk": 20})}


@pytest.fixture
def graded(tmp_path: Path) -> Path:
    """ada's submission was late: 55 points, and 10% of the assignment's points off."""
    place = tmp_path / "hw3" / "ada"
    place.mkdir(parents=True)
    record = GradeRecord(
        assignment="hw3", seat="ada", students=("ada",), student="ada", number=2, received="",
        bundle_sha256="", key="k", outcome="graded", points=60, penalty=10, score=49,
        raw=GradeResults(score=55, output="55 of 60 right"),
    )  # fmt: skip
    (place / FILE).write_bytes(encode(record))
    return tmp_path


def read(folder: Path, *drafts: CourseLedgerDraft) -> GradeView:
    entries = [
        msgspec.convert({**msgspec.to_builtins(draft), "n": n, "at": 0.0}, CourseLedgerEntry)
        for n, draft in enumerate(drafts)
    ]
    ledger = LedgerView()
    ledger.read(entries)
    grades = Grades(folder)
    grades.list_owners(RULES)
    [grade] = grades.read_grades(ADA, RULES, read_decisions(ledger, RULES))
    return grade


def mark(item: str, points: float) -> CourseLedgerDraft:
    return draft_mark_line("hw3", "ada", "ada", item, points, by="ann", note="clear")


def test_a_grade_without_all_marks_is_not_complete(graded: Path) -> None:
    grade = read(graded, mark("code", 17))
    assert (grade.score, grade.points) == (None, 100)
    assert grade.feedback.splitlines() == [
        "not marked yet: talk",
        "code: 17 of 20 (ann): clear",
        "talk: not marked yet, of 20",
        "55 of 60 right",
    ]


def test_marks_are_added_and_the_penalty_is_of_all_points(graded: Path) -> None:
    grade = read(graded, mark("code", 17), mark("talk", 20))
    assert (grade.score, grade.automatic, grade.number) == (82, 55, 2)


def test_marks_without_an_automatic_grade_are_shown(tmp_path: Path) -> None:
    grade = read(tmp_path, mark("code", 17), mark("talk", 20))
    assert grade.score is None
    assert "code: 17 of 20 (ann): clear" in grade.feedback
    assert not grade.released


def test_a_released_grade_of_a_rubric_alone_is_shown_as_released(tmp_path: Path) -> None:
    released = draft_released_line("hw3", Grade(student="ada", score=37, points=40), "ann")
    assert read(tmp_path, mark("code", 17), mark("talk", 20), released).released


def test_an_excused_student_has_no_score(graded: Path) -> None:
    excuse = draft_excuse_line("hw3", "ada", "ada", excused=True, by="ann", why="ill")
    grade = read(graded, mark("code", 17), mark("talk", 20), excuse)
    assert (grade.score, grade.feedback, grade.excused) == (None, "excused: ill", True)


def test_only_a_grade_that_changed_is_computed_again(
    graded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class has thousands of grades, and a page is updated every few seconds."""
    computed: list[str] = []
    add_marks = web_grades.add_marks

    def count(grade: Grade, *parts: Any) -> Grade:
        computed.append(grade.student)
        return add_marks(grade, *parts)

    monkeypatch.setattr(web_grades, "add_marks", count)
    entries: list[CourseLedgerEntry] = []
    ledger, grades = LedgerView(), Grades(graded)
    grades.list_owners(RULES)

    def read_after(*drafts: CourseLedgerDraft) -> float | None:
        for draft in drafts:
            fields = {**msgspec.to_builtins(draft), "n": len(entries), "at": 0.0}
            entries.append(msgspec.convert(fields, CourseLedgerEntry))
        ledger.read(entries)
        [grade] = grades.read_grades(ADA, RULES, read_decisions(ledger, RULES))
        return grade.score

    assert read_after(mark("code", 17), mark("talk", 10)) == 72
    assert read_after() == read_after() == 72
    other = msgspec.structs.replace(mark("code", 1), student="bob", seat="bob")
    assert read_after(other) == 72
    assert len(computed) == 1
    assert read_after(mark("talk", 12)) == 74
    assert len(computed) == 2


def release(score: float) -> CourseLedgerDraft:
    grade = Grade(student="ada", score=score, points=100, stamp=Stamp(number=2, penalty=10))
    return draft_released_line("hw3", grade, "ann")


def test_a_mark_after_the_release_shows_what_the_student_still_sees(graded: Path) -> None:
    marks = (mark("code", 17), mark("talk", 20))
    assert not read(graded, *marks, release(92)).has_unseen_change
    grade = read(graded, *marks, release(92), mark("code", 12))
    assert (grade.score, grade.released_score, grade.has_unseen_change) == (77, 82, True)


def test_a_correction_by_hand_counts_on_the_pages_too(graded: Path) -> None:
    results = graded / "hw3" / "ada" / RESULTS
    results.write_text('{"score": 55, "output": "55 of 60 right"}')
    marks = (mark("code", 17), mark("talk", 20))
    assert read(graded, *marks).score == 82
    results.write_text('{"score": 58, "output": "3 more, as agreed"}')
    grade = read(graded, *marks)
    assert (grade.score, grade.automatic) == (85, 58)
    assert grade.feedback.endswith("3 more, as agreed")
    assert not read(graded, *marks, release(95)).has_unseen_change


def test_no_file_is_looked_for_where_nobody_was_graded(
    graded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = {**RULES, **{f"hw{number}": RULES["hw3"] for number in range(4, 16)}}
    looked: list[str] = []
    stat = os.stat

    def count(path: Any, **options: Any) -> os.stat_result:
        looked.append(str(path))
        return stat(path, **options)

    grades, ledger = Grades(graded), LedgerView()
    grades.list_owners(rules)
    monkeypatch.setattr(web_grades.os, "stat", count)
    assert len(grades.read_grades(ADA, rules, read_decisions(ledger, rules))) == 1
    monkeypatch.undo()
    assert {Path(path).parent.parent.name for path in looked} == {"hw3"}
