"""Which submission of a seat counts, and what a changed one is; where nothing is ever graded."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from submission_bed import DUE, DUE_AT, FILES, make_receiver, packed

from labctl.config import find_paths
from labctl.courses import collect as collecting
from labctl.courses.code_folders import write_code_folders
from labctl.courses.collect import SeatSubmission, collect
from labctl.courses.end_of_term import make_collector
from labctl.courses.grade_store import GradeStore
from labctl.courses.grades import list_grades
from labctl.courses.grading.combine import ProgramOutput
from labctl.courses.grading.record import GradeRecord
from labctl.courses.grading.results import GradeResults
from labctl.courses.grading_server import GradingServer, build_grading_context
from labctl.courses.records.excuses import draft_excuse_line
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.release import release_grades
from labctl.courses.servers import CourseOperator
from labctl.courses.starter_delivery import deliver_starters, describe_course_lab
from labctl.courses.starters import find_published, publish_starters
from labctl.errors import ConfigError, LabError, NotFoundError, PolicyError
from labctl.events import SilentReporter
from labctl.providers.course import CourseProviderSettings
from labctl.state import State
from labctl.submissions import receive as receiving
from labctl.submissions.collect import CollectedPost
from labctl.submissions.receive import write_assignment
from labctl.submissions.receiver import Receiver
from labctl.submissions.service import serve
from labctl.sync.starter import encode_starter, hash_document
from labctl.wire.boot_id import read_boot_token
from labctl.wire.sandbox import CHECK_GRADING, GradingCheckReply
from labctl.wire.verbs import LabRequest

COURSE = """\
course: ml
assignments:
  hw3: {due: "2026-11-28T23:59:00+01:00", late: 48h, penalty: 10}
"""
ROSTER = """\
id,name,email,team,section,active
alice,Alice,,,,yes
bob,Bob,,team-1,,yes
carol,Carol,,team-1,,yes
dan,Dan,,,,yes
"""
DAY_S = 86_400


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time at which submissions are collected: after the due time, unless a test sets it."""
    times = [DUE_AT + 86_400.0]
    monkeypatch.setattr(collecting, "Receiver", lambda drop: Receiver(drop, lambda: times[-1]))
    return times


@pytest.fixture
def folder(tmp_path: Path, clock: list[float]) -> CourseFolder:
    course = tmp_path / "ml"
    course.mkdir()
    (course / "course.yaml").write_text(COURSE)
    (course / "roster.csv").write_text(ROSTER)
    make_private(course)
    make_receiver(course / ".course", late="48h", penalty="10")
    return CourseFolder(course)


def hand_in(
    folder: CourseFolder, student: str, at: float, text: str = "", *, lab_file: bytes = b""
) -> None:
    receiver = Receiver(folder.drop, lambda: at)
    files = {**FILES, "code/train.py": f"print({text!r})\n".encode()}
    if lab_file:
        files["code/lab.yaml"] = lab_file
    data = packed(files, student=student)
    about = ("hw3", student, hashlib.sha256(data).hexdigest(), len(data))
    receiver.begin(*about)
    receiver.write(*about, 0, data)
    receiver.finish(*about)


def seats_of(folder: CourseFolder) -> dict[str, SeatSubmission]:
    return {one.seat: one for one in collect(folder, "hw3").submissions}


def test_the_last_one_counts_and_a_teams_is_anybodys_of_it(folder: CourseFolder) -> None:
    hand_in(folder, "alice", DUE_AT - 100, "first")
    hand_in(folder, "alice", DUE_AT + 3600, "second")
    hand_in(folder, "carol", DUE_AT - 50)
    hand_in(folder, "bob", DUE_AT - 90)
    found = seats_of(folder)
    alice, team = found["alice"], found["team-1"]
    assert (alice.number, alice.late_s, alice.penalty, alice.submissions) == (2, 3600, 10, 2)
    assert (team.student, team.students, team.late_s) == ("carol", ("bob", "carol"), 0)
    assert found["dan"].state == "missing"


def test_before_the_due_time_nothing_is_missing(folder: CourseFolder, clock: list[float]) -> None:
    clock.append(DUE_AT)
    hand_in(folder, "alice", DUE_AT - 100)
    Receiver(folder.drop).extend("hw3", "bob", 3600)
    seats = seats_of(folder)
    assert seats["alice"].state == "in"
    assert (seats["dan"].state, seats["dan"].why) == ("open", "due 28 Nov 23:59")
    clock.append(DUE_AT + 1)
    seats = seats_of(folder)
    assert seats["dan"].state == "missing"
    # A team has the latest time of its students.
    assert (seats["team-1"].state, seats["team-1"].why) == ("open", "due 29 Nov 00:59")


def test_code_is_laid_out_with_a_diff_against_the_starter(
    folder: CourseFolder, tmp_path: Path
) -> None:
    start = folder.path / "start"
    start.mkdir()
    (start / "train.py").write_text("print('start')\n")
    (start / "net.bin").write_bytes(b"\0")
    (folder.path / "course.yaml").write_text(COURSE.replace("{due", "{template: start, due"))
    folder.refresh()
    publish_starters(folder, find_paths())
    hand_in(folder, "alice", DUE_AT - 100, "mine")
    into = tmp_path / "read"
    (alice,) = write_code_folders(folder, collect(folder, "hw3"), into)
    assert (alice.seat, alice.directory, alice.is_new) == ("alice", into / "alice-1", True)
    files = [path.name for path in alice.directory.rglob("*")]
    assert files == ["train.py"], "models and logs are not code"
    assert Path(alice.diff).read_text().splitlines() == [
        "Binary or large files starter/net.bin and submission/net.bin differ",
        "--- starter/train.py",
        "+++ submission/train.py",
        "@@ -1 +1 @@",
        "-print('start')",
        "+print('mine')",
    ]
    (alice.directory / "notes.txt").write_text("well done")
    hand_in(folder, "alice", DUE_AT - 50, "newer")
    (newer,) = write_code_folders(folder, collect(folder, "hw3"), into)
    assert (newer.directory.name, newer.is_new) == ("alice-2", True)
    (again,) = write_code_folders(folder, collect(folder, "hw3"), into)
    assert (again.is_new, again.diff) == (False, newer.diff)
    assert (alice.directory / "notes.txt").exists()
    assert sorted(path.name for path in into.iterdir()) == [
        *("alice-1", "alice-1.diff", "alice-2", "alice-2.diff")
    ]


@pytest.mark.parametrize("own", [b"", b"run: [python, train.py]\n"])
def test_the_lab_file_that_joining_writes_is_no_difference(
    folder: CourseFolder, tmp_path: Path, own: bytes
) -> None:
    start = folder.path / "start"
    start.mkdir()
    (start / "train.py").write_text("print('start')\n")
    if own:
        (start / "lab.yaml").write_bytes(own)
    (folder.path / "course.yaml").write_text(COURSE.replace("{due", "{template: start, due"))
    folder.refresh()
    publish_starters(folder, find_paths())
    published = find_published(folder, "hw3")
    assert published is not None
    document = encode_starter(published)
    settings = CourseProviderSettings(
        keeper="ssh://ml@keeper:22",
        host_key=f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{'A' * 43}",
        course="ml",
        student="alice",
        seat="0123456789ab",
    )
    lab = describe_course_lab(settings, tmp_path / "labs", "ml:1", "")
    (result,) = deliver_starters(
        lab, {"hw3": hash_document(document)}, {"hw3": ""}, lambda *_: document, find_paths()
    )
    text = (result.directory / "lab.yaml").read_bytes()
    hand_in(folder, "alice", DUE_AT - 100, "start", lab_file=text)
    (alice,) = write_code_folders(folder, collect(folder, "hw3"), tmp_path / "read")
    assert Path(alice.diff).read_text() == ""
    hand_in(folder, "alice", DUE_AT - 50, "start", lab_file=text + b"env: {SEED: 1}\n")
    (changed,) = write_code_folders(folder, collect(folder, "hw3"), tmp_path / "read")
    lines = Path(changed.diff).read_text().splitlines()
    assert "+env: {SEED: 1}" in lines
    assert not any("host_key" in line for line in lines)


def test_an_extension_counts_afterwards_too(folder: CourseFolder) -> None:
    hand_in(folder, "alice", DUE_AT + 3600)
    Receiver(folder.drop).extend("hw3", "alice", 2 * DAY_S)
    assert seats_of(folder)["alice"].penalty == 0
    Receiver(folder.drop).extend("hw3", "alice", -4 * DAY_S)
    assert seats_of(folder)["alice"].state == "closed"


def test_ten_seconds_late_are_within_the_grace_period(folder: CourseFolder) -> None:
    hand_in(folder, "alice", DUE_AT + 10)
    hand_in(folder, "dan", DUE_AT + 601)
    found = seats_of(folder)
    alice, dan = found["alice"], found["dan"]
    assert (alice.late_s, alice.penalty, alice.in_grace_s) == (0, 0, 10)
    assert (dan.late_s, dan.penalty, dan.in_grace_s) == (601, 10, 0)
    text = folder.config.path.read_text()
    folder.config.path.write_text(text.replace("penalty: 10", "penalty: 10, grace: none"))
    folder.refresh()
    assert seats_of(folder)["alice"].penalty == 10


def test_after_the_end_nothing_is_taken_in(folder: CourseFolder) -> None:
    hand_in(folder, "alice", DUE_AT - 100, "in time")
    with pytest.raises(PolicyError, match="closed"):
        hand_in(folder, "alice", DUE_AT + 3 * DAY_S, "better")
    assert seats_of(folder)["alice"].number == 1


def edit_receipt(folder: CourseFolder, **change: Any) -> None:
    place = Receiver(folder.drop).find_bundle("hw3", "alice").with_name("receipt.json")
    body = json.loads(place.read_text())
    body["receipt"].update(change)
    place.chmod(0o600)
    place.write_text(json.dumps(body))


def test_an_edited_receipt_and_bundle_do_not_count(folder: CourseFolder) -> None:
    hand_in(folder, "alice", DUE_AT + 3600)
    edit_receipt(folder, received="2026-11-28T00:00:00Z", late_s=0, penalty=0)
    found = collect(folder, "hw3")
    alice = found.submissions[0]
    assert alice.state == "damaged"
    assert "changed after it was signed" in alice.why
    assert len(found.damaged) == 1
    hand_in(folder, "alice", DUE_AT + 7200, "again")
    again = seats_of(folder)["alice"]
    assert (again.state, again.number) == ("in", 2)
    assert "0001" in again.why


def test_the_ledger_hears_of_each_submission_once(folder: CourseFolder) -> None:
    hand_in(folder, "alice", DUE_AT - 100)
    for _ in range(2):
        collect(folder, "hw3", by="staff")
    [line] = folder.ledger.list_entries(kind="collected")
    assert (line.seat, line.by, line.detail["assignment"]) == ("alice", "staff", "hw3")
    hand_in(folder, "alice", DUE_AT - 50, "new")
    collect(folder, "hw3")
    assert len(folder.ledger.list_entries(kind="collected")) == 2


def test_what_was_posted_into_a_bucket_is_taken_in_first(
    folder: CourseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver(folder.drop)
    write_assignment(receiver, "hw3", "s3://bucket/drop", {"course": "ml", "due": DUE})

    def posts(there: Receiver, name: str, profile: str) -> list[CollectedPost]:
        assert (there.directory, name, profile) == (folder.drop, "hw3", "teaching")
        hand_in(folder, "alice", DUE_AT - 100)
        signed = there.receipts(name, "alice")[0]
        refused = CollectedPost(student="bob", signed=None, why="it is a zip bomb")
        return [CollectedPost(student="alice", signed=signed), refused]

    monkeypatch.setattr(receiving, "collect_posts", posts)
    found = collect(folder, "hw3", profile="teaching")
    assert (found.fetched, found.refused) == (1, ("bob: it is a zip bomb",))
    assert [one.seat for one in found.accepted] == ["alice"]


def test_an_excused_student_is_not_missing(folder: CourseFolder) -> None:
    hand_in(folder, "dan", DUE_AT - 100)
    lines = [
        draft_excuse_line("hw3", seat, student, excused=True, why="ill")
        for seat, student in (("alice", "alice"), ("team-1", "bob"), ("dan", "dan"))
    ]
    folder.ledger.append_all(lines)
    submissions = seats_of(folder)
    alice, team, dan = submissions["alice"], submissions["team-1"], submissions["dan"]
    assert (alice.state, alice.why) == ("excused", "ill")
    assert (team.state, team.why) == ("missing", ""), "carol is not excused"
    assert (dan.state, dan.why) == ("in", "excused: ill")
    found = find_paths({"HOME": str(folder.path)})
    staff = CourseOperator(folder, found, State(found.database), SilentReporter())
    collect_one = make_collector(staff)
    assert collect_one("hw3") == "1 submitted and intact, 1 missing, 1 excused"


def test_strangers_are_named_and_wrong_names_helped(folder: CourseFolder) -> None:
    hand_in(folder, "zoe", DUE_AT - 100)
    assert collect(folder, "hw3").strangers == ("zoe",)
    with pytest.raises(NotFoundError, match="hw33") as missing:
        collect(folder, "hw33")
    assert "hw3" in missing.value.why
    Receiver(folder.drop).assignment_file("hw3").unlink()
    with pytest.raises(NotFoundError, match="nobody could submit"):
        collect(folder, "hw3")


def graded(folder: CourseFolder, seat: str, score: float = 40.0) -> GradeRecord:
    """As if its submission had been run and found half right."""
    handed = seats_of(folder)[seat]
    made = GradeRecord(
        assignment="hw3", seat=seat, students=handed.students, student=handed.student,
        number=handed.number, received=handed.received, bundle_sha256=handed.sha256, key="k",
        outcome="graded", points=100.0, raw=GradeResults(score=50), score=score,
        late_s=handed.late_s, penalty=handed.penalty,
    )  # fmt: skip
    GradeStore(folder, "hw3").store_grade(made, fresh=True, output=ProgramOutput())
    return made


def finals(folder: CourseFolder) -> dict[str, float | None]:
    return {one.student: one.final for one in list_grades(folder, "hw3")}


def test_the_graded_submissions_lateness_is_taken_off_once_for_a_whole_team(
    folder: CourseFolder,
) -> None:
    hand_in(folder, "carol", DUE_AT + 3600)
    hand_in(folder, "alice", DUE_AT - 100)
    graded(folder, "team-1")
    graded(folder, "alice")
    hand_in(folder, "alice", DUE_AT + 3600, "after it was graded")
    assert finals(folder) == {"alice": 50, "bob": 40, "carol": 40, "dan": None}


def test_a_release_is_for_whoever_has_a_grade(folder: CourseFolder) -> None:
    with pytest.raises(NotFoundError, match="hw3 has no graded submission"):
        release_grades(folder, "hw3")
    hand_in(folder, "carol", DUE_AT - 100)
    graded(folder, "team-1")
    for _ in range(2):
        found = release_grades(folder, "hw3", by="staff")
    assert (found.students, found.waiting) == (("bob", "carol"), ("alice", "dan"))
    assert len(folder.ledger.list_entries(kind="released")) == 2
    page = GradeStore(folder, "hw3").grade_directory("bob") / "feedback.html"
    released = page.read_text()
    assert "submission 1" in released
    graded(folder, "team-1", score=60.0)
    assert page.read_text() == released, "a new grade is not released by the old one's release"


def asked(folder: CourseFolder, whose: str, **request: str) -> dict[str, Any]:
    """The receiver's answer to what a student's key sends."""
    source = io.BytesIO(json.dumps({"do": "feedback", **request}).encode() + b"\n")
    sink = io.BytesIO()
    serve(Receiver(folder.drop), whose, source, sink)
    found: dict[str, Any] = json.loads(sink.getvalue())
    return found


def test_a_student_fetches_their_own_released_grade_and_no_other(folder: CourseFolder) -> None:
    hand_in(folder, "carol", DUE_AT + 3600)
    graded(folder, "team-1")
    assert asked(folder, "bob", assignment="hw3") == {"feedback": None}
    release_grades(folder, "hw3")
    found = asked(folder, "bob", assignment="hw3")["feedback"]
    assert (found["score"], found["points"], found["number"]) == (40, 100, 1)
    assert "late, -10%: final score 40" in found["text"]
    assert found["page"].startswith("<!doctype html>")
    refused = asked(folder, "alice", assignment="hw3", student="bob")["error"]
    assert refused["kind"] == "PolicyError"
    assert asked(folder, "alice", assignment="hw3") == {"feedback": None}
    for name in ("../hw3", "hw3/../../x", "hw9\x1b[2J"):
        assert "error" in asked(folder, "bob", assignment=name)
    graded(folder, "team-1", score=60.0)
    assert asked(folder, "bob", assignment="hw3")["feedback"] == found


def staff_of(folder: CourseFolder, grading: str) -> CourseOperator:
    (folder.path / "course.yaml").write_text(COURSE + grading)
    folder.refresh()
    found = find_paths()
    return CourseOperator(folder, found, State(found.database), SilentReporter())


@pytest.mark.parametrize(
    ("grading", "kind", "says"),
    [
        ("", ConfigError, "no grading server"),
        (
            "grading: {server: {provider: local}}\n",
            PolicyError,
            "cannot be graded on a local server",
        ),
        (
            "grading: {server: {provider: static, static: {hosts: [g]}}, image: {build: .}}\n",
            ConfigError,
            "own folder",
        ),
        (
            "  hw5: {tests: {hidden: hw5/hidden}}\n"
            "grading: {server: {provider: static, static: {hosts: [g]}}, image: {build: hw5}}\n",
            ConfigError,
            "cannot be built from hw5, which contains or is in hw5/hidden",
        ),
    ],
)
def test_where_nothing_is_graded(
    folder: CourseFolder, grading: str, kind: type[LabError], says: str
) -> None:
    with pytest.raises(kind, match=says) as refused:
        build_grading_context(staff_of(folder, grading))
    assert refused.value.hint


def test_staffs_own_solution_may_be_tried_in_a_container_here(folder: CourseFolder) -> None:
    staff = staff_of(folder, "grading: {image: 'x:1'}\n")
    context = build_grading_context(staff, is_own_code=True)
    assert context.config.server.on_this_machine
    with pytest.raises(PolicyError):
        build_grading_context(staff)


GRADER = "grading: {server: {provider: static, static: {hosts: [g]}}, image: 'x:1'}\n"


def test_a_grading_server_is_told_no_names_and_does_not_live_for_ever(
    folder: CourseFolder,
) -> None:
    context = build_grading_context(staff_of(folder, GRADER))
    assert context.config.server.need.ttl_s == 12 * 3600
    assert context.config.image.reference == "x:1"
    assert (context.config.data, context.config.store, context.config.secrets) == ({}, "", ())
    assert context.config.root.is_relative_to(folder.private)


class Answering:
    """A program on a server, as far as the look at it goes."""

    def __init__(self, reply: GradingCheckReply) -> None:
        self.reply = reply

    def call(self, verb: object, request: LabRequest, **_: Any) -> GradingCheckReply:
        assert verb is CHECK_GRADING
        return self.reply


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (GradingCheckReply(read_boot_token(), ()), "this machine"),
        (GradingCheckReply("other", ("~/.aws/credentials",)), "holds credentials"),
    ],
)
def test_this_machine_and_one_with_credentials_are_refused(
    folder: CourseFolder, monkeypatch: pytest.MonkeyPatch, reply: GradingCheckReply, says: str
) -> None:
    from labctl.model import Endpoint, Offer, Server

    server = Server(
        id="static-g-1", provider="static", lab="x", lab_id="1", alias="g",
        endpoint=Endpoint(host="g"), offer=Offer(provider="static", type="g"), created_at=0.0,
    )  # fmt: skip
    made = GradingServer(build_grading_context(staff_of(folder, GRADER)), server)
    monkeypatch.setattr(made, "remote", lambda: Answering(reply))
    with pytest.raises(PolicyError, match=says):
        made.check()
