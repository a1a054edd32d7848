"""Regrade requests: over the connection of submissions, limited, and answered once."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from submission_bed import make_receiver

from labctl.courses.marking import give_mark
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.records.marks import read_marks
from labctl.courses.records.regrade_requests import MOST_REQUESTS
from labctl.courses.regrades import (
    RegradeDesk,
    answer_regrade,
    answer_with_marks,
    list_regrades,
    prepare_answer,
)
from labctl.courses.release import release_grades
from labctl.courses.rubric_form import ItemEdit, merge_marks
from labctl.errors import NotFoundError, UsageError
from labctl.submissions.receiver import Receiver
from labctl.submissions.service import MOST_LINE_BYTES, serve
from labctl.wire.line_requests import encode_request
from labctl.wire.receiver import (
    ASK_REGRADE,
    MOST_REGRADE_CHARS,
    READ_FEEDBACK,
    AskRegradeRequest,
    ReadFeedbackRequest,
)

ROSTER = "id,name,active\nalice,Alice,yes\nbob,Bob,yes\nold,Old,no\n"


@pytest.fixture
def folder(tmp_path: Path) -> CourseFolder:
    course = tmp_path / "ml"
    course.mkdir()
    text = "course: ml\nassignments:\n  essay: {points: 10, rubric: {text: 10}}\n  other: {}\n"
    (course / "course.yaml").write_text(text)
    (course / "roster.csv").write_text(ROSTER)
    make_private(course)
    make_receiver(course / ".course")
    return CourseFolder(course)


@pytest.fixture
def released(folder: CourseFolder) -> CourseFolder:
    for student in ("alice", "bob"):
        give_mark(folder, "essay", student, "text", "5")
    release_grades(folder, "essay")
    return folder


def send(folder: CourseFolder, student: str, line: bytes) -> dict[str, Any]:
    """Return the reply to what a student's key sends."""
    sink = io.BytesIO()
    serve(
        Receiver(folder.drop),
        student,
        io.BytesIO(line),
        sink,
        course=lambda: RegradeDesk(CourseFolder(folder.path)),
    )
    reply: dict[str, Any] = json.loads(sink.getvalue())
    return reply


def ask(folder: CourseFolder, student: str, text: str, name: str = "essay") -> dict[str, Any]:
    return send(folder, student, encode_request(ASK_REGRADE, AskRegradeRequest(name, text)))


def read_own(folder: CourseFolder, student: str) -> list[dict[str, Any]]:
    reply = send(folder, student, encode_request(READ_FEEDBACK, ReadFeedbackRequest("essay")))
    regrades: list[dict[str, Any]] = reply.get("regrades", [])
    return regrades


def test_a_student_asks_and_reads_the_answer_and_nobody_elses(released: CourseFolder) -> None:
    assert ask(released, "alice", "why 5?") == {"number": 1}
    (request,) = list_regrades(released, "essay")
    assert (request.student, request.text, request.is_open) == ("alice", "why 5?", True)
    (own,) = read_own(released, "alice")
    assert (own["text"], own.get("answer", "")) == ("why 5?", "")
    answer_regrade(released, "essay", "alice", "7 it is", accepted=True, by="ann")
    (own,) = read_own(released, "alice")
    assert (own["answer"], own["accepted"]) == ("7 it is", True)
    assert read_own(released, "bob") == []
    assert [(one.kind, one.by) for one in released.ledger.list_entries()][-2:] == [
        ("regrade", "alice"),
        ("answered", "ann"),
    ]


def test_only_a_released_grade_of_ones_own_can_be_regraded(folder: CourseFolder) -> None:
    assert "not been released" in ask(folder, "alice", "more")["error"]["what"]
    for student, name in (("alice", "../essay"), ("alice", "unknown"), ("stranger", "essay")):
        reply = ask(folder, student, "more", name=name)
        assert "error" in reply
        assert str(folder.path) not in json.dumps(reply)
    assert "has left" in ask(folder, "old", "more")["error"]["what"]
    line = json.dumps({"do": "regrade", "student": "bob", "assignment": "essay", "text": "x"})
    assert send(folder, "alice", line.encode() + b"\n")["error"]["kind"] == "PolicyError"
    assert folder.ledger.list_entries(kind="regrade") == []


def test_a_flood_leaves_few_lines(released: CourseFolder) -> None:
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda n: ask(released, "alice", f"again {n}"), range(16)))
    assert sum("number" in reply for reply in replies) == 1
    for number in range(2, MOST_REQUESTS + 1):
        answer_regrade(released, "essay", "alice", "no")
        assert ask(released, "alice", "again") == {"number": number}
    answer_regrade(released, "essay", "alice", "no")
    assert f"at most {MOST_REQUESTS}" in ask(released, "alice", "again")["error"]["why"]
    assert len(released.ledger.list_entries(kind="regrade")) == MOST_REQUESTS
    assert ask(released, "bob", "another student can still ask") == {"number": 1}


def test_the_same_request_twice_is_one(released: CourseFolder) -> None:
    """A double click, or a command that is repeated, gets the number of the first."""
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda _: ask(released, "alice", "look\nagain"), range(16)))
    assert replies == [{"number": 1}] * 16
    assert len(released.ledger.list_entries(kind="regrade")) == 1
    assert "has no answer yet" in ask(released, "alice", "and this")["error"]["why"]


def test_long_and_hostile_words_are_refused_or_cleaned(released: CourseFolder) -> None:
    for text in ("", " \n ", "x" * (MOST_REGRADE_CHARS + 1)):
        assert ask(released, "alice", text)["error"]["kind"] == "UsageError"
    assert "error" in ask(released, "alice", "x" * MOST_LINE_BYTES)
    longest = "\N{GRINNING FACE}" * (MOST_REGRADE_CHARS - 5) + "\x1b[2Ja"
    assert ask(released, "alice", longest) == {"number": 1}
    (request,) = list_regrades(released, "essay", "alice")
    assert "\x1b" not in request.text
    assert request.text.endswith("[2Ja")


def test_a_request_is_answered_once(released: CourseFolder) -> None:
    ask(released, "alice", "why?")
    with pytest.raises(UsageError, match="no text"):
        answer_regrade(released, "essay", "alice", " ")
    answer_regrade(released, "essay", "alice", "because", by="ann")
    with pytest.raises(NotFoundError, match="no open request") as refused:
        answer_regrade(released, "essay", "alice", "again")
    assert "ann answered the last one" in refused.value.why
    with pytest.raises(NotFoundError, match="there is no student"):
        answer_regrade(released, "essay", "alcie", "because")
    with pytest.raises(NotFoundError, match="there is no assignment"):
        list_regrades(released, "esay")


def test_a_receiver_without_a_course_takes_no_requests(released: CourseFolder) -> None:
    sink = io.BytesIO()
    line = encode_request(ASK_REGRADE, AskRegradeRequest("essay", "x"))
    serve(Receiver(released.drop), "alice", io.BytesIO(line), sink)
    error = json.loads(sink.getvalue())["error"]
    assert "takes no regrade requests" in error["what"]
    assert error["hint"].startswith("labctl submit --grade")


def test_of_two_prepared_answers_the_later_saves_neither_itself_nor_its_mark(
    released: CourseFolder,
) -> None:
    ask(released, "alice", "why 5?")
    first, second = (
        prepare_answer(released, "essay", "alice", by, accepted=True, by=by)
        for by in ("ann", "ben")
    )
    before = merge_marks(
        released.find_seat("alice"), read_marks(released.ledger.list_entries(), "essay"), "text"
    )
    edit = ItemEdit(item="text", points="9", note="", shown=("5", ""), version=before.version)
    save = partial(answer_with_marks, released, "essay", "alice", bundle_sha256="")
    save(first, [], by="ann")
    with pytest.raises(NotFoundError, match="no open request") as caught:
        save(second, [edit], by="ben")
    assert caught.value.why == "ann answered request 1"
    assert read_marks(released.ledger.list_entries(), "essay")["alice"]["text"].points == 5
    assert [one.answer for one in list_regrades(released, "essay")] == ["ann"]
