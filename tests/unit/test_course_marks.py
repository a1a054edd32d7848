"""Rubrics, marks, excuses, missing submissions and statistics of a course."""

from __future__ import annotations

import csv
import hashlib
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from submission_bed import DUE_AT, FILES, make_receiver, packed

from labctl.config.times import local_time_text
from labctl.courses.grade_store import GradeStore
from labctl.courses.grades import list_grades
from labctl.courses.grading.record import GradeRecord
from labctl.courses.grading.results import GradeResults, GraderTest
from labctl.courses.marking import (
    give_mark,
    list_excuses,
    list_marking_tasks,
    set_excuse,
    take_back_mark,
    write_readable_files,
)
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.records.grade_statistics import compute_statistics
from labctl.courses.records.gradebook import Grade, Stamp, excuse
from labctl.courses.records.marks import ItemMark, MarkedSubmission, RubricItem, list_notes
from labctl.courses.records.timetable import find_zone
from labctl.courses.records.writeback import _write_plain
from labctl.courses.release import release_grades
from labctl.courses.statistics import read_statistics
from labctl.errors import ConfigError, LabError, NotFoundError, PolicyError, UsageError
from labctl.submissions.receiver import Receiver

COURSE = """\
course: ml
assignments:
  hw3:
    due: "2026-11-28T23:59:00+01:00"
    late: 48h
    penalty: 10
    points: 90
    grade: {command: sh grade.sh}
    rubric: {code: 20, presentation: 30}
  essay: {points: 10, rubric: {text: 10}}
  plain: {}
"""
ROSTER = """\
id,name,email,team,section,active
alice,Alice,,,,yes
bob,Bob,,team-1,,yes
carol,Carol,,team-1,,yes
dan,Dan,,,,yes
"""
HOSTILE = "good\x1b[2J <script>alert(1)</script>\u202etxt"


@pytest.fixture
def folder(tmp_path: Path) -> CourseFolder:
    course = tmp_path / "ml"
    course.mkdir()
    (course / "course.yaml").write_text(COURSE)
    (course / "roster.csv").write_text(ROSTER)
    make_private(course)
    make_receiver(course / ".course", late="48h", penalty="10")
    return CourseFolder(course)


def hand_in(folder: CourseFolder, student: str, at: float = DUE_AT - 100) -> None:
    receiver = Receiver(folder.drop, lambda: at)
    data = packed({**FILES, "code/x.ipynb": b"{}"}, student=student)
    about = ("hw3", student, hashlib.sha256(data).hexdigest(), len(data))
    receiver.begin(*about)
    receiver.write(*about, 0, data)
    receiver.finish(*about)


def grade(folder: CourseFolder, seat: str, score: float = 30.0, penalty: int = 0) -> None:
    """Store an automatic grade of 40 points, as grading does."""
    (students,) = (one.students for one in folder.list_seats() if one.name == seat)
    record = GradeRecord(
        assignment="hw3", seat=seat, students=students, student=students[0], number=1,
        received="2026-11-28T10:00:00Z", bundle_sha256="ab" * 32, key="k", outcome="graded",
        points=40.0, score=score, penalty=penalty, late_s=3600 if penalty else 0,
        raw=GradeResults(score=score, tests=(GraderTest(name="acc", score=score, max_score=40.0),)),
    )  # fmt: skip
    GradeStore(folder, "hw3").store_grade(record, fresh=True)


def grade_of(folder: CourseFolder, student: str, assignment: str = "hw3") -> Grade:
    return next(one for one in list_grades(folder, assignment) if one.student == student)


def test_the_automatic_grading_is_worth_what_the_rubric_is_not(folder: CourseFolder) -> None:
    points = {name: one.graded_points for name, one in folder.config.assignments.items()}
    assert points == {"hw3": 40, "essay": 0, "plain": 100}


def test_a_grade_is_complete_once_every_item_is_marked(folder: CourseFolder) -> None:
    hand_in(folder, "alice")
    grade(folder, "alice", penalty=10)
    first = give_mark(folder, "hw3", "alice", "code", "17.5", by="ann")
    assert (first.students, first.before) == (("alice",), None)
    waiting = grade_of(folder, "alice")
    assert (waiting.score, waiting.problem) == (None, "not marked yet: presentation")
    give_mark(folder, "hw3", "alice", "presentation", "30", by="ben", note="clear")
    done = grade_of(folder, "alice")
    assert (done.automatic, done.score, done.final, done.problem) == (30, 77.5, 68.5, "")
    assert [(one.name, one.mark and one.mark.by) for one in done.items] == [
        ("code", "ann"),
        ("presentation", "ben"),
    ]
    take_back_mark(folder, "hw3", "alice", "code", by="ann")
    assert grade_of(folder, "alice").problem == "not marked yet: code"


def test_a_mark_is_for_the_team_unless_it_is_for_one_alone(folder: CourseFolder) -> None:
    assert give_mark(folder, "essay", "bob", "text", "8").students == ("bob", "carol")
    give_mark(folder, "essay", "carol", "text", "10", alone=True)
    finals = {one.student: one.final for one in list_grades(folder, "essay")}
    assert finals == {"alice": None, "bob": 8, "carol": 10, "dan": None}
    with pytest.raises(UsageError, match="a team"):
        give_mark(folder, "essay", "team-1", "text", "10", alone=True)


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (("hw3", "alice", "code", "20.5"), UsageError, "worth 20 points"),
        (("hw3", "alice", "code", "-1"), UsageError, "not a number of points"),
        (("hw3", "alice", "code", "nan"), UsageError, "not a number of points"),
        (("hw3", "alice", "cod", "1"), NotFoundError, "did you mean code"),
        (("hw3", "alic", "code", "1"), NotFoundError, "did you mean alice"),
        (("hw4", "alice", "code", "1"), NotFoundError, "did you mean hw3"),
        (("plain", "alice", "code", "1"), ConfigError, "no rubric"),
        (("hw3", "alice", "code", "\u0661\u0667"), UsageError, "is not a number of points"),
    ],
)
def test_wrong_marks_are_refused_and_leave_no_line(
    folder: CourseFolder, words: tuple[str, ...], kind: type[LabError], says: str
) -> None:
    with pytest.raises(kind) as refused:
        give_mark(folder, *words)
    assert says in f"{refused.value.what} {refused.value.why}"
    assert refused.value.hint
    assert folder.ledger.list_entries(kind="mark") == []


def test_another_graders_mark_is_not_replaced_by_accident(folder: CourseFolder) -> None:
    give_mark(folder, "hw3", "alice", "code", "15", by="ann")
    with pytest.raises(PolicyError, match="has 15 points for code already") as refused:
        give_mark(folder, "hw3", "alice", "code", "10", by="ben")
    assert "ann" in refused.value.why
    give_mark(folder, "hw3", "alice", "code", "16", by="ann")
    replaced = give_mark(folder, "hw3", "alice", "code", "10", by="ben", replace=True)
    assert replaced.before is not None
    assert (replaced.before.points, replaced.before.by) == (16, "ann")
    given = [(line.by, line.detail["points"]) for line in folder.ledger.list_entries(kind="mark")]
    assert given == [("ann", 15), ("ann", 16), ("ben", 10)]


GRADER = """\
import sys
import time
from pathlib import Path
from labctl.courses.marking import give_mark
from labctl.courses.records.folder import CourseFolder
from labctl.errors import PolicyError
folder, me, other = CourseFolder(Path(sys.argv[1])), sys.argv[2], sys.argv[3]
print("ready", flush=True)
sys.stdin.readline()
lost = 0
for points in range(20):
    give_mark(folder, "hw3", "alice" if me == "ann" else "dan", "code", str(points), by=me)
    try:
        give_mark(folder, "hw3", "team-1", "code", str(points), by=me, note=str(points))
    except PolicyError as error:
        assert other in error.why, error.why
        lost += 1
print(lost)
"""


def test_two_graders_at_once_lose_no_mark(folder: CourseFolder) -> None:
    graders = [
        subprocess.Popen(
            [sys.executable, "-c", GRADER, str(folder.path), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for names in (("ann", "ben"), ("ben", "ann"))
    ]
    for one in graders:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in graders:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    refused = [int(one.communicate(timeout=60)[0]) for one in graders]
    lines = folder.ledger.list_entries(kind="mark")
    assert sorted(refused) == [0, 20], "whoever was second for the team was refused each time"
    assert len(lines) == 20 + 20 + 20 * 2
    assert len({line.by for line in lines if line.student in ("bob", "carol")}) == 1
    assert [line.n for line in lines] == list(range(1, 81))


def test_notes_cannot_steer_a_terminal_or_a_page(folder: CourseFolder) -> None:
    hand_in(folder, "alice")
    grade(folder, "alice")
    for item in ("code", "presentation"):
        give_mark(folder, "hw3", "alice", item, "5", note=HOSTILE, by="ann")
    assert release_grades(folder, "hw3").students == ("alice",)
    feedback = Receiver(folder.drop).feedback("hw3", "alice")
    assert feedback is not None
    for text in (feedback.page, feedback.text):
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "<script>" not in feedback.page
    assert "&lt;script&gt;" in feedback.page


def test_a_release_names_what_is_not_marked_and_publishes_the_total(folder: CourseFolder) -> None:
    for student in ("alice", "carol"):
        hand_in(folder, student)
    grade(folder, "alice", penalty=10)
    grade(folder, "team-1")
    with pytest.raises(NotFoundError, match="no complete grade") as refused:
        release_grades(folder, "hw3")
    assert "alice: not marked yet: code, presentation" in refused.value.why
    assert refused.value.hint == "labctl course mark hw3 --next"
    for item in ("code", "presentation"):
        give_mark(folder, "hw3", "alice", item, "20", by="ann", note="fine")
    give_mark(folder, "hw3", "bob", "code", "20")
    give_mark(folder, "hw3", "bob", "presentation", "20", alone=True)
    found = release_grades(folder, "hw3", by="staff")
    assert found.students == ("alice", "bob")
    assert found.waiting == ("carol", "dan")
    assert found.unmarked == ("carol: not marked yet: presentation",)
    feedback = Receiver(folder.drop).feedback("hw3", "alice")
    assert feedback is not None
    assert (feedback.score, feedback.points) == (61, 90)
    assert "code: 20 of 20 (ann): fine" in feedback.text
    assert "1 h late, -10%: final score 61" in feedback.text
    assert "<td>code</td><td>20</td><td>20</td><td>fine - marked by ann</td>" in feedback.page
    assert Receiver(folder.drop).feedback("hw3", "carol") is None


def test_a_change_after_the_release_names_the_automatic_grading_too(folder: CourseFolder) -> None:
    hand_in(folder, "alice")
    grade(folder, "alice", score=30)
    for item in ("code", "presentation"):
        give_mark(folder, "hw3", "alice", item, "10", by="ann")
    release_grades(folder, "hw3")
    grade(folder, "alice", score=40)
    give_mark(folder, "hw3", "alice", "code", "12", by="ann")
    change = grade_of(folder, "alice", "hw3").change
    assert change == "code marked 12, automatic grading 40 instead of 30"


def test_a_released_mark_changes_only_with_another_release(folder: CourseFolder) -> None:
    give_mark(folder, "essay", "alice", "text", "5", by="ann")
    release_grades(folder, "essay")
    give_mark(folder, "essay", "alice", "text", "7", by="ann")
    shown = grade_of(folder, "alice", "essay")
    assert (shown.final, shown.change) == (5, "text marked 7")
    assert shown.unreleased is not None
    assert shown.unreleased.final == 7
    (before,) = shown.items
    assert before.mark is not None
    assert before.mark.points == 5
    with pytest.raises(PolicyError, match="nothing was released"):
        release_grades(folder, "essay")


def test_what_is_unmarked_is_listed_with_its_files(folder: CourseFolder) -> None:
    assert list_marking_tasks(folder, "hw3") == []
    hand_in(folder, "alice", at=time.time() - 60)
    hand_in(folder, "carol", at=time.time() - 60)
    give_mark(folder, "hw3", "alice", "code", "1")
    tasks = {
        one.seat: [item.name for item in one.items] for one in list_marking_tasks(folder, "hw3")
    }
    assert tasks == {"alice": ["presentation"], "team-1": ["code", "presentation"]}
    (seat,) = folder.choose_seats(["team-1"])
    paths = write_readable_files(folder, "hw3", seat)
    assert {"code", "notebook"} <= set(paths)
    assert paths["notebook"].read_bytes() == b"{}"
    assert not (paths["code"].parent / "model").exists()
    assert write_readable_files(folder, "hw3", seat) == paths


def test_one_students_own_mark_survives_that_of_the_team(folder: CourseFolder) -> None:
    give_mark(folder, "essay", "carol", "text", "10", alone=True, by="ann")
    (task,) = list_marking_tasks(folder, "essay")
    assert (task.seat, task.unmarked) == ("team-1", {"text": ("bob",)})
    only = task.unmarked["text"]
    given = give_mark(folder, "essay", task.seat, "text", "7", by="ann", only=only)
    assert given.students == ("bob",)
    finals = {one.student: one.final for one in list_grades(folder, "essay")}
    assert (finals["bob"], finals["carol"]) == (7, 10)


def test_earlier_notes_are_offered_again_the_most_frequent_first(folder: CourseFolder) -> None:
    for student, note in (("alice", "rare"), ("dan", "often"), ("team-1", "often")):
        give_mark(folder, "hw3", student, "code", "1", note=note)
    give_mark(folder, "hw3", "dan", "presentation", "1", note="of another item")
    lines = folder.ledger.list_entries()
    assert list_notes(lines, "hw3", "code", 5) == ["often", "rare"]


def test_an_excused_student_has_no_grade_and_no_zero(folder: CourseFolder) -> None:
    give_mark(folder, "essay", "alice", "text", "5")
    assert set_excuse(folder, "essay", "alice", excused=True, by="ann", why="ill") == ("alice",)
    assert set_excuse(folder, "essay", "alice", excused=True, by="ann", why="ill") == ()
    assert set_excuse(folder, "essay", "team-1", excused=True) == ("bob", "carol")
    excused = grade_of(folder, "alice", "essay")
    assert (excused.final, excused.excused, excused.problem) == (None, True, "excused: ill")
    with pytest.raises(NotFoundError, match="no graded submission"):
        release_grades(folder, "essay")
    assert [one.student for one in list_excuses(folder, "essay")] == ["alice", "bob", "carol"]
    set_excuse(folder, "essay", "alice", excused=False)
    assert grade_of(folder, "alice", "essay").final == 5
    with pytest.raises(NotFoundError, match="no student or team"):
        set_excuse(folder, "essay", "nobody", excused=True)


def test_missing_counts_as_zero_once_the_assignment_has_closed(folder: CourseFolder) -> None:
    for due, final in (("2099-01-01T00:00:00Z", None), ("2020-01-01T00:00:00Z", 0.0)):
        text = f'course: ml\nmissing: 0\nassignments:\n  old: {{due: "{due}"}}\n'
        text += f'  off: {{due: "{due}", missing: none}}\n'
        (folder.path / "course.yaml").write_text(text)
        folder.refresh()
        assert grade_of(folder, "alice", "old").final == final
        assert grade_of(folder, "alice", "off").final is None
    set_excuse(folder, "old", "alice", excused=True)
    assert grade_of(folder, "alice", "old").final is None
    assert "counts as 0" in grade_of(folder, "bob", "old").problem


def test_labctls_own_table_has_the_marks_and_who_gave_them(folder: CourseFolder) -> None:
    give_mark(folder, "essay", "alice", "text", "5", by="ann")
    table = _write_plain(list_grades(folder, "essay"), "essay", True).decode()
    rows = list(csv.DictReader(table.splitlines()))
    assert (rows[0]["final"], rows[0]["text"], rows[0]["text_by"]) == ("5", "5", "ann")
    assert rows[1]["text"] == ""


def test_statistics_name_the_hardest_part(folder: CourseFolder) -> None:
    for student, code in (("alice", "20"), ("team-1", "5")):
        hand_in(folder, "carol" if student == "team-1" else student)
        grade(folder, student, score=40.0)
        give_mark(folder, "hw3", student, "code", code)
        give_mark(folder, "hw3", student, "presentation", "30")
    set_excuse(folder, "hw3", "dan", excused=True)
    found = read_statistics(folder, "hw3")
    assert (found.students, found.graded, found.excused) == (4, 3, 1)
    assert (found.median, found.lowest, found.highest) == (75, 75, 90)
    assert [one.students for one in found.bins] == [0, 0, 0, 0, 0, 0, 0, 0, 2, 1]
    assert (found.parts[0].name, found.parts[0].kind) == ("code", "item")
    assert {one.name for one in found.parts} == {"code", "presentation", "acc"}


def test_statistics_of_nothing_and_of_a_bonus_are_no_error() -> None:
    assert compute_statistics("hw", 10.0, [], []).bins == ()
    bonus = Grade(student="a", score=15.0, points=10.0)
    assert compute_statistics("hw", 10.0, [bonus], []).bins[-1].students == 1


def test_a_mark_above_what_the_item_is_worth_now_does_not_count(folder: CourseFolder) -> None:
    give_mark(folder, "essay", "alice", "text", "10")
    text = "course: ml\nassignments:\n  essay: {points: 5, rubric: {text: 5}}\n"
    (folder.path / "course.yaml").write_text(text)
    folder.refresh()
    assert grade_of(folder, "alice", "essay").score is None


def test_the_page_of_a_rubric_says_when_the_submission_arrived(folder: CourseFolder) -> None:
    # hw3 as a rubric alone: no grading has stored the bundle's hash.
    text = COURSE.replace("    grade: {command: sh grade.sh}\n", "").replace(
        "points: 90", "points: 50"
    )
    (folder.path / "course.yaml").write_text(text)
    folder.refresh()
    hand_in(folder, "alice")
    for student in ("alice", "dan"):
        give_mark(folder, "hw3", student, "code", "20")
        give_mark(folder, "hw3", student, "presentation", "30")
    release_grades(folder, "hw3")
    pages = []
    for student in ("alice", "dan"):
        feedback = Receiver(folder.drop).feedback("hw3", student)
        assert feedback is not None
        pages.append(feedback.page)
    zone = find_zone(folder.config)
    assert f"Received {local_time_text(DUE_AT - 100, zone)}.</p>" in pages[0]
    assert "<h1>hw3, submission 1</h1>" in pages[0]
    # Without a submission there is nothing to say about one.
    assert "<h1>hw3</h1><p><strong>50</strong> of 50 points.</p>" in pages[1]


def test_a_grade_names_the_marks_that_are_older_than_the_submission() -> None:
    at = datetime(2026, 11, 28, 10, 0, tzinfo=UTC).timestamp()
    items = (
        RubricItem(name="code", points=20, mark=ItemMark(points=17, at=at - 1)),
        RubricItem(name="logs", points=20, mark=ItemMark(points=17, at=at + 1)),
        RubricItem(name="talk", points=20),
    )
    stamp = Stamp(number=5, received="2026-11-28T10:00:00Z")
    newer = Grade(student="alice", score=None, points=60, stamp=stamp, items=items)
    assert newer.outdated_marks_text == "marked before submission 5 arrived: code"
    assert newer.items_to_mark == ("code", "talk")
    assert excuse(newer, "ill").outdated_marks_text == ""
    items = tuple(
        RubricItem(name=name, points=20, mark=ItemMark(points=1, at=at + 9, submission=one))
        for name, one in (
            ("code", MarkedSubmission(number=4, received="2026-11-28T09:00:00Z")),
            # another student of the team, who counts their own submissions
            ("logs", MarkedSubmission(number=5, received="2026-11-28T09:30:00Z")),
            ("talk", MarkedSubmission()),
            ("plot", MarkedSubmission(number=5, received="2026-11-28T10:00:00Z")),
        )
    )
    assert msgspec.structs.replace(newer, items=items).outdated_marks_text == (
        "marked for submission 4 instead of 5: code; marked before submission 5 arrived: logs, talk"
    )
    nothing = msgspec.structs.replace(newer, stamp=Stamp())
    assert nothing.outdated_marks_text == ""
