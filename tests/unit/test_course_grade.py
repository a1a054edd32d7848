"""A batch of submissions when the server, the grader or one of them fails: what is kept, what is
tried again. What containers do is in tests/e2e/test_grading_live.py."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forged_bed import FORGED
from submission_bed import DUE_AT, FILES, make_receiver, packed

from labctl.config import find_paths
from labctl.courses import grading_dry_run, grading_server, lateness
from labctl.courses import grading_run as grading
from labctl.courses.grading_dry_run import try_reference
from labctl.courses.grading_run import GradingResult, grade_assignment
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.release import release_grades
from labctl.courses.servers import CourseOperator
from labctl.courses.starters import publish_starters
from labctl.errors import (
    BusyError,
    ConfigError,
    ConnectError,
    InterruptError,
    NotFoundError,
    TransferError,
)
from labctl.events import SilentReporter
from labctl.state import State
from labctl.submissions import receipt
from labctl.submissions.receiver import Receiver
from labctl.wire.codec import to_json
from labctl.wire.sandbox import GradedJobRecord, GradeRequest, ProgramResult

COURSE = """\
course: ml
grading: {server: {provider: static, static: {hosts: [g]}}, image: "x:1"}
assignments:
  hw3:
    due: "2026-11-28T23:59:00+01:00"
    grade: {inputs: assignments/hw3/inputs, labels: assignments/hw3/labels}
  hw4: {}
"""
STUDENTS = ("alice", "bob", "carol")
OK = ProgramResult("ok", 0, "hello", 1.0)


class Server:
    """A grading server as far as a batch sees it; `answers` by student, in the order of asking."""

    def __init__(self) -> None:
        self.asked: list[GradeRequest] = []
        self.brought: list[str] = []
        self.image = "x:1"
        self.image_content = ""
        self.begun = 0
        self.may_be_here: list[bool] = []
        self.replies: dict[str, GradedJobRecord | BaseException] = {}

    def prepare_image(self) -> str:
        return self.image

    def upload(self, name: str, root: Path, files: Any) -> None:
        self.brought.append(name)

    def gpu_setting(self) -> str:
        return ""

    @property
    def context(self) -> Any:
        from types import SimpleNamespace

        limits = SimpleNamespace(memory_bytes=0, cpus=0.0, shm_bytes=10**10)
        return SimpleNamespace(config=SimpleNamespace(name="grading", limits=limits), lab_id="1")

    def grade(self, request: GradeRequest, timeout_s: float) -> GradedJobRecord:
        self.asked.append(request)
        reply = self.replies.get(request.submission) or scored(50)
        if isinstance(reply, BaseException):
            raise reply
        return reply


def scored(score: float) -> GradedJobRecord:
    return GradedJobRecord(OK, OK, json.dumps({"score": score}))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()

    @contextmanager
    def one(
        staff: CourseOperator, *, keep: bool = False, is_own_code: bool = False
    ) -> Iterator[Server]:
        made.begun += 1
        made.may_be_here.append(is_own_code)
        yield made

    monkeypatch.setattr(grading, "open_grading_server", one)
    return made


@pytest.fixture
def staff(tmp_path: Path) -> CourseOperator:
    course = tmp_path / "ml"
    for part in ("inputs", "labels"):
        (course / "assignments" / "hw3" / part).mkdir(parents=True)
        (course / "assignments" / "hw3" / part / "x.csv").write_text(part)
    (course / "course.yaml").write_text(COURSE)
    rows = ["id,name,email,team,section,active", *(f"{one},,,,,yes" for one in STUDENTS), ""]
    (course / "roster.csv").write_text("\n".join(rows))
    make_private(course)
    make_receiver(course / ".course")
    found = find_paths()
    staff = CourseOperator(
        CourseFolder(course), found, State(found.database), SilentReporter(), by="staff"
    )
    for student in STUDENTS:
        hand_in(staff, student)
    return staff


def hand_in(staff: CourseOperator, student: str, text: str = "") -> None:
    receiver = Receiver(staff.folder.drop, lambda: DUE_AT - 100.0)
    data = bundle_of(student, text)
    about = ("hw3", student, hashlib.sha256(data).hexdigest(), len(data))
    receiver.begin(*about)
    receiver.write(*about, 0, data)
    receiver.finish(*about)


def bundle_of(student: str, text: str = "") -> bytes:
    return packed({**FILES, "code/train.py": text.encode()}, student=student)


def name_of(student: str) -> str:
    return f"sub-{hashlib.sha256(bundle_of(student)).hexdigest()[:32]}"


def states(found: GradingResult) -> dict[str, str]:
    return {one.seat: one.state for one in found.seats}


def test_a_lost_server_leaves_the_rest_for_the_next_time(
    staff: CourseOperator, server: Server
) -> None:
    server.replies[name_of("bob")] = ConnectError("the server is gone")
    found = grade_assignment(staff, "hw3")
    assert states(found) == {"alice": "graded"}
    assert found.unreached == ("bob", "carol")
    assert not found.is_complete
    server.replies.clear()
    again = grade_assignment(staff, "hw3")
    assert states(again) == dict.fromkeys(STUDENTS, "graded")
    assert [one.seat for one in again.seats if one.fresh] == ["bob", "carol"]
    assert grade_assignment(staff, "hw3").is_complete
    assert server.begun == 2, "where nothing is to be run no server is made"


def test_what_went_wrong_with_one_is_tried_again_and_stops_nobody(
    staff: CourseOperator, server: Server
) -> None:
    crashed = ProgramResult("exit", 1, "KeyError: 'label'", 1.0)
    server.replies = {
        name_of("alice"): TransferError("it did not arrive"),
        name_of("bob"): GradedJobRecord(OK, crashed),
        name_of("carol"): GradedJobRecord(OK, OK, '{"score": 1e6}'),
    }
    found = grade_assignment(staff, "hw3")
    assert states(found) == dict.fromkeys(STUDENTS, "error")
    whys = {one.seat: one.why for one in found.seats}
    assert whys["alice"] == "it did not arrive"
    assert whys["bob"].startswith("staff's grader: its program ended with 1: KeyError: 'label'\n")
    assert "has the score 1e+06" in whys["carol"]
    assert not (staff.folder.grades / "hw3" / "bob" / "results.json").exists()
    server.replies.clear()
    assert grade_assignment(staff, "hw3").is_complete


def test_what_an_earlier_receiver_took_in_is_judged_again(
    staff: CourseOperator, server: Server, tmp_path: Path
) -> None:
    """Signed for as it is, by a version that did not see the program in it."""
    receiver = Receiver(staff.folder.drop)
    folder = receiver.find_bundle("hw3", "bob").parent
    forged = FORGED["prepended"](tmp_path / "marker")
    data = packed({**FILES, "model/model.pt": forged}, student="bob")
    (signed,) = receiver.receipts("hw3", "bob")
    digest = hashlib.sha256(data).hexdigest()
    made = msgspec.structs.replace(signed.receipt, bundle_sha256=digest, bundle_bytes=len(data))
    for name, content in (
        ("bundle.tar", data),
        ("receipt.json", receipt.encode(receipt.sign(made, receiver.key))),
    ):
        (folder / name).unlink()
        (folder / name).write_bytes(content)
    found = grade_assignment(staff, "hw3")
    assert states(found) == {"alice": "graded", "bob": "error", "carol": "graded"}
    assert "model/model.pt: readers of this archive" in {s.seat: s.why for s in found.seats}["bob"]
    assert f"sub-{digest[:32]}" not in server.brought


def test_a_programs_failure_is_a_grade_and_is_not_tried_again(
    staff: CourseOperator, server: Server
) -> None:
    slow = ProgramResult("time", 137, "", 600.0)
    server.replies[name_of("bob")] = GradedJobRecord(slow)
    found = grade_assignment(staff, "hw3")
    assert states(found)["bob"] == "failed"
    body = json.loads((staff.folder.grades / "hw3" / "bob" / "results.json").read_text())
    assert (body["score"], "in time" in body["output"]) == (0.0, True)
    assert grade_assignment(staff, "hw3").is_complete
    assert len(server.asked) == 3


def fail_with(last_line: str, outcome: str = "exit") -> GradedJobRecord:
    text = f'Traceback (most recent call last):\n  File "predict.py", line 1\n{last_line}\n'
    return GradedJobRecord(ProgramResult(outcome, 1, text, 1.0))


def test_a_failure_that_all_submissions_share_gives_nobody_zero_points(
    staff: CourseOperator, server: Server
) -> None:
    grades = staff.folder.grades / "hw3"
    server.replies = {
        name_of(student): fail_with(f"ModuleNotFoundError: No module named 'torch' in {student}")
        for student in STUDENTS
    }
    found = grade_assignment(staff, "hw3")
    assert states(found) == dict.fromkeys(STUDENTS, "error")
    assert not found.is_complete
    failure = "its program ended with 1: ModuleNotFoundError: No module named 'torch' in alice"
    assert found.withheld == failure
    assert found.seats[0].why == f"withheld, as every submission failed alike: {failure}"
    assert not (grades / "alice" / "results.json").exists()
    assert "Traceback" in (grades / "alice" / "output.txt").read_text()
    with pytest.raises(NotFoundError, match="no graded submission"):
        release_grades(staff.folder, "hw3")

    accepted = grade_assignment(staff, "hw3", accept_failures=True)
    assert states(accepted) == dict.fromkeys(STUDENTS, "failed")
    assert json.loads((grades / "alice" / "results.json").read_text())["score"] == 0.0
    assert states(grade_assignment(staff, "hw3")) == dict.fromkeys(STUDENTS, "failed")
    assert len(server.asked) == 6, "what staff accepted is kept"


@pytest.mark.parametrize("other", [scored(0), fail_with("KeyError: 3"), fail_with("", "time")])
def test_different_failures_are_each_students_own(
    staff: CourseOperator, server: Server, other: GradedJobRecord
) -> None:
    server.replies = {name_of(one): fail_with("ModuleNotFoundError: timm") for one in STUDENTS}
    server.replies[name_of("carol")] = other
    found = grade_assignment(staff, "hw3")
    assert (found.withheld, found.is_complete) == ("", True)
    assert states(found)["alice"] == "failed"
    assert found.seats[0].why == "its program ended with 1: ModuleNotFoundError: timm"


def test_a_dry_run_grades_the_reference_solution_and_stores_nothing(
    staff: CourseOperator, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading_dry_run, "open_grading_server", grading.open_grading_server)
    grade_assignment(staff, "hw3")
    with pytest.raises(ConfigError, match="no reference solution"):
        try_reference(staff, "hw3")
    config = COURSE.replace("labels: ass", "reference: assignments/hw3/solution, labels: ass")
    (staff.folder.path / "course.yaml").write_text(config)
    staff.folder.refresh()
    with pytest.raises(ConfigError, match=r"neither code/ nor model/"):
        try_reference(staff, "hw3")
    solution = staff.folder.path / "assignments" / "hw3" / "solution" / "code"
    solution.mkdir(parents=True)
    (solution / "predict.py").write_text("pass")
    entries = len(staff.folder.ledger.list_entries())
    assert try_reference(staff, "hw3").score == 50
    assert server.may_be_here == [False, True], "submissions never run on this machine"
    assert server.asked[-1].submission == server.brought[-1] == "reference"
    server.replies["reference"] = fail_with("ModuleNotFoundError: No module named 'torch'")
    failed = try_reference(staff, "hw3")
    assert (failed.outcome, failed.score) == ("failed", 0)
    assert failed.message.endswith("ended with 1: ModuleNotFoundError: No module named 'torch'")
    assert len(staff.folder.ledger.list_entries()) == entries
    assert not (staff.folder.grades / "hw3" / "reference").exists()
    assert len(server.asked) == 5
    again = grade_assignment(staff, "hw3")
    assert not any(one.fresh for one in again.seats), "the solution is no part of a grade"


@pytest.mark.parametrize("source", ["", "handouts", "starter", "replaced starter", "labctl"])
def test_files_that_were_handed_out_are_no_evidence_of_copying(
    staff: CourseOperator, server: Server, source: str
) -> None:
    path = staff.folder.path
    text = "open('/lab/labels/labels.csv')\n" * 10
    if source == "handouts":
        (path / "handouts").mkdir()
        (path / "handouts" / "loader.py").write_text(text)
    elif source == "labctl":
        text = (staff.paths.data_dir / "templates" / "image-classifier" / "model.py").read_text()
    elif source:
        (path / "start").mkdir()
        (path / "start" / "train.py").write_text(text)
        config = COURSE.replace("grade:", "template: start\n    grade:")
        (path / "course.yaml").write_text(config)
        staff.folder.refresh()
        publish_starters(staff.folder, staff.paths)
        if source == "replaced starter":
            (path / "start" / "train.py").write_text("pass\n")
            publish_starters(staff.folder, staff.paths)
            shutil.rmtree(path / "handouts")
    for student in ("alice", "bob"):
        hand_in(staff, student, text)
    found = grade_assignment(staff, "hw3")
    kinds = {flag.kind for one in found.seats if one.record for flag in one.record.flags}
    own_work = {"same-code", "names-labels"}
    assert kinds & own_work == (set() if source else own_work)


@pytest.mark.parametrize("changed", ["labels/x.csv", "grade.py", "course.yaml", "submission"])
def test_whatever_a_grade_comes_from_makes_it_anew(
    staff: CourseOperator, server: Server, changed: str
) -> None:
    grade_assignment(staff, "hw3")
    own = staff.folder.path / "assignments" / "hw3"
    if changed == "submission":
        hand_in(staff, "bob", "other code")
    elif changed == "course.yaml":
        text = COURSE.replace("labels: ass", "timeout: 5m, labels: ass")
        (staff.folder.path / changed).write_text(text)
        staff.folder.refresh()
    else:
        (own / changed).write_text("something else")
    found = grade_assignment(staff, "hw3")
    fresh = [one.seat for one in found.seats if one.fresh]
    assert fresh == (["bob"] if changed == "submission" else list(STUDENTS))


def test_an_image_built_again_under_its_name_grades_anew(
    staff: CourseOperator, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine on this machine has another image of that name than the one that graded."""
    server.image_content = "before"
    assert grade_assignment(staff, "hw3").is_complete
    monkeypatch.setattr(grading_server, "hash_local_image", lambda reference: "before")
    assert not any(one.fresh for one in grade_assignment(staff, "hw3").seats)
    monkeypatch.setattr(grading_server, "hash_local_image", lambda reference: "after")
    server.image_content = "after"
    again = grade_assignment(staff, "hw3").seats
    assert all(one.fresh for one in again)
    jobs = {request.job for request in server.asked}
    assert len(jobs) == 2 * len(STUDENTS), "a kept server would repeat its earlier replies"


def test_the_server_hears_hashes_and_no_names(staff: CourseOperator, server: Server) -> None:
    grade_assignment(staff, "hw3", again=True)
    said = json.dumps([to_json(request) for request in server.asked]) + json.dumps(server.brought)
    assert not any(student in said for student in STUDENTS)
    assert server.brought[:3] == ["hw3-inputs", "hw3-labels", "hw3-grader"]
    limits = server.asked[0].limits
    assert limits.shm_bytes == limits.memory_bytes == 4 * 10**9
    jobs = {one.job for one in server.asked}
    grade_assignment(staff, "hw3", again=True)
    assert jobs.isdisjoint({one.job for one in server.asked[3:]})


def test_two_at_once_do_not_take_each_others_server(staff: CourseOperator, server: Server) -> None:
    with staff.state.lock(f"{staff.folder.id}-grade", "course grade"):
        other = threading.Thread(target=lambda: outcomes.append(_busy(staff)))
        outcomes: list[str] = []
        other.start()
        other.join()
    assert "course grade" in outcomes[0]
    assert server.begun == 0


def _busy(staff: CourseOperator) -> str:
    try:
        grade_assignment(staff, "hw3")
    except BusyError as error:
        return str(error)
    return ""


def test_an_interrupted_batch_says_how_to_go_on(staff: CourseOperator, server: Server) -> None:
    server.replies[name_of("bob")] = KeyboardInterrupt()
    with pytest.raises(InterruptError) as stopped:
        grade_assignment(staff, "hw3")
    assert stopped.value.hint.startswith("labctl course grade hw3")
    server.replies.clear()
    assert grade_assignment(staff, "hw3").is_complete


def test_an_assignment_that_nobody_said_how_to_grade(staff: CourseOperator, server: Server) -> None:
    with pytest.raises(ConfigError, match="how hw4 is graded"):
        grade_assignment(staff, "hw4")
    (staff.folder.path / "assignments" / "hw3" / "labels" / "x.csv").unlink()
    (staff.folder.path / "assignments" / "hw3" / "labels").rmdir()
    with pytest.raises(ConfigError, match="not a directory"):
        grade_assignment(staff, "hw3")
    assert server.begun == 0


HIDDEN = """\
import pytest

@pytest.mark.points(30)
def test_sums(outputs):
    assert outputs["sums"] == [3]
"""


def test_hidden_tests_run_apart_from_the_grader_and_their_text_stays_with_staff(
    staff: CourseOperator, server: Server
) -> None:
    path = staff.folder.path
    hidden = path / "assignments" / "hw3" / "hidden"
    hidden.mkdir()
    (hidden / "probe.py").write_text("def sums(): ...")
    (hidden / "test_sums.py").write_text(HIDDEN)
    config = COURSE.replace("grade:", "tests: {hidden: assignments/hw3/hidden}\n    grade:")
    (path / "course.yaml").write_text(config)
    staff.folder.refresh()

    class BothParts(Server):
        def grade(self, request: GradeRequest, timeout_s: float) -> GradedJobRecord:
            self.asked.append(request)
            if not request.staff_files:
                return scored(50)
            test = {"name": "test_sums", "score": 30, "max_score": 30, "visibility": "hidden"}
            program = OK._replace(said="text of the probe")
            return GradedJobRecord(program, OK, json.dumps({"tests": [test]}))

    server.__class__ = BothParts
    found = grade_assignment(staff, "hw3")
    assert [one.record.score for one in found.seats if one.record] == [80.0] * 3
    grader, tests = server.asked[:2]
    assert (grader.points, tests.points) == (70.0, 30.0)
    assert grader.grader == "hw3-grader"
    assert (tests.grader, tests.staff_files) == ("hw3-hidden", "hw3-probe")
    assert grader.job != tests.job
    assert server.brought[:5] == [
        *("hw3-inputs", "hw3-labels", "hw3-grader", "hw3-hidden", "hw3-probe"),
    ]
    own = staff.folder.grades / "hw3" / "alice"
    assert "probe" not in (own / "output.txt").read_text()
    assert "text of the probe" in (own / "tests.txt").read_text()
    release_grades(staff.folder, "hw3")
    page = (own / "feedback.html").read_text()
    assert "80</strong> of 100" in page
    assert "test_sums" not in page
    assert "probe" not in page
    (hidden / "test_sums.py").write_text(HIDDEN + "# other")
    assert all(one.fresh for one in grade_assignment(staff, "hw3").seats), "other tests"
    (hidden / "__pycache__").mkdir()
    (hidden / "__pycache__" / "x.pyc").write_text("")
    assert not any(one.fresh for one in grade_assignment(staff, "hw3").seats)
    (hidden / "test_sums.py").write_text(HIDDEN.replace("30", "130"))
    with pytest.raises(ConfigError, match="hw3 cannot be graded") as refused:
        grade_assignment(staff, "hw3")
    assert "which leaves none for `grade`" in refused.value.why


def test_some_tests_are_shown_only_when_nobody_can_submit_any_more(
    staff: CourseOperator, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = {"name": "late_test", "score": 5, "visibility": "after_due_date"}
    server.replies = {
        name_of(student): GradedJobRecord(OK, OK, json.dumps({"score": 5, "tests": [test]}))
        for student in STUDENTS
    }
    grade_assignment(staff, "hw3")
    staff.folder.ledger.append("due", student="bob", assignment="hw3", seconds=3 * 86_400)
    due_at = datetime.fromisoformat("2026-11-28T23:59:00+01:00").timestamp()
    shown = []
    for after_s in (-1, 3600, 3 * 86_400 + 3600):
        monkeypatch.setattr(lateness.time, "time", lambda after_s=after_s: due_at + after_s)
        release_grades(staff.folder, "hw3")
        page = (staff.folder.grades / "hw3" / "alice" / "feedback.html").read_text()
        shown.append("late_test" in page)
    assert shown == [False, False, True]
