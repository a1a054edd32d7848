"""Grades sent to Canvas: what is compared, what is sent, and what happens when it goes wrong."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from labctl.courses import canvas_connection
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.ledger_entries import CourseLedgerDraft

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from canvas_server import ASSIGNMENT, COURSE, TOKEN, Canvas, serve_canvas

Labctl = Callable[..., Any]
EXPORT = """\
Student,ID,SIS User ID,SIS Login ID,Section
    Points Possible,,,,
"Lovelace, Ada",11,s001,ada@uni.edu,Lab A
"Müller, Jörg",12,s002,jmueller,Lab B
"Hopper, Grace",13,s003,grace,Lab B
"Turing, Alan",14,s004,alan,Lab B
"""
SCORES = {"ada": 90.0, "jmueller": 70.5, "grace": 60.0}
SEND = ("course", "grades", "hw3", "--to", "canvas", "--send")


@pytest.fixture
def canvas() -> Iterator[Canvas]:
    with serve_canvas(Canvas({11: None, 12: None, 13: None, 14: None, 99: 5.0})) as served:
        yield served


@pytest.fixture
def course(home: Path, labctl: Labctl, canvas: Canvas, monkeypatch: pytest.MonkeyPatch) -> Path:
    (home / "canvas.csv").write_text(EXPORT)
    monkeypatch.chdir(home)
    assert labctl("course", "init", "ml", "--roster", "canvas.csv").code == 0
    (home / "ml" / "course.yaml").write_text(
        "course: ml\nassignments: {hw3: {}}\n"
        f"canvas: {{url: '{canvas.url}', course: {COURSE}, assignments: {{hw3: {ASSIGNMENT}}}}}\n"
    )
    monkeypatch.chdir(home / "ml")
    for student, score in SCORES.items():
        grade(home / "ml", student, score)
    assert labctl("secret", "set", "CANVAS_TOKEN", stdin=f"{TOKEN}\n").code == 0
    monkeypatch.setattr(canvas_connection, "THROTTLED_PAUSE_S", 0.01)
    return home / "ml"


def grade(course: Path, student: str, score: float, *, released: bool = True) -> None:
    """Store a grade as another grader would, and what a release writes about it."""
    file = course / ".course" / "grades" / "hw3" / student / "results.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"score": score}))
    if released:
        detail = {"assignment": "hw3", "seat": student, "score": score, "points": 100.0}
        detail |= {"stamp": {}, "corrected": False}
        line = CourseLedgerDraft(kind="released", student=student, detail=detail)
        CourseFolder(course).ledger.append_all([line])


def test_a_comparison_sends_nothing_and_shows_what_would_change(
    course: Path, labctl: Labctl, canvas: Canvas
) -> None:
    canvas.scores[13] = 55.0
    grade(course, "alan", 40, released=False)
    said = labctl("course", "grades", "hw3", "--to", "canvas")
    assert said.code == 0
    rows = [line.split() for line in said.out.splitlines()[1:]]
    assert rows == [
        ["ada", "Ada", "Lovelace", "-", "90"],
        ["jmueller", "Jörg", "Müller", "-", "70.5"],
        ["grace", "Grace", "Hopper", "55", "60"],
    ]
    assert "Nothing was sent.\n  next: labctl course grades hw3 --to canvas --send\n" in said.err
    assert "not released yet (labctl course grades hw3 --release): alan" in said.err
    assert canvas.posts == 0
    assert sum("/submissions?" in path for _, path in canvas.requests) == 3, "pages of two"


def test_grades_are_sent_once(course: Path, labctl: Labctl, canvas: Canvas) -> None:
    said = labctl(*SEND)
    assert (said.code, "sent 3 grades to Canvas" in said.err) == (0, True)
    assert canvas.scores == {11: 90.0, 12: 70.5, 13: 60.0, 14: None, 99: 5.0}
    [line] = CourseFolder(course).ledger.list_entries(kind="canvas")
    assert line.detail["grades"] == {"ada": "90", "jmueller": "70.5", "grace": "60"}
    again = labctl(*SEND)
    assert (again.code, canvas.posts) == (0, 1)
    assert "0 to send, 3 grades already there" in again.err


def test_a_grade_that_canvas_has_is_replaced_only_after_a_yes(
    course: Path, labctl: Labctl, canvas: Canvas
) -> None:
    canvas.scores[11] = 88.0
    said = labctl(*SEND)
    assert (said.code, canvas.posts) == (3, 0)
    assert "nothing was sent" in said.err
    assert "use --yes to answer yes" in said.err
    assert labctl(*SEND, "--yes").code == 0
    assert canvas.scores[11] == 90.0


def test_who_was_excused_or_has_left_canvas_keeps_what_is_there(
    course: Path, labctl: Labctl, canvas: Canvas
) -> None:
    canvas.excused.add(11)
    del canvas.scores[12]
    canvas.deducted[99] = 1.0
    said = labctl(*SEND)
    assert (said.code, canvas.scores[11], canvas.scores[13]) == (0, None, 60.0)
    assert "excused in Canvas, so not sent: ada" in said.err
    assert "not in an imported roster of it: jmueller" in said.err
    assert "Canvas's own late policy" in said.err


def test_an_excuse_is_sent_once_and_taken_back_with_the_grade(
    course: Path, labctl: Labctl, canvas: Canvas
) -> None:
    canvas.scores[13] = 55.0
    for student in ("grace", "alan"):
        assert labctl("course", "excuse", "hw3", student, "--why", "ill").code == 0
    said = labctl("course", "grades", "hw3", "--to", "canvas")
    rows = [line.split() for line in said.out.splitlines()[1:]]
    assert rows[2:] == [
        ["grace", "Grace", "Hopper", "55", "EX"],
        ["alan", "Alan", "Turing", "-", "EX"],
    ]
    assert (labctl(*SEND).code, canvas.excused) == (3, set()), "a grade would be replaced"
    assert labctl(*SEND, "--yes").code == 0
    assert (canvas.excused, canvas.scores[13]) == ({13, 14}, None)
    again = labctl(*SEND)
    assert (again.code, canvas.posts) == (0, 1)
    assert "0 to send, 4 grades already there" in again.err
    assert labctl("course", "excuse", "hw3", "grace", "--undo").code == 0
    said = labctl(*SEND, "--yes")
    assert (said.code, canvas.excused, canvas.scores[13]) == (0, {14}, 60.0)
    assert ["grace", "Grace", "Hopper", "EX", "60"] in [
        row.split() for row in said.out.splitlines()
    ]
    assert canvas.posts == 2


def test_after_a_failure_the_rest_is_sent(
    course: Path, labctl: Labctl, canvas: Canvas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labctl.courses.canvas.BATCH", 1)
    canvas.drop_after = 1
    said = labctl(*SEND)
    assert said.code == 75
    assert f"no answer from {canvas.url}" in said.err
    assert "shows what is still to be sent" in said.err
    assert (canvas.scores[11], canvas.scores[12]) == (90.0, None)
    canvas.drop_after = 10**9
    assert labctl(*SEND).code == 0
    assert canvas.scores == {11: 90.0, 12: 70.5, 13: 60.0, 14: None, 99: 5.0}
    assert canvas.posts == 4, "one of them was dropped"


def test_what_canvas_does_not_take_is_named(course: Path, labctl: Labctl, canvas: Canvas) -> None:
    canvas.refused.add(12)
    said = labctl(*SEND)
    assert (said.code, canvas.scores[11]) == (1, 90.0)
    assert "Canvas rejected the grades of: jmueller" in said.err
    body = json.loads(labctl(*SEND, "--json").out)["canvas"]
    assert (body["sent"], body["failed"], body["same"]) == (0, ["jmueller"], 2)


@pytest.mark.parametrize("status", [429, 403])
def test_a_throttled_request_is_repeated(
    course: Path, labctl: Labctl, canvas: Canvas, status: int
) -> None:
    canvas.first = 2 * [(status, {"X-Rate-Limit-Remaining": "0.0"}, "403 (Rate Limit Exceeded)")]
    assert labctl(*SEND).code == 0
    assert canvas.scores[11] == 90.0


def test_the_token_goes_nowhere_else_and_is_never_shown(
    course: Path, labctl: Labctl, canvas: Canvas, caplog: pytest.LogCaptureFixture
) -> None:
    with serve_canvas(Canvas({})) as elsewhere, caplog.at_level(logging.DEBUG):
        target = elsewhere.url.replace("127.0.0.1", "localhost")
        canvas.first = [(302, {"Location": f"{target}/api/v1/"}, "")]
        redirected = labctl(*SEND)
        canvas.next_host = target
        paged = labctl(*SEND)
        assert elsewhere.requests == []
    for said in (redirected, paged):
        assert said.code == 3
        assert "Canvas refers to another address" in said.err
        assert TOKEN not in said.err + said.out
    assert TOKEN not in caplog.text
    assert TOKEN not in (course / "course.yaml").read_text()
    assert canvas.tokens == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"points": 10.0}, 2, "hw3 has 10 points in Canvas"),
        ({"published": False}, 2, "hw3 is not published in Canvas"),
        ({"grading_type": "pass_fail"}, 2, "no points in Canvas"),
        ({"first": [(404, {}, "{}")]}, 2, f"no assignment {ASSIGNMENT} in the course {COURSE}"),
        ({"first": [(403, {}, "{}")]}, 3, "does not let this token grade"),
        ({"first": [(500, {}, "{}")]}, 1, "Canvas reports an error"),
        ({"first": [(200, {}, "<html>")]}, 75, "no answer from"),
    ],
)
def test_errors_say_what_to_do(
    course: Path, labctl: Labctl, canvas: Canvas, change: dict[str, Any], code: int, says: str
) -> None:
    for name, value in change.items():
        setattr(canvas, name, value)
    said = labctl(*SEND)
    assert (said.code, says in said.err, canvas.posts) == (code, True, 0), said.err
    assert "next: " in said.err


def test_a_token_that_canvas_rejects_or_that_is_missing(
    course: Path, labctl: Labctl, canvas: Canvas
) -> None:
    assert labctl("secret", "list").out == "CANVAS_TOKEN\n"
    labctl("secret", "set", "CANVAS_TOKEN", stdin="wrong\n")
    said = labctl(*SEND)
    assert (said.code, "Canvas rejects the token" in said.err) == (3, True)
    labctl("secret", "remove", "CANVAS_TOKEN")
    said = labctl(*SEND)
    assert "no value for CANVAS_TOKEN" in said.err
    assert "next: labctl secret set CANVAS_TOKEN" in said.err


@pytest.mark.parametrize(
    ("canvas_lines", "says"),
    [
        ("{url: 'http://canvas.example.edu', course: 1}", "use https"),
        ("{url: 'https://ann:secret@canvas.example.edu', course: 1}", "not a site's address"),
        ("{url: 'https://c.example.edu', course: 1, assignments: {hw9: 2}}", "no assignment 'hw9'"),
        ("{url: 'https://c.example.edu', course: x}", "is not a number"),
    ],
)
def test_wrong_settings_are_refused(
    course: Path, labctl: Labctl, canvas_lines: str, says: str
) -> None:
    text = f"course: ml\nassignments: {{hw3: {{}}}}\ncanvas: {canvas_lines}\n"
    (course / "course.yaml").write_text(text)
    said = labctl("course", "grades", "hw3")
    assert (said.code, says in said.err) == (2, True), said.err


def test_options_that_do_not_fit_together(course: Path, labctl: Labctl) -> None:
    for words in (["--send"], ["--to", "canvas", "--format", "csv"]):
        assert labctl("course", "grades", "hw3", *words).code == 2


def test_without_canvas_ids_the_roster_is_missing(course: Path, labctl: Labctl) -> None:
    (course / ".course" / "keys.json").unlink()
    said = labctl(*SEND)
    assert (said.code, "no roster from Canvas was imported" in said.err) == (2, True)
    assert "labctl course roster FILE" in said.err
