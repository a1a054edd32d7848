"""Free late days over a term, holidays, and the penalty that is left."""

from __future__ import annotations

import hashlib
import io
import json
from datetime import date, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from submission_bed import FILES, make_receiver, packed

from labctl.cli.submit_output import print_receipt, print_terms
from labctl.config import load_course
from labctl.config.times import Holiday, Moment
from labctl.courses.allowances import extend_due_time
from labctl.courses.collect import SeatSubmission, collect
from labctl.courses.grades import list_grades
from labctl.courses.marking import give_mark, set_excuse
from labctl.courses.publish import publish_assignments
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.records.free_days import LateWork, spend_free_days
from labctl.courses.records.timetable import class_hours, find_phase, list_pauses
from labctl.courses.regrades import RegradeDesk
from labctl.errors import ConfigError
from labctl.model import Value
from labctl.submissions.assignment import DeadlineStatus, judge
from labctl.submissions.receipt import KIND, Receipt, utc_text
from labctl.submissions.receiver import Receiver
from labctl.submissions.service import serve
from labctl.submissions.submit import Terms

DAY_S = 86_400
ZONE = ZoneInfo("Europe/Berlin")
DAYS = {"hw1": "01", "hw2": "08", "hw3": "15"}
RULE = "{per_day: 10%, at_most: 6d, free_days: 4}"
COURSE = "course: ml\nkeeper: {host: keeper.example}\nassignments:\n" + "".join(
    f'  {name}: {{due: "2026-11-{day}T12:00:00+01:00", late: {RULE}, points: 10, '
    "rubric: {text: 10}}\n"
    for name, day in DAYS.items()
)
ROSTER = "id,name,team\nalice,Alice,\nbob,Bob,team-1\ncarol,Carol,team-1\n"
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"


@pytest.fixture
def folder(tmp_path: Path) -> CourseFolder:
    course = tmp_path / "ml"
    course.mkdir()
    (course / "course.yaml").write_text(COURSE)
    (course / "roster.csv").write_text(ROSTER)
    make_private(course)
    make_receiver(course / ".course")
    folder = CourseFolder(course)
    publish_assignments(folder, HOST_KEY)
    return folder


def hand_in(folder: CourseFolder, assignment: str, student: str, late_s: int) -> None:
    due = folder.config.assignments[assignment].due
    assert due is not None
    receiver = Receiver(folder.drop, lambda: due.at + late_s)
    data = packed(FILES, student=student, assignment=assignment)
    about = (assignment, student, hashlib.sha256(data).hexdigest(), len(data))
    receiver.begin(*about)
    receiver.write(*about, 0, data)
    receiver.finish(*about)


def seat_of(folder: CourseFolder, assignment: str, seat: str) -> SeatSubmission:
    return next(one for one in collect(folder, assignment).submissions if one.seat == seat)


def test_free_days_are_spent_in_the_order_of_due_times(folder: CourseFolder) -> None:
    hand_in(folder, "hw3", "alice", 2 * DAY_S)
    hand_in(folder, "hw1", "alice", 3 * DAY_S - 100)
    hand_in(folder, "hw2", "alice", 3 * DAY_S)
    found = [seat_of(folder, name, "alice") for name in ("hw1", "hw2", "hw3")]
    assert [(one.free_days.used, one.penalty) for one in found] == [(3, 0), (1, 20), (0, 20)]
    assert found[0].free_days.text == "uses 3 of 4 free days"
    grade = next(one for one in list_grades(folder, "hw2") if one.student == "alice")
    assert (grade.stamp.penalty, grade.stamp.free_days.used) == (20, 1)
    give_mark(folder, "hw2", "alice", "text", "10")
    assert next(one.final for one in list_grades(folder, "hw2") if one.student == "alice") == 8


def greet(folder: CourseFolder, student: str, assignment: str) -> tuple[int, int]:
    """Return what a student's labctl learns: the free days of the term, and those left."""
    line = json.dumps({"do": "hello", "assignment": assignment}).encode() + b"\n"
    reply = io.BytesIO()
    course = RegradeDesk(folder)
    serve(Receiver(folder.drop), student, io.BytesIO(line), reply, course=lambda: course)
    hello = json.loads(reply.getvalue())["hello"]
    return hello["free_days"], hello["free_days_left"]


def test_a_student_learns_before_submitting_which_free_days_are_left(folder: CourseFolder) -> None:
    hand_in(folder, "hw1", "alice", 3 * DAY_S)
    hand_in(folder, "hw1", "bob", DAY_S)
    assert [greet(folder, "alice", name) for name in ("hw1", "hw2")] == [(4, 4), (4, 1)]
    assert greet(folder, "carol", "hw2") == (4, 3), "the team spent one"
    (folder.path / "course.yaml").write_text("course: [")
    folder.refresh()
    assert greet(folder, "alice", "hw2") == (0, 0), "submitting works all the same"


def make_terms(late_s: int, **changes: int) -> Terms:
    status = DeadlineStatus(due_at=1000, closes_at=None, accepted=True, late_s=late_s, penalty=30)
    values = {"late": 0, "penalty": 10, "max_bytes": 1, "now": 1000 + late_s, "number": 0}
    texts = {"assignment": "hw2", "course": "ml", "student": "alice", "hand_in": "ssh://x@y"}
    values |= {"grace_s": 600, "free_days": 4, "free_days_left": 1} | changes
    return Terms(due="1970-01-01T00:16:40+00:00", standing=status, **texts, **values)


@pytest.mark.parametrize(
    ("late_s", "changes", "says"),
    [
        (0, {}, "you have 1 of 4 free late days left"),
        (DAY_S, {}, "24 h late: uses 1 of 4 free days (0 left), no points off"),
        (3 * DAY_S - 100, {}, "late: uses 1 of 4 free days (0 left), 20% off"),
        (2 * DAY_S, {"free_days_left": 0}, "2 d late, 20% off, as no free day is left"),
        (2 * DAY_S, {"free_days": 0, "free_days_left": 0}, "2 d late, 20% off"),
        (2 * DAY_S, {"penalty": 0}, "you are 2 d late"),
    ],
)
def test_a_student_reads_what_counts_after_free_days(
    late_s: int, changes: dict[str, int], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_terms(make_terms(late_s, **changes))
    assert says in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("after_s", "late_s", "says"),
    [
        (-1, 0, "(on time)"),
        (300, 0, "(5 min after the due time, which counts as on time)"),
        (2 * DAY_S, 2 * DAY_S, "(2 d late: uses 1 of 4 free days (0 left), 10% off)"),
    ],
)
def test_a_receipt_shows_what_counts_with_its_reason(
    after_s: int, late_s: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = dict.fromkeys(("course", "run", "bundle_sha256", "manifest_sha256"), "x")
    texts |= {"assignment": "hw2", "student": "alice", "kind": KIND}
    times = {"received": utc_text(10**9 + after_s), "due": utc_text(10**9)}
    numbers = {"version": 1, "number": 1, "bundle_bytes": 1, "late_s": late_s, "penalty": 20}
    receipt = Receipt(**texts, **times, **numbers)
    terms = make_terms(0)
    print_receipt(receipt, terms.format_time, terms)
    assert says in " ".join(capsys.readouterr().out.split())
    print_receipt(receipt, terms.format_time)
    assert ("20% off before free days" in capsys.readouterr().out) == bool(late_s)


def test_an_extension_or_an_excuse_gives_the_days_back(folder: CourseFolder) -> None:
    hand_in(folder, "hw1", "alice", 3 * DAY_S)
    hand_in(folder, "hw2", "alice", 3 * DAY_S)
    assert seat_of(folder, "hw2", "alice").penalty == 20
    extend_due_time(folder, "hw1", "alice", "+2d")
    assert seat_of(folder, "hw2", "alice").penalty == 0
    extend_due_time(folder, "hw1", "alice", "0")
    assert seat_of(folder, "hw2", "alice").penalty == 20
    set_excuse(folder, "hw1", "alice", excused=True)
    assert seat_of(folder, "hw2", "alice").penalty == 0


def test_a_team_spends_the_days_that_each_of_its_students_has() -> None:
    alone = LateWork(assignment="a", free_days=3, days={"bob": 2}, members={"bob": ("bob",)})
    team = LateWork(assignment="b", free_days=3, days={"t": 2}, members={"t": ("bob", "carol")})
    later = LateWork(assignment="c", free_days=3, days={"carol": 5}, members={"carol": ("carol",)})
    spent = spend_free_days([alone, team, later])
    assert {key: one.used for key, one in spent.items()} == {
        ("a", "bob"): 2,
        ("b", "t"): 1,
        ("c", "carol"): 2,
    }
    nobody = LateWork(assignment="d", free_days=3, days={"x": 2}, members={"x": ()})
    assert spend_free_days([nobody])["d", "x"].used == 0


class Rules(Value, frozen=True):
    due: Moment | None = Moment(at=1000)
    late: int = 3 * DAY_S
    penalty: int = 10


@pytest.mark.parametrize(
    ("at", "accepted", "late_s", "penalty"),
    [
        (1000 + DAY_S, True, DAY_S, 10),
        (1000 + DAY_S + 1, True, DAY_S, 10),  # the first second of the pause
        (1000 + 3 * DAY_S, True, DAY_S, 10),  # its last
        (1000 + 3 * DAY_S + 1, True, DAY_S + 1, 20),
        (1000 + 5 * DAY_S, True, 3 * DAY_S, 30),
        (1000 + 5 * DAY_S + 1, False, 3 * DAY_S + 1, 40),
    ],
)
def test_time_in_a_pause_is_not_late(at: int, accepted: bool, late_s: int, penalty: int) -> None:
    pauses = [(1000 + DAY_S, 1000 + 3 * DAY_S), (1000 + 90 * DAY_S, 1000 + 91 * DAY_S)]
    status = judge(Rules(), at, pauses=pauses)
    assert (status.accepted, status.late_s, status.penalty) == (accepted, late_s, penalty)
    assert status.closes_at == 1000 + 5 * DAY_S


def test_holidays_delay_the_close_at_the_receiver_too(folder: CourseFolder) -> None:
    text = COURSE.replace("keeper:", "holidays: [2026-11-09, 2026-11-10..2026-11-12]\nkeeper:")
    (folder.path / "course.yaml").write_text(text)
    folder.refresh()
    publish_assignments(folder, HOST_KEY)
    hand_in(folder, "hw2", "alice", 10 * DAY_S - 100)
    assert seat_of(folder, "hw2", "alice").late_s == 6 * DAY_S - 100
    begin = round(datetime(2026, 11, 9, tzinfo=ZONE).timestamp())
    assert list_pauses(folder.config) == ((begin, begin + 4 * DAY_S),)
    assert Receiver(folder.drop).read_pauses() == list_pauses(folder.config)


HOURS = """\
course: ml
hours: [{days: [thu, fri], from: "10:00", to: "12:00", zone: Europe/Berlin}]
holidays: [2026-12-24, 2026-12-25..2027-01-06]
"""


def test_no_class_meets_on_a_holiday(tmp_path: Path) -> None:
    (tmp_path / "course.yaml").write_text(HOURS)
    config = load_course(tmp_path)
    assert config.holidays == (
        Holiday(first=date(2026, 12, 24), last=date(2026, 12, 24)),
        Holiday(first=date(2026, 12, 25), last=date(2027, 1, 6)),
    )
    for day, phase in ((17, "class"), (24, "off"), (25, "off")):
        now = datetime(2026, 12, day, 11, tzinfo=ZONE).timestamp()
        assert find_phase(config.hours, None, now, config.holidays)[0] == phase
    since = datetime(2026, 12, 21, tzinfo=ZONE).timestamp()
    until = since + 21 * DAY_S
    counted = class_hours(config.hours, None, since, until, config.holidays)
    assert counted == pytest.approx(2 * (2 + 20 / 60))


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("  hw3: {points: 10, rubric: {code: 8, talk: 3}}", "worth 11 points, more than `points`"),
        ("  hw3: {rubric: {code: 0}}", "not a number of points above 0"),
        ("  hw3: {points: 8, rubric: {code: 8}, grade: {}}", "would give none"),
        ('  hw3: {due: "2026-11-28 23:59 UTC", penalty: 5, late: {per_day: 10}}', "`per_day`"),
        ("  hw3: {late: {per_day: 10}}", "counts from `due`"),
        ("  hw3: {late: {free_days: many}}", "not a number of days"),
        ("  hw3: {missing: 3}", "not a rule for missing submissions"),
        ("  hw3: {}\nholidays: [2026-12-25..2026-12-24]", "ends before it begins"),
        ("  hw3: {}\nholidays: [Christmas]", "not a date"),
    ],
)
def test_rules_that_cannot_hold_are_refused(tmp_path: Path, lines: str, says: str) -> None:
    (tmp_path / "course.yaml").write_text(f"course: ml\nassignments:\n{lines}\n")
    with pytest.raises(ConfigError) as refused:
        load_course(tmp_path)
    assert any(says in problem.message for problem in refused.value.problems)


def test_the_earlier_form_of_late_means_the_same(tmp_path: Path) -> None:
    text = 'course: ml\nassignments:\n  a: {due: "2026-11-28 23:59 UTC", late: 3d, penalty: 10}\n'
    text += '  b: {due: "2026-11-28 23:59 UTC", late: {at_most: 3d, per_day: 10%}}\n'
    (tmp_path / "course.yaml").write_text(text)
    rules = load_course(tmp_path).assignments
    assert (rules["a"].late, rules["a"].penalty) == (rules["b"].late, rules["b"].penalty)
    assert (rules["b"].late, rules["b"].penalty, rules["b"].free_days) == (3 * DAY_S, 10, 0)
