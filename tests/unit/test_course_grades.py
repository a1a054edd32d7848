"""Grades in the form in which they are taken back: no other grade, no other person is touched."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from course_rosters import CANVAS, CLASSROOM, MOODLE, NBGRADER, PLAIN, WORKSHEET, table_of

from labctl.courses.grading.results import parse_results
from labctl.courses.records.gradebook import Grade, Stamp, points_text, read_grades
from labctl.courses.records.roster_formats import detect_format
from labctl.courses.records.roster_import import compare
from labctl.courses.records.student import Student
from labctl.courses.records.writeback import GradeExport, write_back
from labctl.errors import UsageError
from labctl.web.grades import _read_grade

LATE = Stamp(number=2, received="2026-11-29T10:00:00Z", late_s=36_060, penalty=10)


def back(text: str, scores: dict[str, float | None], to: str = "", **more: Any) -> GradeExport:
    """What is written into the table for these students' scores; ada was late."""
    table = table_of(text)
    diff = compare(table, "roster.csv")
    grades = [
        Grade(
            student=one.id,
            score=scores.get(one.id),
            points=100.0,
            stamp=LATE if one.id.startswith("ada") else Stamp(number=1),
        )
        for one in diff.students
    ]
    return write_back(
        table, detect_format(table), "hw3", grades, diff.keys.keys[diff.format], to=to, **more
    )


def rows(written: GradeExport, delimiter: str = ",") -> list[list[str]]:
    text = written.data.decode("utf-8-sig")
    return list(csv.reader(io.StringIO(text), delimiter=delimiter))


def test_canvas_gets_its_identities_and_the_one_column_by_its_number() -> None:
    written = back(CANVAS, {"ada": 90.0, "jmueller": 70.5})
    assert rows(written) == [
        ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "hw3 (103)"],
        ["    Points Possible", "", "", "", "", "100"],
        ["Lovelace, Ada", "11", "s001", "ada@uni.edu", "Lab A", "80"],
        ["Müller, Jörg", "12", "s002", "jmueller", "Lab B", "70.5"],
    ]
    assert written.notes == ()


def test_who_has_no_grade_keeps_what_the_export_had() -> None:
    had = CANVAS.replace("Lab B,8,,", "Lab B,8,55,")
    assert rows(back(had, {"ada": 90.0}))[3][-1] == "55"


def test_a_column_that_canvas_does_not_know_is_said() -> None:
    written = back(CANVAS.replace("hw3 (103)", "other (103)"), {"ada": 1.0})
    assert rows(written)[0][-1] == "hw3"
    assert "create a new assignment" in written.notes[0]
    twice = CANVAS.replace("hw1 (101)", "HW 3 (101)")
    assert "no single column" in back(twice, {"ada": 1.0}).notes[0]


def test_the_file_is_written_as_it_came() -> None:
    data = CANVAS.replace("\n", "\r\n").encode("utf-8-sig")
    table = table_of(data)
    diff = compare(table, "c.csv")
    written = write_back(table, "canvas", "hw3", [], diff.keys.keys["canvas"])
    assert written.data.startswith(b"\xef\xbb\xbfStudent,ID,")
    assert written.data.count(b"\r\n") == written.data.count(b"\n") > 1
    wide = table_of(CANVAS.encode("utf-16"))
    again = write_back(wide, "canvas", "hw3", [], compare(wide, "c").keys.keys["canvas"])
    assert again.data.decode("utf-16").startswith("Student,ID,")


def test_moodle_gets_its_item_or_its_worksheet_filled_in() -> None:
    written = rows(back(MOODLE, {"ada": 90.0, "joerg-mueller": 50.0}))
    assert written[0][-1] == "Assignment: hw3 (Real)"
    assert [(row[2], row[-1]) for row in written[1:]] == [("4711", "80"), ("4712", "50")]
    sheet = rows(back(WORKSHEET, {"ada": 90.0}))
    before = list(csv.reader(io.StringIO(WORKSHEET)))
    assert sheet[0] == before[0]
    assert sheet[1] == [*before[1][:4], "80", *before[1][5:]]


def test_classroom_and_nbgrader_get_their_own_columns() -> None:
    written = rows(back(CLASSROOM, {"ada-l": 90.0, "joerg": 10.0}))
    assert written[1:] == [
        ["hw3", "ada-l", "ada@uni.edu", "80", "100"],
        ["hw3", "", "joerg", "10", "100"],
    ]
    head, ben, hacker = rows(back(NBGRADER, {"bitdiddle": 33.25, "hacker": None}))
    row = dict(zip(head, ben, strict=True))
    assert (row["student_id"], row["raw_score"], row["score"]) == ("Bitdiddle", "33.25", "33.25")
    assert dict(zip(head, hacker, strict=True))["score"] == ""


def test_a_plain_roster_gets_one_column_more_and_the_same_one_again() -> None:
    written = back(PLAIN, {"ada": 90.0, "bob": 5.0}, penalty=False)
    assert [row[-1] for row in rows(written)] == ["hw3", "90", "5"]
    again = back(written.data.decode(), {"ada": 91.0}, penalty=False)
    assert [row[-1] for row in rows(again)] == ["hw3", "91", "5"]


def test_identities_of_another_system_are_never_made_up() -> None:
    with pytest.raises(UsageError, match="cannot be written for canvas") as raised:
        back(MOODLE, {"ada": 1.0}, to="canvas")
    assert "--format moodle   # or csv" in raised.value.hint
    with pytest.raises(UsageError) as raised:
        back(PLAIN, {"ada": 1.0}, to="canvas")
    assert raised.value.hint.splitlines()[0].endswith("--format csv")
    plain = rows(back(MOODLE, {"ada": 90.0}, to="csv"))
    assert plain[1][:7] == ["hw3", "ada", "", "90", "10", "80", "100"]


def test_who_is_not_in_the_newest_roster_is_named() -> None:
    table = table_of(CANVAS)
    diff = compare(table, "c.csv")
    grades = [Grade(student="eve", score=1.0, points=100.0)]
    written = write_back(table, "canvas", "hw3", grades, diff.keys.keys["canvas"])
    assert written.notes == ("not in the newest roster, so not written: eve",)


def results(grades: Path, name: str, body: object) -> None:
    place = grades / "hw3" / name
    place.mkdir(parents=True)
    (place / "results.json").write_text(body if isinstance(body, str) else json.dumps(body))


def test_grades_are_read_as_grading_left_them(tmp_path: Path) -> None:
    own = {"submission": 2, "received": "then", "late_s": 60, "penalty": 10, "counts": 80}
    results(tmp_path, "ada", {"score": 90, "extra_data": {"labctl": own, "mine": 1}})
    results(tmp_path, "t1", {"tests": [{"score": 1.5}, {"score": 2}, {"name": "no score"}]})
    results(tmp_path, "eve", "{")
    results(tmp_path, "fay", {"output": "it did not run"})
    results(tmp_path, "gus", {"score": "ninety"})
    students = [
        Student(id="ada"),
        Student(id="bob", team="t1"),
        Student(id="cy", team="t1"),
        *(Student(id=one) for one in ("eve", "fay", "gus", "hal", "ivy")),
    ]
    stamps = {"hal": Stamp(number=1), "ada": Stamp(number=7)}
    found = {
        one.student: one
        for one in read_grades(tmp_path, "hw3", 100.0, students, stamps, frozenset({"ada"}))
    }
    assert (found["ada"].score, found["ada"].final, found["ada"].stamp.number) == (90, 80, 2)
    assert found["ada"].released
    assert [found[one].score for one in ("bob", "cy")] == [3.5, 3.5]
    assert {one: found[one].problem for one in ("eve", "fay", "gus", "hal", "ivy")} == {
        "eve": "its results.json cannot be read",
        "fay": "its results.json has no score",
        "gus": "its results.json cannot be read",
        "hal": "not graded yet",
        "ivy": "nothing was submitted",
    }
    assert found["hal"].final is None


@pytest.mark.parametrize(
    ("score", "penalty", "final", "text"),
    [
        (90.0, 0, 90.0, "90"),
        (5.0, 10, 0.0, "0"),
        (87.5, 20, 67.5, "67.5"),
        (100 / 3, 0, 100 / 3, "33.333"),
    ],
)
def test_the_penalty_is_of_the_points_and_no_grade_is_below_nothing(
    score: float, penalty: int, final: float, text: str
) -> None:
    one = Grade(student="ada", score=score, points=100.0, stamp=Stamp(penalty=penalty))
    assert one.final == pytest.approx(final)
    assert points_text(one.final) == text
    assert points_text(None) == ""


HOSTILE_RESULTS = {
    "deep": "[" * 100_000,
    "deep extra": '{"score": 1, "extra_data": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "infinite": '{"score": 1e999}',
    "not a number": '{"score": NaN}',
    "another kind": '{"score": "ninety"}',
    "a list": "[]",
    "no UTF-8": '{"score": "\udcff"}',
    "a stamp without UTF-8": '{"score": 1, "extra_data": {"labctl": {"received": "\udcfc"}}}',
    "tests of another kind": '{"tests": [{"score": "5"}, {"score": 3}]}',
    "a stamp of another kind": '{"score": 1, "extra_data": {"labctl": {"penalty": "all"}}}',
    "too large": '{"score": 1, "output": "' + "x" * (4 * 1024**2) + '"}',
}


@pytest.mark.parametrize("name", HOSTILE_RESULTS)
def test_hostile_results_are_no_grade_for_the_gradebook_and_the_dashboard(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / "hw3" / "ada" / "results.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(HOSTILE_RESULTS[name].encode("utf-8", "surrogateescape"))
    ada = Student(id="ada")
    [grade] = read_grades(tmp_path, "hw3", 100.0, [ada], {})
    shown = _read_grade(file, file.stat().st_size, "hw3", 100.0)
    assert (grade.score, shown.score) == (None, None)
    assert grade.problem
    assert shown.feedback == grade.problem


@pytest.mark.parametrize(
    ("text", "score", "output"),
    [
        ('{"score": 2.5, "output": "good"}', 2.5, "good"),
        ('{"score": "2.5", "output": "good"}', 2.5, "good"),  # as some graders write a number
        ('{"tests": [{"score": 1}, {"score": 2}, {"name": 5}], "output": 7}', 3.0, ""),
        ('{"score": 4, "output": "sch\udcf6n"}', 4.0, "sch\ufffdn"),  # of an editor with Latin-1
        ('{"score": 0, "tests": [{"score": 9}], "output": "' + "y" * 5000 + '"}', 0.0, "y" * 2000),
    ],
)
def test_the_dashboard_shows_the_grade_of_the_gradebook(
    text: str, score: float, output: str, tmp_path: Path
) -> None:
    file = tmp_path / "hw3" / "ada" / "results.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    [grade] = read_grades(tmp_path, "hw3", 100.0, [Student(id="ada")], {})
    shown = _read_grade(file, file.stat().st_size, "hw3", 100.0)
    assert (grade.score, shown.score, shown.feedback) == (score, score, output)
    graded = parse_results(file.read_text(errors="replace"), 100.0)
    assert (graded.score, graded.output[:2000]) == (score, output)


def test_a_damaged_record_is_shown_as_one(tmp_path: Path) -> None:
    file = tmp_path / "grade.json"
    file.write_bytes(b'{"version": 1, "seat": "\xff"}')
    shown = _read_grade(file, file.stat().st_size, "hw3", 100.0)
    assert (shown.score, shown.feedback) == (None, "the record is from another version of labctl")
