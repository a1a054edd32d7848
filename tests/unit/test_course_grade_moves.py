"""Who gets which grade when teams change after an assignment closed, and what changes a grade that
was released: by the commands that staff types, and in the file that Canvas reads."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from submission_bed import FILES, make_receiver, packed

from labctl.cli.exit_codes import run_and_exit
from labctl.cli.groups import cli
from labctl.courses import grading_run as grading
from labctl.courses.records.course_total import CourseTotal
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.roster import read_roster, write_roster
from labctl.courses.totals import read_released_total
from labctl.state import State
from labctl.submissions.receiver import Receiver
from labctl.web.snapshot import SnapshotTaker
from labctl.web.view import PersonTotals
from labctl.wire.sandbox import GradedJobRecord, GradeRequest, ProgramResult

DUE_AT = 1_606_604_340.0
CLOSED, OPEN = "2020-11-28T23:59:00+01:00", "2098-11-28T23:59:00+01:00"
COURSE = """\
course: ml
grading: {{server: {{provider: static, static: {{hosts: [g]}}}}, image: "x:1"}}
assignments:
  hw3:
    due: "{due}"
    late: 24h
    penalty: 10
    grade: {{inputs: assignments/hw3/inputs, labels: assignments/hw3/labels}}
"""
GROUP = f"""\
  hw4: {{due: "{OPEN}"}}
assignment_groups: {{homework: {{assignments: [hw3, hw4], drop_lowest: 1}}}}
"""
CANVAS = """\
Student,ID,SIS User ID,SIS Login ID,Section,hw3 (103)
    Points Possible,,,,,100
Alice,11,s1,alice,Lab A,
Bob,12,s2,bob,Lab A,
Carol,13,s3,carol,Lab B,
"""
RAN = ProgramResult("ok", 0, "", 1.0)


@dataclass
class Graders:
    """The grading server as far as a batch sees it; `scores` by student."""

    scores: dict[str, float] = field(default_factory=dict)
    image: str = "x:1"
    image_content: str = ""
    code: int = 0  # with which staff's own program ends

    def prepare_image(self) -> str:
        return self.image

    def upload(self, name: str, root: Path, files: Any) -> None:
        pass

    def gpu_setting(self) -> str:
        return ""

    @property
    def context(self) -> Any:
        limits = SimpleNamespace(memory_bytes=0, cpus=0.0, shm_bytes=10**10)
        return SimpleNamespace(config=SimpleNamespace(name="grading", limits=limits), lab_id="1")

    def grade(self, request: GradeRequest, timeout_s: float) -> GradedJobRecord:
        student = next(one for one in self.scores if name_of(one) == request.submission)
        results = json.dumps({"score": self.scores[student]})
        judged = RAN._replace(outcome="failed", code=self.code) if self.code else RAN
        return GradedJobRecord(RAN, judged, results)


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


@dataclass
class Bed:
    path: Path
    graders: Graders
    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    @property
    def folder(self) -> CourseFolder:
        return CourseFolder(self.path)

    def course(self, *words: str) -> Said:
        self.monkeypatch.setattr(sys, "argv", ["labctl", "-C", str(self.path), "course", *words])
        self.monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        self.capsys.readouterr()
        code = run_and_exit(cli)
        captured = self.capsys.readouterr()
        return Said(code, captured.out, captured.err)

    def put_teams(self, **teams: str) -> None:
        """Edit roster.csv as a person does."""
        students = read_roster(self.path / "roster.csv")
        moved = (structs.replace(one, team=teams.get(one.id, one.team)) for one in students)
        write_roster(self.path / "roster.csv", moved)

    def set_due(self, due: str) -> None:
        (self.path / "course.yaml").write_text(COURSE.format(due=due))

    def canvas(self) -> dict[str, str]:
        """Login -> what the file for Canvas has of hw3."""
        file = self.path / "hw3.csv"
        said = self.course("grades", "hw3", "--format", "canvas", "-o", str(file))
        assert said.code == 0, said.err
        rows = csv.DictReader(io.StringIO(file.read_text()))
        return {row["SIS Login ID"]: row["hw3 (103)"] for row in rows if row["ID"]}

    def results(self, student: str) -> Path:
        return self.path / ".course" / "grades" / "hw3" / student / "results.json"

    def correct(self, student: str, score: float) -> None:
        body = json.loads(self.results(student).read_text())
        self.results(student).write_text(json.dumps({**body, "score": score}))


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bed:
    """alice alone, bob and carol in team-1; both handed in what is worth 50 and 80 points."""
    graders = Graders({"alice": 50.0, "bob": 80.0})

    @contextmanager
    def server(*_: Any, **__: Any) -> Iterator[Graders]:
        yield graders

    monkeypatch.setattr(grading, "open_grading_server", server)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "canvas.csv").write_text(CANVAS)
    made = Bed(tmp_path / "ml", graders, capsys, monkeypatch)
    assert made.course("init", str(made.path), "--roster", "canvas.csv").code == 0
    made.set_due(CLOSED)
    made.put_teams(bob="team-1", carol="team-1")
    for part in ("inputs", "labels"):
        place = made.path / "assignments" / "hw3" / part
        place.mkdir(parents=True)
        (place / "x.csv").write_text(part)
    make_receiver(made.path / ".course", due=CLOSED, late="24h", penalty="10")
    for student in ("alice", "bob"):
        hand_in(made.folder, student)
    return made


def bundle_of(student: str) -> bytes:
    return packed({**FILES, "code/train.py": student.encode()}, student=student)


def name_of(student: str) -> str:
    return f"sub-{hashlib.sha256(bundle_of(student)).hexdigest()[:32]}"


def hand_in(folder: CourseFolder, student: str) -> None:
    receiver = Receiver(folder.drop, lambda: DUE_AT - 100.0)
    data = bundle_of(student)
    about = ("hw3", student, hashlib.sha256(data).hexdigest(), len(data))
    receiver.begin(*about)
    receiver.write(*about, 0, data)
    receiver.finish(*about)


def collected_and_graded(bed: Bed, *words: str) -> Said:
    assert bed.course("collect", "hw3").code == 0
    said = bed.course("grade", "hw3", "--yes", *words)
    assert said.code == 0, said.err
    return said


@pytest.mark.parametrize("earlier", [False, True], ids=["", "graded-by-an-earlier-version"])
def test_a_change_of_team_leaves_the_grades_of_what_has_closed(bed: Bed, earlier: bool) -> None:
    collected_and_graded(bed)
    bed.correct("alice", 55)
    assert bed.course("grades", "hw3", "--release").code == 0
    before = {"alice": "55", "bob": "80", "carol": "80"}
    assert bed.canvas() == before
    if earlier:
        forget_what_is_new(bed)
    bed.put_teams(alice="team-1", bob="", carol="")
    said = collected_and_graded(bed)
    assert bed.canvas() == before
    assert json.loads(bed.results("alice").read_text())["score"] == 55
    assert "alice: results.json was edited by hand and is kept" in said.err
    assert bed.course("grades", "hw3", "--release").code == 0
    assert bed.canvas() == before
    seen = Receiver(bed.folder.drop).feedback("hw3", "alice")
    assert seen is not None
    assert seen.score == 55
    # What closes later has the teams of then.
    assert [one.students for one in bed.folder.list_seats()] == [("alice",), ("bob",), ("carol",)]


def test_a_change_of_team_makes_no_submission_missing(bed: Bed) -> None:
    """carol's team submitted: the 0 for a missing submission is nobody's after she left it."""
    (bed.path / "course.yaml").write_text(f"missing: 0\n{COURSE.format(due=CLOSED)}{GROUP}")
    assert bed.course("collect", "hw3").code == 0
    bed.put_teams(alice="team-1", bob="", carol="")
    state = State(bed.path / "state.db", network=False)
    people = {one.id: one for one in SnapshotTaker(bed.folder, state).take().people}
    state.close()
    for student in ("alice", "bob", "carol"):
        assert read_released_total(bed.folder, student) == CourseTotal(), student
        assert people[student].totals == PersonTotals(CourseTotal(), CourseTotal()), student


def forget_what_is_new(bed: Bed) -> None:
    """The folder as an earlier version left it: no members, no released scores, no hashes."""
    ledger = bed.path / ".course" / "ledger.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    kept = [one for one in lines if one["kind"] != "closed"]
    for one in kept:
        if one["kind"] == "released":
            one["detail"] = {"assignment": "hw3"}
    ledger.write_text("".join(json.dumps(one) + "\n" for one in kept))
    for file in (bed.path / ".course" / "grades").rglob("results.sha256"):
        file.unlink()


def test_while_an_assignment_is_open_a_team_counts_as_the_roster_has_it(bed: Bed) -> None:
    bed.set_due(OPEN)
    collected_and_graded(bed)
    bed.put_teams(alice="team-1")
    collected_and_graded(bed)
    assert bed.canvas() == {"alice": "80", "bob": "80", "carol": "80"}
    # Even so, nobody's released grade changes by itself.
    assert bed.course("grades", "hw3", "--release").code == 0
    bed.put_teams(alice="")
    collected_and_graded(bed)
    assert bed.canvas()["alice"] == "80"
    said = bed.course("grades", "hw3")
    assert "alice: 80 -> 50 (from alice instead of team-1" in said.err


def test_a_new_roster_comes_after_the_teams_of_what_has_closed(bed: Bed) -> None:
    """Nothing was collected yet when the teams change: what counts is the time of the close."""
    newer = bed.path.parent / "newer.csv"
    newer.write_text("id,name,team\nalice,Alice,team-1\nbob,Bob,\ncarol,Carol,\n")
    assert bed.course("roster", str(newer), "--yes").code == 0
    [line] = bed.folder.ledger.list_entries(kind="closed")
    assert line.detail["seats"] == {"alice": ["alice"], "team-1": ["bob", "carol"]}
    collected_and_graded(bed)
    found = json.loads(bed.course("grades", "hw3", "--json").out)["grades"]
    assert {one["student"]: one["final"] for one in found} == {
        "alice": 50,
        "bob": 80,
        "carol": 80,
    }


def test_a_student_who_comes_after_the_close_is_alone(bed: Bed) -> None:
    collected_and_graded(bed)
    with (bed.path / "roster.csv").open("a") as file:
        file.write("dan,Dan,,team-1,,yes\n")
    said = bed.course("due", "hw3", "dan", "+300d")
    assert said.code == 0, said.err
    assert Receiver(bed.folder.drop).extensions("hw3").keys() == {"dan"}
    found = json.loads(bed.course("grades", "hw3", "--json").out)["grades"]
    assert found[-1]["problem"] == "nothing was submitted"


def test_a_later_due_time_opens_the_teams_again(bed: Bed) -> None:
    collected_and_graded(bed)
    bed.put_teams(alice="team-1")
    bed.set_due(OPEN)
    found = json.loads(bed.course("collect", "hw3", "--json").out)["collection"]["handed"]
    assert [one["seat"] for one in found] == ["team-1"]
    bed.set_due(CLOSED)
    found = json.loads(bed.course("collect", "hw3", "--json").out)["collection"]["handed"]
    assert [one["seat"] for one in found] == ["alice", "team-1"]


def test_a_released_grade_changes_only_by_another_release_that_shows_it(bed: Bed) -> None:
    collected_and_graded(bed, "--release")
    assert bed.canvas() == {"alice": "50", "bob": "80", "carol": "80"}
    (bed.path / "assignments" / "hw3" / "labels" / "x.csv").write_text("mended")
    bed.graders.scores["bob"] = 60.0
    said = collected_and_graded(bed)
    assert "bob: 80 -> 60 (graded again)" in said.err
    assert "labctl course grades hw3 --release" in said.err
    assert bed.canvas()["bob"] == "80"
    refused = bed.course("grades", "hw3", "--release")
    assert refused.code == 3
    assert "change 2 grades of hw3 that students have already seen?" in refused.err
    assert "carol: 80 -> 60 (graded again)" in refused.err
    assert "use --yes to answer yes" in refused.err
    assert bed.canvas()["carol"] == "80"
    assert bed.course("grades", "hw3", "--release", "--yes").code == 0
    assert bed.canvas() == {"alice": "50", "bob": "60", "carol": "60"}
    last = bed.folder.ledger.list_entries(kind="released")[-1]
    assert (last.student, last.why, last.detail["score"]) == ("carol", "graded again", 60)


def test_a_correction_after_the_release_is_released_as_one(bed: Bed) -> None:
    collected_and_graded(bed, "--release")
    bed.correct("carol", 85)
    for _ in range(2):
        said = collected_and_graded(bed, "--again")
    assert "carol: 80 -> 85 (corrected by hand)" in said.err
    assert bed.canvas()["carol"] == "80"
    file = bed.path / "hw3.csv"
    words = ("--release", "--yes", "--format", "canvas", "-o", str(file))
    assert bed.course("grades", "hw3", *words).code == 0
    assert bed.canvas() == {"alice": "50", "bob": "80", "carol": "85"}
    assert "85" in file.read_text()
    # Taken back, it is graded as its team is.
    bed.results("carol").unlink()
    collected_and_graded(bed)
    assert bed.course("grades", "hw3", "--release", "--yes").code == 0
    assert bed.canvas()["carol"] == "80"


def test_grading_again_leaves_students_what_was_released_to_them(bed: Bed) -> None:
    collected_and_graded(bed, "--release")
    bed.graders.scores["bob"] = 60.0
    collected_and_graded(bed, "--again")
    assert {student: feedback_of(bed, student) for student in ("alice", "bob", "carol")} == {
        "alice": 50,
        "bob": 80,
        "carol": 80,
    }
    bed.graders.code = 1  # staff's program is broken: nobody has a grade
    assert bed.course("grade", "hw3", "--yes", "--again").code == 1
    assert feedback_of(bed, "carol") == 80
    said = bed.course("grades", "hw3")
    assert "carol: 80 -> no grade (not graded yet)" in said.err
    bed.graders.code = 0
    collected_and_graded(bed)
    assert bed.course("grades", "hw3", "--release", "--yes").code == 0
    assert feedback_of(bed, "carol") == 60


def feedback_of(bed: Bed, student: str) -> float | None:
    """The score that the student reads with `labctl submit --grade`."""
    found = Receiver(bed.folder.drop).feedback("hw3", student)
    return None if found is None else found.score


def test_a_grade_from_before_the_close_decides_no_team(bed: Bed) -> None:
    bed.set_due(OPEN)
    collected_and_graded(bed)
    for file in (bed.path / ".course" / "grades").rglob("grade.json"):
        record = json.loads(file.read_text())
        file.write_text(json.dumps({**record, "at": DUE_AT - 50.0}))
    bed.put_teams(alice="team-1", bob="", carol="team-1")
    bed.set_due(CLOSED)
    assert bed.course("collect", "hw3").code == 0
    [line] = bed.folder.ledger.list_entries(kind="closed")
    assert line.detail["seats"] == {"team-1": ["alice", "carol"], "bob": ["bob"]}
