"""course collect and grade on the command line: codes, words, and what scripts read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labctl.courses import grading_run
from labctl.courses.collect import Collection, SeatSubmission
from labctl.courses.grading.claims import AccuracyComparison
from labctl.courses.grading.flags import Flag
from labctl.courses.grading.record import GradeRecord
from labctl.courses.grading.results import GradeResults, GraderTest
from labctl.courses.grading_dry_run import DryRunResult
from labctl.courses.grading_run import GradingResult, SeatGrade
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.free_days import FreeDays
from labctl.submissions.receive import write_assignment
from labctl.submissions.receiver import Receiver

Labctl = Callable[..., Any]
COURSE = """\
course: ml
assignments:
  hw3: {due: "2098-11-28 23:59 UTC", penalty: 10, grade: {command: sh grade.sh}}
"""


@pytest.fixture
def course(home: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch) -> Path:
    (home / "roster.csv").write_text("id,name\nalice,Alice\nbob,Bob\n")
    monkeypatch.chdir(home)
    assert labctl("course", "init", "ml", "--roster", "roster.csv").code == 0
    (home / "ml" / "course.yaml").write_text(COURSE)
    return home / "ml"


def record(seat: str, **other: Any) -> GradeRecord:
    fields: dict[str, Any] = {
        "assignment": "hw3", "seat": seat, "students": (seat,), "student": seat, "number": 1,
        "received": "2026-11-28T10:00:00Z", "bundle_sha256": "ab" * 32, "key": "k",
        "outcome": "graded", "points": 100.0, "penalty": 10, "raw": GradeResults(score=50),
        "score": 40.0,
    }  # fmt: skip
    return GradeRecord(**{**fields, **other})


def graded(*seats: SeatGrade, **other: Any) -> GradingResult:
    return GradingResult(assignment="hw3", seats=seats, **other)


FLAG = Flag(kind="claim", what="it claims \x1b[2J too much", evidence="claims 0.9, measured 0.5")
ALICE = SeatGrade(
    seat="alice",
    state="graded",
    fresh=True,
    record=record("alice", flags=(FLAG,), comparison=AccuracyComparison(claimed=0.9, measured=0.5)),
)
BOB = SeatGrade(seat="bob", state="missing")


def answer(monkeypatch: pytest.MonkeyPatch, flow: str, found: object) -> None:
    monkeypatch.setattr(f"labctl.courses.{flow}", lambda *_, **__: found)


@pytest.mark.parametrize(
    ("found", "code", "says"),
    [
        (graded(ALICE, BOB), 0, "1 graded, 0 failed, 0 not graded, 1 missing. New: 1."),
        (graded(SeatGrade(seat="bob", state="error", why="it crashed")), 1, "retries those"),
        (
            graded(ALICE, unreached=("bob",), why="no answer"),
            75,
            "was lost before these were graded: bob",
        ),
    ],
)
def test_the_code_says_whether_all_is_graded(
    course: Path,
    labctl: Labctl,
    monkeypatch: pytest.MonkeyPatch,
    found: GradingResult,
    code: int,
    says: str,
) -> None:
    answer(monkeypatch, "grading_run.grade_assignment", found)
    said = labctl("-C", "ml", "course", "grade", "hw3")
    assert said.code == code
    assert says in said.out + said.err


@pytest.mark.parametrize("columns", ["80", "140"])
def test_evidence_is_shown_plain_and_as_no_verdict(
    course: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    answer(monkeypatch, "grading_run.grade_assignment", graded(ALICE, BOB))
    said = labctl("-C", "ml", "course", "grade", "hw3")
    row = next(line for line in said.out.splitlines() if line.startswith("alice"))
    assert row.split() == [
        "alice",
        "Alice",
        "graded",
        "50/100",
        "0.9000",
        "0.5000",
        "late,",
        "10%",
        "off,",
        "claim",
    ]
    assert "Please review (not proof of misconduct)" in said.out
    assert "\x1b[2J" not in said.out
    assert "claims 0.9, measured 0.5" in said.out


def test_a_failure_of_all_is_shown_with_its_cause_its_log_and_the_next_commands(
    course: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = "its program ended with 1: ModuleNotFoundError: No module named 'torch'"
    seats = [SeatGrade(seat=name, state="error", why=cause) for name in ("alice", "bob")]
    answer(monkeypatch, "grading_run.grade_assignment", graded(*seats, withheld=cause))
    said = labctl("-C", "ml", "course", "grade", "hw3", "--release")
    assert said.code == 1
    assert f"Every submission failed alike, so none has a grade:\n  {cause}\n" in said.err
    assert (
        f"{course}/.course/grades/hw3/alice/output.txt, and 1 more in the directories beside it"
        in said.err
    )
    assert "next: labctl course grade hw3 --dry-run" in said.err
    assert "nothing was released" in said.err
    place = course / ".course" / "grades" / "hw3" / "alice"
    place.mkdir(parents=True)
    (place / "output.txt").touch()
    (place / "tests.txt").write_text("hidden tests:")
    assert f"{place}/tests.txt, and" in labctl("-C", "ml", "course", "grade", "hw3").err


TRIED_TESTS = (
    GraderTest(name="accuracy", score=37.5, max_score=40, output="accuracy 0.96"),
    GraderTest(name="test_a.py::test_x", score=60, max_score=60, visibility="hidden"),
)
TRIED_TABLE = [
    "POINTS   VISIBLE          TEST",
    "37.5/40  after_published  accuracy           accuracy 0.96",
    "60/60    hidden           test_a.py::test_x",
]


@pytest.mark.parametrize("failed", [False, True])
def test_a_dry_run_says_what_its_solution_got(
    course: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    result = DryRunResult(
        assignment="hw3",
        reference="assignments/hw3/solution",
        outcome="failed" if failed else "graded",
        points=100,
        score=0 if failed else 97.5,
        message="its program ended with 1: ImportError: torch" if failed else "",
        output="Traceback\nImportError: torch" if failed else "",
        tests=() if failed else TRIED_TESTS,
    )
    answer(monkeypatch, "grading_dry_run.try_reference", result)
    said = labctl("-C", "ml", "course", "grade", "hw3", "--dry-run")
    assert said.code == (1 if failed else 0)
    text = "failed  its program ended with 1: ImportError: torch" if failed else "graded 97.5/100"
    assert said.out.splitlines()[0] == f"assignments/hw3/solution: {text}"
    assert said.out.splitlines()[1:] == ([] if failed else TRIED_TABLE)
    assert ("  Traceback\n" in said.err) is failed
    body = json.loads(labctl("-C", "ml", "course", "grade", "hw3", "--dry-run", "--json").out)
    assert body["dry_run"]["score"] == result.score
    both = labctl("-C", "ml", "course", "grade", "hw3", "--dry-run", "--release")
    assert (both.code, "cannot be combined with --release" in both.err) == (2, True)


def test_json_is_one_object(course: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "grading_run.grade_assignment", graded(ALICE, BOB))
    said = labctl("-C", "ml", "course", "grade", "hw3", "--json")
    body = json.loads(said.out)
    assert (body["version"], body["released"], said.err) == (1, None, "")
    assert body["grading"]["seats"][0]["record"]["score"] == 40.0
    assert body["grading"]["seats"][1]["state"] == "missing"


@pytest.mark.parametrize("damaged", [False, True])
def test_a_changed_bundle_makes_collect_fail(
    course: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    late = SeatSubmission(
        seat="alice", students=("alice",), state="in", student="alice", number=2,
        received="2026-11-28T10:00:00Z", late_s=90_000, penalty=20, size=3000, submissions=2,
    )  # fmt: skip
    why = "bob/0001: the bundle was changed after it was signed for"
    bob = SeatSubmission(
        seat="bob", students=("bob",), state="damaged" if damaged else "missing", why=why
    )
    found = Collection(
        assignment="hw3",
        submissions=(late, bob),
        damaged=(why,) if damaged else (),
        strangers=("zoe",),
    )
    answer(monkeypatch, "collect.collect", found)
    said = labctl("-C", "ml", "course", "collect", "hw3")
    assert said.code == (1 if damaged else 0)
    assert "Times are in UTC." in said.out
    assert "alice  Alice  in" in said.out
    assert "grace period 10 min" in said.err
    assert "25 h, 20% off" in said.out
    bob_row = next(line for line in said.out.splitlines() if line.startswith("bob"))
    assert bob_row.split()[3:5] == ["-", "-"]
    assert "1 of 2 submitted, 1 of them late." in said.out
    assert "no seat in this course: zoe" in said.err
    assert (why in said.err) is damaged


def test_collect_says_why_a_late_submission_has_no_penalty(
    course: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = SeatSubmission(
        seat="alice",
        students=("alice",),
        state="in",
        received="2026-11-30T10:00:00Z",
        late_s=2 * 86_400,
        free_days=FreeDays(used=2, total=4),
    )
    answer(monkeypatch, "collect.collect", Collection(assignment="hw3", submissions=(late,)))
    monkeypatch.setenv("COLUMNS", "60")
    said = labctl("-C", "ml", "course", "collect", "hw3")
    assert said.err.endswith("next: labctl course grade hw3\n")
    row = said.out.splitlines()[1]
    assert "2 d" in row
    assert "off" not in row
    assert row.endswith("uses 2 of 4 free days")
    (course / "course.yaml").write_text("course: ml\nassignments: {hw3: {rubric: {text: 100}}}\n")
    by_hand = labctl("-C", "ml", "course", "collect", "hw3")
    assert by_hand.err.endswith("next: labctl course mark hw3 --next\n")


def test_collect_writes_the_code_where_it_is_asked_to(
    course: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nobody = SeatSubmission(seat="bob", students=("bob",), state="missing")
    answer(monkeypatch, "collect.collect", Collection(assignment="hw3", submissions=(nobody,)))
    said = labctl("-C", "ml", "course", "collect", "hw3", "--into", str(tmp_path / "read"))
    assert f"{tmp_path / 'read'}: code of 0 submissions, 0 of them new" in said.err
    body = json.loads(
        labctl("-C", "ml", "course", "collect", "hw3", "--into", "read", "--json").out
    )
    assert body["folders"] == []


def test_what_is_missing_is_named_with_the_next_step(course: Path, labctl: Labctl) -> None:
    none = labctl("-C", "ml", "course", "collect", "hw4")
    assert (none.code, "did you mean hw3?" in none.err) == (4, True)
    closed = labctl("-C", "ml", "course", "collect", "hw3")
    assert (closed.code, "labctl course serve" in closed.err) == (4, True)
    stranger = labctl("-C", "ml", "course", "grade", "hw3", "--only", "alcie")
    assert (stranger.code, "did you mean alice?" in stranger.err) == (4, True)
    for name in ("collect", "grade"):
        assert f"labctl course {name} hw3" in labctl("course", name, "--help").out


def test_grades_show_staff_which_tests_failed(course: Path, labctl: Labctl) -> None:
    tests = [
        {"name": "t.py::a\x1b[2J", "score": 0, "max_score": 5, "visibility": "hidden"},
        {"name": "t.py::b", "score": 5, "max_score": 5},
    ]
    place = course / ".course" / "grades" / "hw3" / "alice"
    place.mkdir(parents=True)
    (place / "results.json").write_text(json.dumps({"score": 5, "tests": tests}))
    said = labctl("-C", "ml", "course", "grades", "hw3", "--tests")
    assert said.code == 0
    rows = [line.split() for line in said.out.splitlines()]
    assert rows == [
        ["STUDENT", "NAME", "PASSED", "FAILED"],
        ["alice", "Alice", "1/2", "a\ufffd[2J"],
        ["bob", "Bob", "-"],
    ]
    body = json.loads(labctl("-C", "ml", "course", "grades", "hw3", "--tests", "--json").out)
    assert [len(one["tests"]) for one in body["students"]] == [2, 0]
    both = labctl("-C", "ml", "course", "grades", "hw3", "--tests", "--release")
    assert (both.code, "cannot be combined" in both.err) == (2, True)


def test_the_plan_shows_points_and_what_does_not_add_up(course: Path, labctl: Labctl) -> None:
    hidden = course / "hidden"
    hidden.mkdir()
    (hidden / "probe.py").write_text("def f(): ...")
    (hidden / "test_a.py").write_text("@pytest.mark.points(60)\ndef test_a(outputs): ...")
    text = COURSE.replace("grade: {", "tests: {hidden: hidden}, grade: {metric: f1, ")
    (course / "course.yaml").write_text(text)
    said = labctl("-C", "ml", "course", "plan", "--offline")
    assert said.code == 0
    assert "hw3: 100 points: 40 for f1, 60 for 1 hidden test\n" in said.out
    (course / "course.yaml").write_text(text.replace("{metric", "{points: 50, metric"))
    wrong = labctl("-C", "ml", "course", "plan", "--offline")
    assert wrong.code == 2
    assert "line 3" in wrong.err
    assert "do not add up to 100: grade 50, hidden tests 60 make 110" in wrong.err


@pytest.mark.parametrize("trial", [(), ("--dry-run",)])
def test_a_grading_beside_another_names_both_assignments(
    course: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch, trial: tuple[str, ...]
) -> None:
    text = COURSE.replace("grade: {", "grade: {reference: solution, ")
    hw3 = text.splitlines()[-1]
    (course / "course.yaml").write_text(f"{text}{hw3.replace('hw3', 'hw4')}\n")
    (course / "solution" / "code").mkdir(parents=True)
    (course / "solution" / "code" / "train.py").write_text("print(1)")
    receiver = Receiver(CourseFolder(course).drop)
    receiver.init()
    for name in ("hw3", "hw4"):
        write_assignment(receiver, name, "ssh://labs@a.example", {"host_key": "ssh-ed25519 AAAA"})
    second = []

    def grade_another(*_: object) -> None:
        second.append(labctl("-C", "ml", "course", "grade", "hw4", *trial))

    monkeypatch.setattr(grading_run._Batch, "run", grade_another)
    first = labctl("-C", "ml", "course", "grade", "hw3")
    (refused,) = second
    command = " ".join(("course grade hw4", *trial))
    assert (first.code, refused.code) == (0, 75), first.err + refused.err
    assert f"cannot start `{command}`: labctl (pid " in refused.err
    assert "has been running `course grade hw3` since" in " ".join(refused.err.split())


def test_without_a_due_time_nobody_is_missing(
    course: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    file = course / "course.yaml"
    file.write_text(file.read_text().replace('due: "2098-11-28 23:59 UTC", penalty: 10, ', ""))
    receiver = Receiver(CourseFolder(course).drop)
    receiver.init()
    write_assignment(receiver, "hw3", "ssh://labs@a.example", {"host_key": "ssh-ed25519 AAAA"})
    output = labctl("-C", "ml", "course", "collect", "hw3").out
    assert "missing" not in output
    assert [line.split() for line in output.splitlines()[1:3]] == [
        [name.lower(), name, "not", "yet", "-", "-", "-", "-", "no", "due", "time"]
        for name in ("Alice", "Bob")
    ]
