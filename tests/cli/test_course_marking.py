"""course mark, excuse, regrades, statistics and grades --rubric on the command line."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from submission_bed import packed

from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.marks import draft_mark_line
from labctl.courses.records.regrade_requests import draft_request_line
from labctl.courses.totals import read_released_total
from labctl.submissions.receive import write_assignment
from labctl.submissions.receiver import Receiver

Labctl = Callable[..., Any]
COURSE = """\
course: ml
assignments:
  essay: {points: 30, rubric: {text: 10, talk: 20}}
"""

RECEIVER = {"course": "ml", "host_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFAKE"}


@pytest.fixture
def course(home: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch) -> CourseFolder:
    (home / "roster.csv").write_text("id,name\nalice,Alice\nbob,Bob\n")
    monkeypatch.chdir(home)
    assert labctl("course", "init", "ml", "--roster", "roster.csv").code == 0
    (home / "ml" / "course.yaml").write_text(COURSE)
    return CourseFolder(home / "ml")


@pytest.fixture
def run(course: CourseFolder, labctl: Labctl) -> Labctl:
    def run(*words: str, by: str = "ann", **more: Any) -> Any:
        return labctl("-C", "ml", "course", "--as", by, *words, **more)

    return run


def test_marks_and_their_graders_are_in_the_grades(run: Labctl) -> None:
    said = run("mark", "essay", "alice", "text", "8", "--note", "clear \x1b[2J")
    assert (said.code, said.out) == (0, "alice: text 8 of 10\n")
    run("mark", "essay", "alice", "talk", "17", by="ben")
    refused = run("mark", "essay", "alice", "talk", "1")
    assert refused.code == 3
    assert "ben gave them" in refused.err
    assert "--replace" in refused.err
    said = run("grades", "essay", "--rubric")
    row = next(line for line in said.out.splitlines() if line.startswith("alice"))
    assert row.split()[:7] == ["alice", "Alice", "8", "(ann)", "17", "(ben)", "25"]
    report = json.loads(run("grades", "essay", "--json").out)["grades"][0]
    assert [one["mark"]["by"] for one in report["items"]] == ["ann", "ben"]
    assert "\x1b" not in said.out + run("grades", "essay", "--json").out


def test_a_mark_without_a_submission_says_so_and_counts(run: Labctl, course: CourseFolder) -> None:
    marked = run("mark", "essay", "bob", "text", "3")
    assert (marked.code, marked.out) == (0, "bob: text 3 of 10\n")
    assert marked.err == "! bob has not submitted essay; the points count all the same\n"
    assert run("mark", "essay", "bob", "text", "--undo").err == ""
    submit(course, "alice", time.time())
    assert run("mark", "essay", "alice", "text", "3").err == ""


def test_what_is_unmarked_is_listed_and_not_released(run: Labctl) -> None:
    nothing = "There is nothing to mark: nobody has submitted essay.\n"
    assert run("mark", "essay", "--list").out == nothing
    run("mark", "essay", "bob", "text", "8")
    said = run("mark", "essay", "--list")
    assert "talk (20)" in said.out
    assert json.loads(run("mark", "essay", "--list", "--json").out)["unmarked"][0]["seat"] == "bob"
    assert "not marked yet: talk" in run("grades", "essay").out
    refused = run("grades", "essay", "--release")
    assert refused.code == 4
    assert "bob: not marked yet: talk" in refused.err
    run("mark", "essay", "bob", "talk", "20")
    assert run("mark", "essay", "--list").out == "Every submission for essay is marked.\n"
    run("mark", "essay", "alice", "talk", "20")
    said = run("grades", "essay", "--release")
    assert "released to 1 student; not released: alice" in said.err
    assert "not complete: alice: not marked yet: text" in said.err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("essay", "alice", "text", "11"), 2, "worth 10 points"),
        (("essay", "alice", "tetx", "1"), 4, "did you mean text?"),
        (("essay", "alic", "text", "1"), 4, "did you mean alice?"),
        (("essay", "alice", "text"), 2, "a mark needs"),
        (("essay", "alice"), 2, "a mark needs"),
        (("essay", "alice", "text", "1", "--undo"), 2, "a mark needs"),
        (("essay", "--next"), 2, "not a terminal"),
        (("essay", "alice", "--list"), 2, "take only an assignment"),
        (("essay", "alice", "text", "--undo"), 4, "no mark"),
    ],
)
def test_wrong_marks_name_the_next_command(
    run: Labctl, words: tuple[str, ...], code: int, says: str
) -> None:
    said = run("mark", *words)
    assert said.code == code
    assert says in said.err
    assert "next: labctl" in said.err


@contextmanager
def mark_in_a_terminal(
    course: CourseFolder, by: str = "ann"
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run `mark --next` with a terminal as its input; yield it and the terminal's other end."""
    controller, terminal = os.openpty()
    words = ["-C", str(course.path), "course", "--as", by, "mark", "essay", "--next"]
    with subprocess.Popen(
        [sys.executable, "-m", "labctl", *words],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(terminal)
        yield process, controller
        os.close(controller)


def answer_in_a_terminal(
    course: CourseFolder, answers: str, by: str = "ann"
) -> tuple[int, str, str]:
    """Answer what `mark --next` asks; return its code and what it printed."""
    with mark_in_a_terminal(course, by) as (process, controller):
        os.write(controller, answers.encode())
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_next_asks_for_each_item_and_offers_earlier_notes(
    run: Labctl, course: CourseFolder
) -> None:
    run("mark", "essay", "alice", "text", "8", "--note", "too short")
    run("mark", "essay", "bob", "talk", "8")
    code, out, err = answer_in_a_terminal(course, "25\n15\nwell told\n3\n1\n")
    assert code == 0, err
    assert "alice (Alice), no submission, 1 of 2" in out
    assert "worth 20 points, and 25 is more" in err
    assert "1  too short" in err
    assert "2 marks given; nothing is left" in err
    marks = {
        (one["student"], item["name"]): item["mark"]
        for one in json.loads(run("grades", "essay", "--json").out)["grades"]
        for item in one["items"]
    }
    assert (marks["alice", "talk"]["points"], marks["alice", "talk"]["note"]) == (15, "well told")
    assert (marks["bob", "text"]["points"], marks["bob", "text"]["note"]) == (3, "too short")


def test_next_leaves_out_what_another_grader_has_open_or_has_marked(
    run: Labctl, course: CourseFolder
) -> None:
    for student in ("alice", "bob"):
        run("mark", "essay", student, "text", "8")
    with mark_in_a_terminal(course) as (anns, controller):
        assert anns.stdout is not None
        while "alice (Alice)" not in anns.stdout.readline():
            pass
        code, out, err = answer_in_a_terminal(course, "12\n\n", by="ben")
        assert (code, "bob (Bob)" in out, "alice (Alice)" in out) == (0, True, False)
        assert "alice: skipped, since another grader is marking it" in err
        os.write(controller, b"15\n\n")
        out, err = anns.communicate(timeout=60)
    assert "bob" not in out
    assert "1 mark given; nothing is left" in err


def test_next_can_be_skipped_and_stopped(run: Labctl, course: CourseFolder) -> None:
    for student in ("alice", "bob"):
        run("mark", "essay", student, "text", "8")
    code, out, err = answer_in_a_terminal(course, "s\nq\n")
    assert (code, "0 marks given" in err) == (0, True)
    assert "bob (Bob)" in out


def test_next_says_what_is_left_and_how_to_release(run: Labctl, course: CourseFolder) -> None:
    run("mark", "essay", "alice", "text", "8")
    run("mark", "essay", "bob", "text", "8")
    code, _, err = answer_in_a_terminal(course, "17\n\ns\n")
    assert (code, "1 mark given; 1 item left" in err) == (0, True), err
    code, _, err = answer_in_a_terminal(course, "17\n\n")
    assert (code, "1 mark given; nothing is left" in err) == (0, True), err
    assert "  next: labctl course grades essay --release" in err
    code, out, err = answer_in_a_terminal(course, "")
    assert (code, out, err) == (0, "", "Every submission for essay is marked.\n")


def test_marks_older_than_the_submission_are_asked_again(run: Labctl, course: CourseFolder) -> None:
    for item, points in (("text", "8"), ("talk", "17")):
        run("mark", "essay", "alice", item, points, "--note", "good")
    assert run("mark", "essay", "--list").out == "Every submission for essay is marked.\n"
    submit_after_the_marks(course, "alice")
    reason = "marked before submission 1 arrived: text, talk"
    said = run("mark", "essay", "--list")
    assert "text (10), talk (20)" in said.out
    assert reason in " ".join(said.out.split())
    task = json.loads(run("mark", "essay", "--list", "--json").out)["unmarked"][0]
    assert [mark["points"] for marks in task["outdated"].values() for mark in marks] == [8, 17]
    # One mark is kept, the other skipped: it stays to be marked, until a grader gives it again.
    code, out, err = answer_in_a_terminal(course, "k\ns\n", by="ben")
    assert (code, "1 mark given; 1 item left" in err) == (0, True), err
    assert reason in out
    assert "text (0-10, or k to keep the 8 of ann)" in out
    assert "alice: text 8 of 10 (was 8, by ann)" in out
    assert "marked before submission 1 arrived: talk" in run("mark", "essay", "--list").out
    run("mark", "essay", "alice", "talk", "18")
    assert run("mark", "essay", "--list").out == "Every submission for essay is marked.\n"
    items = json.loads(run("grades", "essay", "--json").out)["grades"][0]["items"]
    marks = [(one["mark"]["points"], one["mark"]["by"], one["mark"]["note"]) for one in items]
    assert marks == [(8, "ben", "good"), (18, "ann", "")]


@pytest.mark.parametrize("format_", ["own", "csv"])
def test_an_export_holds_back_marks_older_than_the_submission(
    run: Labctl, course: CourseFolder, format_: str
) -> None:
    for student in ("alice", "bob"):
        for item, points in (("text", "8"), ("talk", "17")):
            run("mark", "essay", student, item, points)
    export = ("grades", "essay", "--format", format_)
    assert run(*export).out.count("25") == 2
    submit_after_the_marks(course, "alice")
    said = run(*export)
    assert [line for line in said.out.splitlines() if "25" in line and "bob" in line]
    assert said.out.count("25") == 1
    assert said.err == (
        "held back, since the marks are for an older submission: alice\n"
        "  next: labctl course mark essay --next\n"
    )
    totals = run("grades")
    outdated = "counted, though marked for an older submission: alice (essay)\n"
    assert (totals.out.count("25"), totals.err) == (4, outdated)
    with_reason = run("grades", "essay", "--format", "csv", "--rubric").out
    assert "marked before submission 1 arrived: text, talk" in with_reason
    # What a student has seen stays: a release has decided about it.
    run("mark", "essay", "alice", "text", "9")
    run("mark", "essay", "alice", "talk", "17")
    run("grades", "essay", "--release")
    submit_after_the_marks(course, "alice", run="r2")
    said = run(*export)
    assert ("26" in said.out, "held back" in said.err) == (True, False), said.out


def submit_after_the_marks(course: CourseFolder, student: str, **more: str) -> None:
    """Submit at the next full second, which a receipt shows, and wait for it."""
    at = int(time.time()) + 1
    submit(course, student, at, **more)
    time.sleep(max(0.0, at - time.time()))


def submit(course: CourseFolder, student: str, at: float, **more: str) -> None:
    receiver = Receiver(course.drop, lambda: at)
    receiver.init()
    write_assignment(receiver, "essay", "ssh://drop@course.example", RECEIVER)
    data = packed(student=student, assignment="essay", **more)
    about = ("essay", student, hashlib.sha256(data).hexdigest(), len(data))
    receiver.begin(*about)
    receiver.write(*about, 0, data)
    receiver.finish(*about)


def test_a_mark_is_for_the_submission_that_its_grader_has_read(
    run: Labctl, course: CourseFolder
) -> None:
    submit(course, "alice", time.time() - 60)
    with mark_in_a_terminal(course) as (anns, controller):
        assert anns.stdout is not None
        while "alice (Alice), submission 1" not in anns.stdout.readline():
            pass
        # By its stamp it arrives before the marks, whose grader reads the first one.
        submit(course, "alice", time.time() - 30, run="r2")
        os.write(controller, b"8\n\n17\n\n")
        out, err = anns.communicate(timeout=60)
    assert "alice: submission 2 has arrived; these marks are for submission 1" in err, out
    reason = "marked for submission 1 instead of 2: text, talk"
    assert reason in " ".join(run("mark", "essay", "--list").out.split())
    assert reason in run("grades", "essay").out
    said = run("mark", "essay", "alice", "text", "8")
    assert said.out == "alice: text 8 of 10 (was 8, by ann, for submission 1)\n"
    assert "marked for submission 1 instead of 2: talk" in run("grades", "essay").out
    items = json.loads(run("grades", "essay", "--json").out)["grades"][0]["items"]
    assert [one["mark"]["submission"]["number"] for one in items] == [2, 1]


def test_marks_for_an_older_submission_are_not_released(run: Labctl, course: CourseFolder) -> None:
    for student in ("alice", "bob"):
        for item, points in (("text", "8"), ("talk", "17")):
            run("mark", "essay", student, item, points)
    submit_after_the_marks(course, "alice")
    said = run("grades", "essay", "--release")
    reason = "alice: marked before submission 1 arrived: text, talk"
    assert said.err.splitlines()[:3] == [
        f"not complete: {reason}",
        "released to 1 student; not released: alice",
        "  next: labctl course mark essay --next",
    ]
    assert run("mark", "essay", "alice", "text", "8").code == 0
    submit(course, "bob", time.time())
    refused = run("grades", "essay", "--release")
    assert (refused.code, "essay has no complete grade yet" in refused.err) == (4, True)
    assert "alice: marked before submission 1 arrived: talk" in refused.err
    assert "next: labctl course mark essay --next" in refused.err
    run("mark", "essay", "alice", "talk", "17")
    assert "released to 1 student; not released: bob" in run("grades", "essay", "--release").err


def test_a_mark_of_an_earlier_version_is_compared_by_its_time(
    run: Labctl, course: CourseFolder
) -> None:
    at = time.time()
    for item, given in (("text", at - 60), ("talk", at - 20)):
        draft = draft_mark_line("essay", "alice", "alice", item, 5)
        course.ledger.append_all([msgspec.structs.replace(draft, at=given)])
    submit(course, "alice", at - 40)
    said = run("grades", "essay")
    assert "marked before submission 1 arrived: text" in said.out
    assert "talk" not in said.out


def test_ctrl_c_stops_marking_and_what_was_given_stays(run: Labctl, course: CourseFolder) -> None:
    run("mark", "essay", "alice", "text", "8")
    run("mark", "essay", "bob", "text", "8")
    code, out, err = answer_in_a_terminal(course, "17\n\n\x04")  # Ctrl-D; \x03 needs a session
    assert (code, "1 mark given; 1 item left" in err) == (130, True), err
    assert "down" not in err, "no server is left by marking"
    assert "alice: talk 17 of 20" in out


def test_a_wrong_answer_repeats_what_can_be_entered(run: Labctl, course: CourseFolder) -> None:
    run("mark", "essay", "alice", "text", "8")
    _, out, err = answer_in_a_terminal(course, "17.\n17,5\n\nQ\n")
    wrong = err.splitlines().index("'17.' is not a number of points")
    assert "such as 7 or 7.5, s to skip an item, or q to stop" in err.splitlines()[wrong + 1]
    assert "alice: talk 17.5 of 20" in out
    assert run("mark", "essay", "alice", "text", "7,5").out.startswith("alice: text 7.5 of 10")


def test_a_mark_for_a_released_grade_says_that_the_student_sees_the_old_one(run: Labctl) -> None:
    for item, points in (("text", "8"), ("talk", "17")):
        assert "released" not in run("mark", "essay", "alice", item, points).err
    run("grades", "essay", "--release")
    said = run("mark", "essay", "alice", "text", "9")
    assert said.out == "alice: text 9 of 10 (was 8, by ann)\n"
    assert said.err.splitlines() == [
        "Students still see the released grades. The next release changes:",
        "  alice: 25 -> 26 (text marked 9)",
        "  next: labctl course grades essay --release",
        "        (asks first)",
    ]
    assert "alice: 25 -> no grade" in run("mark", "essay", "alice", "text", "--undo").err
    assert "released" not in run("mark", "essay", "bob", "text", "9").err
    said = run("mark", "essay", "alice", "text", "8", "--note", "clear")
    assert said.err.splitlines() == [
        "! alice has not submitted essay; the points count all the same",
        "alice can read this after the next release.",
        "  next: labctl course grades essay --release",
    ]


def test_who_of_a_team_lacks_a_mark_is_named(run: Labctl, course: CourseFolder) -> None:
    course.roster_file.write_text("id,name,team\nalice,Alice,owls\nbob,Bob,owls\n")
    run("mark", "essay", "owls", "text", "8")
    run("mark", "essay", "alice", "talk", "17", "--alone")
    assert "talk of bob (20)" in run("mark", "essay", "--list").out
    _, out, _ = answer_in_a_terminal(course, "12\n\n")
    assert "talk of bob (0-20):" in out
    assert "bob: talk 12 of 20" in out


def test_grading_an_assignment_of_a_rubric_alone_leads_to_marking(run: Labctl) -> None:
    refused = run("grade", "essay")
    assert refused.code == 2
    assert "people give all of its points" in refused.err
    assert "next: labctl course mark essay --next" in refused.err


def test_an_invitation_without_a_keeper_publishes_nothing(
    course: CourseFolder, run: Labctl
) -> None:
    template = "  hw1: {template: image-classifier-starter}\n"
    (course.path / "course.yaml").write_text(COURSE + template)
    refused = run("invite", "--all")
    assert refused.code == 2
    assert "names no keeper" in refused.err
    assert "hw1: 23 files" in run("push").out, "it was published by the refused command"


def test_an_excuse_is_shown_with_its_reason_and_taken_back(run: Labctl) -> None:
    assert run("excuse", "essay", "alice", "--why", "ill").out == "alice is excused: essay\n"
    assert "excused: ill" in run("grades", "essay").out
    assert run("excuse").out.split()[-4:] == ["essay", "alice", "ann", "ill"]
    for why in (("--why", "ill"), ()):
        again = run("excuse", "essay", "alice", *why)
        assert again.out == "alice was already excused: essay\n"
    assert run("excuse").out.split()[-1] == "ill", "a repeated command loses the reason"
    assert run("excuse", "essay", "alice", "--undo").code == 0
    assert run("excuse", "essay", "alice", "--undo").out == "alice was not excused: essay\n"
    assert run("excuse").out == "No student is excused.\n"
    assert json.loads(run("excuse", "--json").out)["excuses"] == []


def test_collect_counts_an_excused_student_apart(
    run: Labctl, course: CourseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    run("excuse", "essay", "alice", "--why", "ill")
    receiver = Receiver(course.drop)
    receiver.init()
    write_assignment(receiver, "essay", "ssh://drop@course.example", RECEIVER)
    said = run("collect", "essay")
    rows = [line.split() for line in said.out.splitlines()]
    assert rows[1] == ["alice", "Alice", "excused", *["-"] * 4, "ill"]
    assert rows[2] == ["bob", "Bob", "not", "yet", *["-"] * 4, "no", "due", "time"]
    assert said.out.splitlines()[3].startswith("0 of 2 submitted, 0 of them late, 1 excused.")


def test_a_release_in_a_large_class_names_a_few_who_wait(run: Labctl, course: CourseFolder) -> None:
    roster = "".join(f"s{number:02},Student {number}\n" for number in range(40))
    course.roster_file.write_text(f"id,name\n{roster}")
    for item, points in (("text", "8"), ("talk", "17")):
        run("mark", "essay", "s00", item, points)
    said = run("grades", "essay", "--release")
    (line,) = [one for one in said.err.splitlines() if one.startswith("released to")]
    assert line.startswith("released to 1 student; not released: s01, s02,")
    assert line.endswith("s12 and 27 more")


def test_a_repeated_release_adds_nothing_to_the_ledger(run: Labctl, course: CourseFolder) -> None:
    for item, points in (("text", "8"), ("talk", "17")):
        run("mark", "essay", "alice", item, points)
    for _ in range(2):
        assert run("grades", "essay", "--release").code == 0
    assert len(course.ledger.list_entries(kind="released")) == 1


def test_regrades_are_listed_and_answered(run: Labctl, course: CourseFolder) -> None:
    words = "why?\nbob, request 9\nI want \x1b[31mmore"
    course.ledger.append_all([draft_request_line("essay", "alice", 1, words)])
    said = run("regrades")
    assert "essay alice, request 1" in said.out
    assert "  | bob, request 9" in said.out
    assert "\x1b" not in said.out
    answer = 'labctl course regrades essay alice --answer "..."'
    assert said.err.splitlines()[:2] == [f"  next: {answer} --accept", f"        {answer}"]
    assert said.err.splitlines()[2].strip() == "(declines)"
    refused = run("regrades", "essay", "--answer", "x")
    assert refused.code == 2
    said = run("regrades", "essay", "alice", "--answer", "you are right", "--accept")
    assert said.out == "alice: request 1 for essay accepted\n"
    assert "labctl course mark essay alice" in said.err
    assert run("regrades").out == "No regrade request is open.\n"
    again = run("regrades", "essay", "alice", "--answer", "no")
    assert "labctl course regrades essay alice\n" in again.err
    assert "you are right" in run("regrades", "essay", "alice").out
    nobody = run("regrades", "essay", "bob", "--answer", "no")
    assert "the student has not asked" in nobody.err
    assert "labctl course grades essay\n" in nobody.err
    assert run("regrades", "essay", "bob").out == "bob has not asked for a regrade of essay.\n"
    (listed,) = json.loads(run("regrades", "--all", "--json").out)["regrades"]
    assert (listed["accepted"], listed["answered_by"]) == (True, "ann")


def test_an_accepted_regrade_carries_the_new_points_in_one_command(
    run: Labctl, course: CourseFolder
) -> None:
    run("mark", "essay", "alice", "text", "5", "--note", "too short", by="ben")
    run("mark", "essay", "alice", "talk", "20", by="ben")
    course.ledger.append_all([draft_request_line("essay", "alice", 1, "why 5?")])
    answer = ("regrades", "essay", "alice", "--answer", "you are right")
    for words, code, problem in (
        (("--mark", "text", "8"), 2, "a declined request changes no marks"),
        (("--accept", "--mark", "text", "11"), 2, "is worth 10 points"),
        (("--accept", "--mark", "tetx", "8"), 4, "did you mean text?"),
    ):
        refused = run(*answer, *words)
        assert (refused.code, problem in refused.err) == (code, True), refused.err
    refused = run(*answer, "--accept", "--mark", "text", "11")
    again = 'labctl course regrades essay alice --answer "..." --accept --mark text 10'
    assert refused.err.splitlines()[-1] == f"  next: {again}", "a mark alone is no answer"
    assert "essay alice, request 1" in run("regrades").out, "a refused answer was saved"
    said = run(*answer, "--accept", "--mark", "text", "8", "--mark", "talk", "19")
    assert said.out.splitlines() == [
        "alice: request 1 for essay accepted",
        "alice: text 8 of 10 (was 5, by ben)",
        "alice: talk 19 of 20 (was 20, by ben)",
    ]
    assert said.err == "next: labctl course grades essay --release\n"
    (row, _) = json.loads(run("grades", "essay", "--json").out)["grades"]
    marks = [
        (one["mark"]["points"], one["mark"]["note"], one["mark"]["by"]) for one in row["items"]
    ]
    assert marks == [(8, "too short", "ann"), (19, "", "ann")]
    assert run("regrades").out == "No regrade request is open.\n"


def test_statistics_draw_the_distribution(run: Labctl) -> None:
    assert "0 of 2 students have a grade" in run("statistics", "essay").out
    for student, points in (("alice", "10"), ("bob", "2")):
        run("mark", "essay", student, "text", points)
        run("mark", "essay", student, "talk", "20")
    said = run("statistics", "essay")
    assert "mean 26.0, median 26.0" in said.out
    assert "27-30  ######" in said.out
    assert said.out.splitlines()[-2].split()[:3] == ["text", "item", "60%"]
    report = json.loads(run("statistics", "essay", "--json").out)["statistics"]
    assert (report["mean"], len(report["bins"]), report["parts"][0]["name"]) == (26, 10, "text")


GROUPED = """\
course: ml
assignments:
  hw1: {points: 10, rubric: {text: 10}}
  hw2: {points: 10, rubric: {text: 10}}
  hw3: {points: 10, rubric: {text: 10}}
assignment_groups:
  homework: {assignments: [hw1, hw2, hw3], drop_lowest: 1}
"""


def test_totals_say_what_is_dropped_and_why(course: CourseFolder, run: Labctl) -> None:
    (course.path / "course.yaml").write_text(GROUPED)
    for name, points in (("hw1", "8"), ("hw2", "5"), ("hw3", "9")):
        run("mark", name, "alice", "text", points)
    run("excuse", "hw1", "bob", "--why", "ill")
    rows = [line.split() for line in run("grades").out.splitlines()]
    why = "hw2 is dropped: the lowest of 3 in homework"
    assert rows[1] == ["alice", "Alice", "8", "(5)", "9", "17", "20", *why.split()]
    assert rows[2] == ["bob", "Bob", "excused", "-", "-", "0", "0"]
    reports = json.loads(run("grades", "--json").out)["totals"]
    reason = "dropped: the lowest of 3 in homework"
    assert reports[0]["dropped"] == [{"assignment": "hw2", "reason": reason}]
    assert reports[1]["excused"] == ["hw1"]
    run("grades", "--format", "csv", "-o", "totals.csv")
    assert Path("totals.csv").read_text().splitlines() == [
        "student,team,hw1,hw2,hw3,total,points,dropped",
        f"alice,,8,5,9,17,20,{why}",
        "bob,,,,,0,0,",
    ]
    # The grade of the assignment says it too, and its own table; a platform gets every grade.
    assert reason in run("grades", "hw2").out
    assert reason not in run("grades", "hw1").out
    assert json.loads(run("grades", "hw2", "--json").out)["grades"][0]["dropped"] == reason
    table = run("grades", "hw2", "--rubric", "--format", "csv").out
    assert table.splitlines()[1].endswith(reason)
    assert "alice,Alice,5" in run("grades", "hw2", "--format", "csv").out


def test_totals_with_weights_are_percentages_in_every_form(
    course: CourseFolder, run: Labctl
) -> None:
    text = GROUPED.replace("  hw3:", "  exam: {points: 40, rubric: {text: 40}}\n  hw3:")
    text = text.replace("drop_lowest: 1}", "drop_lowest: 1, weight: 25%}")
    text += "  exams: {assignments: [exam], weight: 75%}\n"
    (course.path / "course.yaml").write_text(text)
    for name, points in (("hw1", "8"), ("hw2", "5"), ("hw3", "9"), ("exam", "20")):
        run("mark", name, "alice", "text", points)
    shown = run("grades")
    said = shown.out.splitlines()
    assert said[1].split()[:8] == ["alice", "Alice", "8", "(5)", "20", "9", "58.75", "100"]
    assert shown.err.startswith("TOTAL is a percentage: homework 25%, exams 75%.")
    (report, _) = json.loads(run("grades", "--json").out)["totals"]
    assert report["groups"][0] == {"name": "homework", "weight": 25, "final": 17, "points": 20}
    assert (report["total"], report["points"]) == (58.75, 100)
    assert "alice,,8,5,20,9,58.75,100," in run("grades", "--format", "csv").out


def test_a_regrade_above_another_grade_moves_the_drop(course: CourseFolder, run: Labctl) -> None:
    (course.path / "course.yaml").write_text(GROUPED)
    for name, points in (("hw1", "8"), ("hw2", "5"), ("hw3", "9")):
        run("mark", name, "alice", "text", points)
        run("grades", name, "--release")
    assert "hw2 is dropped" in run("grades").out
    course.ledger.append_all([draft_request_line("hw2", "alice", 1, "why 5?")])
    run("regrades", "hw2", "alice", "--answer", "yes", "--accept", "--mark", "text", "10")
    # Released grades count until the next release.
    assert "hw2 is dropped" in run("grades").out
    run("grades", "hw2", "--release", "--yes")
    said = run("grades").out.splitlines()[1].split()
    assert said[:7] == ["alice", "Alice", "(8)", "10", "9", "19", "20"]
    assert "hw1 is dropped: the lowest of 3 in homework" in run("grades").out
    reason = "dropped: the lowest of 3 in homework"
    assert reason in run("grades", "hw1").out
    assert reason not in run("grades", "hw2").out
    total = read_released_total(CourseFolder(course.path), "alice")
    assert total is not None
    assert (total.final, [one.assignment for one in total.dropped]) == (19, ["hw1"])


@pytest.mark.parametrize("words", [("--release",), ("--format", "canvas"), ("-o", "x.csv")])
def test_totals_refuse_what_concerns_one_assignment(run: Labctl, words: tuple[str, ...]) -> None:
    refused = run("grades", *words)
    assert refused.code == 2
    assert "next: labctl course grades" in refused.err
