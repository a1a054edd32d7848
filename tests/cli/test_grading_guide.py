"""The transcripts of docs/grading.md that need no server, replayed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transcripts import Session, list_steps, make_session, replay

from labctl.courses.creation import import_roster
from labctl.courses.marking import give_mark, set_excuse
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.regrades import RegradeDesk
from labctl.courses.release import release_grades
from labctl.events import SilentReporter
from labctl.submissions.receiver import Receiver

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from canvas_server import ASSIGNMENT, TOKEN, Canvas, serve_canvas
from canvas_server import COURSE as CANVAS_COURSE
from marking_bed import FILES
from submission_bed import DUE_AT, handed_in, make_receiver, packed
from test_course_commenting import COURSE

GUIDE = Path(__file__).parents[2] / "docs" / "grading.md"
COURSES = Path(__file__).parents[1] / "guide"
HOMEWORK = {"hw1": ("8", "6"), "hw2": ("5", ""), "hw3": ("9", "4")}
AUTOMATIC = {"alice": 37, "bob": 30}


def test_the_page_shows_what_labctl_prints(tmp_path: Path) -> None:
    session = make_session(tmp_path, COURSES / "ml", {})
    make_private(session.directory)
    assert "\n".join(replay(GUIDE, "here", session)) == ""


def test_the_page_shows_marks_regrades_and_the_transfer_to_canvas(tmp_path: Path) -> None:
    with serve_canvas(Canvas({11: 70.0, 12: None, 13: None}, points=90)) as canvas:
        session = make_session(tmp_path, COURSES / "marks", {"CANVAS_TOKEN": TOKEN})
        prepare_course(session, canvas.url)
        assert "\n".join(replay(GUIDE, "marks", session)) == ""
        assert canvas.scores == {11: 80.0, 12: 75.0, 13: None}
        assert canvas.excused == {13}


def test_the_page_shows_totals(tmp_path: Path) -> None:
    course = tmp_path / "course"
    course.mkdir()
    rules = "".join(f"  {name}: {{points: 10, rubric: {{text: 10}}}}\n" for name in HOMEWORK)
    group = f"homework: {{assignments: [{', '.join(HOMEWORK)}], drop_lowest: 1}}"
    (course / "course.yaml").write_text(
        f"course: ml\nassignments:\n{rules}assignment_groups: {{{group}}}\n"
    )
    (course / "roster.csv").write_text("id,name\nalice,Alice Adams\nbob,Bob Jones\n")
    session = make_session(tmp_path, course, {})
    folder = CourseFolder(session.directory)
    make_private(folder.path)
    for name, points in HOMEWORK.items():
        for student, given in zip(("alice", "bob"), points, strict=True):
            if given:
                give_mark(folder, name, student, "text", given)
    set_excuse(folder, "hw2", "bob", excused=True)
    assert "\n".join(replay(GUIDE, "totals", session)) == ""


def test_the_page_shows_comments_on_lines(tmp_path: Path) -> None:
    course = tmp_path / "course"
    course.mkdir()
    (course / "course.yaml").write_text(COURSE)
    (course / "roster.csv").write_text("id,name\nalice,Alice\n")
    session = make_session(tmp_path, course, {})
    make_private(session.directory)
    make_receiver(session.directory / ".course", late="48h", penalty="10")
    drop = Receiver(session.directory / ".course" / "drop", lambda: DUE_AT - 100)
    handed_in(drop, packed(FILES, student="alice"), "alice")
    assert "\n".join(replay(GUIDE, "comments", session)) == ""


def prepare_course(session: Session, canvas_url: str) -> None:
    """Grade two submissions, mark and release the first, whose student asks for a regrade."""
    folder = CourseFolder(session.directory)
    make_private(folder.path)
    Receiver(folder.drop).init()
    with folder.config.path.open("a") as file:
        numbers = f"course: {CANVAS_COURSE}, assignments: {{hw3: {ASSIGNMENT}}}"
        file.write(f"canvas: {{url: '{canvas_url}', {numbers}}}\n")
    import_roster(folder, folder.path / "canvas.csv", SilentReporter())
    for student, score in AUTOMATIC.items():
        results = folder.grades / "hw3" / student / "results.json"
        results.parent.mkdir(parents=True)
        results.write_text(json.dumps({"score": score}))
    for item, points in (("code", "15"), ("presentation", "25")):
        give_mark(folder, "hw3", "alice", item, points, by="ann")
    give_mark(folder, "hw3", "bob", "code", "18", by="ben")
    release_grades(folder, "hw3", by="ann")
    RegradeDesk(folder).record_request("hw3", "alice", "The names in train.py are explained.")


def test_every_transcript_of_the_page_is_replayed() -> None:
    # Guards the replay: a pattern that finds no transcript would let it pass.
    text = GUIDE.read_text()
    assert len(list_steps(GUIDE, "here")) > 4
    assert len(list_steps(GUIDE, "server")) > 0
    assert len(list_steps(GUIDE, "marks")) > 8
    assert list_steps(GUIDE, "totals")
    assert len(list_steps(GUIDE, "comments")) > 5
    assert text.count("```console\n") == text.count("<!-- transcript: ")
