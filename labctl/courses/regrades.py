"""Regrades: students ask through the receiver's connection, staff lists and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labctl.config.document import quote
from labctl.courses.collect import find_rules
from labctl.courses.grading.results import clean_text
from labctl.courses.lateness import read_free_days_left
from labctl.courses.marking import GivenMark, choose_students, find_item, parse_points
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.marks import read_marks
from labctl.courses.records.regrade_requests import (
    RegradeRequest,
    draft_answer_line,
    draft_request_line,
    read_regrades,
    refuse_request,
)
from labctl.courses.rubric_form import (
    ItemEdit,
    PreparedAnswer,
    SavedMarks,
    draft_edit,
    merge_marks,
    save_marks,
)
from labctl.courses.totals import read_released_total
from labctl.errors import NotFoundError, PolicyError, UsageError
from labctl.model import Value
from labctl.submissions.receiver import Receiver
from labctl.wire.receiver import MOST_REGRADE_CHARS, RegradeRecord, TotalRecord

MOST_ANSWER_CHARS = 2000


class RegradeDesk:
    """What the receiver's connections need of a course to answer one student."""

    def __init__(self, folder: CourseFolder) -> None:
        self.folder = folder

    def read_free_days(self, assignment: str, student: str) -> tuple[int, int]:
        """Return the free late days of the term, and how many of them the student still has.

        (0, 0) if the assignment has none.
        """
        return read_free_days_left(self.folder, assignment, student)

    def record_request(self, assignment: str, student: str, text: str) -> int:
        """Record a request; return its number. The same words as in the open request count once.

        PolicyError before the grade is released, while an earlier request is open, and after
        MOST_REQUESTS of them. UsageError for an empty or too long text.
        """
        self._require_member(student)
        words = check_text(text)
        if Receiver(self.folder.drop).feedback(assignment, student) is None:
            raise PolicyError(
                f"your grade for {assignment} has not been released yet",
                why="only a grade that you have seen can be regraded",
                hint="labctl submit --grade",
            )
        ledger = self.folder.ledger

        def check() -> None:
            earlier = read_regrades(ledger.list_entries(), assignment, student)
            if why := refuse_request(earlier):
                raise PolicyError(
                    "your request was not sent", why=why, hint="labctl submit --grade"
                )
            if len(earlier) + 1 != number:
                raise PolicyError("another request was sent at the same time")

        number = len(read_regrades(ledger.list_entries(), assignment, student)) + 1
        try:
            ledger.append_all([draft_request_line(assignment, student, number, words)], check=check)
        except PolicyError:
            for request in read_regrades(ledger.list_entries(), assignment, student):
                if request.is_open and request.text == words:
                    return request.number  # sent twice, as by a double click
            raise
        return number

    def list_for(self, assignment: str, student: str) -> tuple[RegradeRecord, ...]:
        """Return a student's requests with the answers, as they see them."""
        requests = read_regrades(self.folder.ledger.list_entries(), assignment, student)
        return tuple(
            RegradeRecord(
                number=request.number,
                at=request.at,
                text=request.text,
                answer=request.answer,
                accepted=request.accepted,
                answered_at=request.answered_at,
            )
            for request in requests
        )

    def read_total(self, student: str) -> TotalRecord | None:
        """Return a student's total of released grades; None without assignment groups."""
        total = read_released_total(self.folder, student)
        if total is None:
            return None
        dropped = tuple(one.text for one in total.dropped)
        groups = tuple(one.text for one in total.groups)
        return TotalRecord(total.final, total.points, dropped, total.missing, groups)

    def _require_member(self, student: str) -> None:
        # Not `find_student`, whose error names the course's directory.
        if all(one.id != student for one in self.folder.list_students()):
            raise PolicyError(f"{student} has left the course", hint="ask your instructor")


def check_text(text: str) -> str:
    """Return a student's words without control characters; UsageError if they are not usable."""
    words = clean_text(text.strip(), MOST_REGRADE_CHARS + 1)
    if not words:
        raise UsageError("the request has no text", hint='labctl submit --ask-regrade "why"')
    if len(text.strip()) > MOST_REGRADE_CHARS:
        raise UsageError(
            f"the request has {len(text.strip())} characters",
            why=f"a request can have at most {MOST_REGRADE_CHARS}",
            hint="shorten it, and name the item of the grade that it is about",
        )
    return words


def list_regrades(
    folder: CourseFolder, assignment: str = "", student: str = ""
) -> list[RegradeRequest]:
    """List the requests of an assignment and a student, or of all, the oldest first."""
    if assignment:
        find_rules(folder, assignment)
    if student:
        folder.find_student(student)
    return read_regrades(folder.ledger.list_entries(), assignment, student)


class AnsweredRegrade(Value, frozen=True):
    """A request with its answer, and the marks that were given with it."""

    request: RegradeRequest
    marks: tuple[GivenMark, ...] = ()


def answer_regrade(
    folder: CourseFolder,
    assignment: str,
    student: str,
    answer: str,
    *,
    accepted: bool = False,
    marks: Mapping[str, str] = {},
    by: str = "",
) -> AnsweredRegrade:
    """Answer a student's open request, and give their seat these points: both or nothing.

    `marks` are points by item of the rubric; the notes of the marks that they replace stay.
    NotFoundError if no request is open, or for an item that the rubric does not have; UsageError
    for points that an item does not have; PolicyError if another grader changes one of the marks
    at the same time.
    """
    if marks and not accepted:
        raise UsageError(
            "a declined request changes no marks",
            hint=f'labctl course regrades {assignment} {student} --answer "..."\n'
            f'labctl course regrades {assignment} {student} --answer "..." --accept '
            "--mark ITEM POINTS",
        )
    prepared = prepare_answer(folder, assignment, student, answer, accepted=accepted, by=by)
    given: tuple[GivenMark, ...] = ()
    if marks:
        given = _answer_and_mark(folder, assignment, student, prepared, marks, by)
    else:
        folder.ledger.append_all([prepared.draft], check=prepared.check)
    last = read_regrades(folder.ledger.list_entries(), assignment, student)[-1]
    return AnsweredRegrade(request=last, marks=given)


def _answer_and_mark(
    folder: CourseFolder,
    assignment: str,
    student: str,
    answer: PreparedAnswer,
    marks: Mapping[str, str],
    by: str,
) -> tuple[GivenMark, ...]:
    """Save an answer and marks for the student's seat; return the marks."""
    seat, students = choose_students(folder, assignment, student, by=by)
    most = {item: find_item(folder, assignment, item) for item in marks}
    for item, text in marks.items():
        again = f'labctl course regrades {assignment} {student} --answer "..." --accept'
        command = f"{again} --mark {item}"
        parse_points(text, assignment, seat.name, item, most[item], command=command)
    stored = read_marks(folder.ledger.list_entries(kind="mark"), assignment)
    before = {item: stored.get(student, {}).get(item) for item in marks}
    edits = [
        draft_edit(merge_marks(seat, stored, item), item, text) for item, text in marks.items()
    ]
    result = answer_with_marks(
        folder, assignment, seat.name, answer, edits, by=by, bundle_sha256=None
    )
    if result.conflicts:
        raise PolicyError(
            "nothing was saved",
            why=f"another grader has just marked {', '.join(result.conflicts)}",
            hint=f"labctl course grades {assignment} --rubric",
        )
    return tuple(
        GivenMark(
            assignment=assignment,
            item=item,
            students=students,
            points=float(text),
            most=most[item],
            before=before[item],
        )
        for item, text in marks.items()
    )


def prepare_answer(
    folder: CourseFolder,
    assignment: str,
    student: str,
    answer: str,
    *,
    accepted: bool,
    by: str,
    number: int = 0,
) -> PreparedAnswer:
    """Return the answer to a student's open request, to be appended to the ledger.

    NotFoundError if none is open, or another one than that with this `number`.
    """
    words = clean_text(answer.strip(), MOST_ANSWER_CHARS)
    if not words:
        raise UsageError(
            "the answer has no text",
            hint=f'labctl course regrades {assignment} {student} --answer "..."',
        )
    list_regrades(folder, assignment, student)
    request = _find_open(folder, assignment, student, number)

    def check() -> None:
        _find_open(folder, assignment, student, request.number)

    return PreparedAnswer(
        draft=draft_answer_line(request, words, accepted=accepted, by=by), check=check
    )


def answer_with_marks(
    folder: CourseFolder,
    assignment: str,
    seat: str,
    answer: PreparedAnswer,
    edits: Sequence[ItemEdit],
    *,
    by: str,
    bundle_sha256: str | None,
) -> SavedMarks:
    """Save an answer together with changed marks of the seat: both or nothing. As `save_marks`."""
    if not edits:
        folder.ledger.append_all([answer.draft], check=answer.check)
        return SavedMarks()
    return save_marks(
        folder, assignment, seat, edits, by=by, bundle_sha256=bundle_sha256, answer=answer
    )


def _find_open(folder: CourseFolder, assignment: str, student: str, number: int) -> RegradeRequest:
    """Return the open request, with this number unless it is 0; NotFoundError without one."""
    requests = read_regrades(folder.ledger.list_entries(), assignment, student)
    for request in requests:
        if request.is_open and number in (0, request.number):
            return request
    raise NotFoundError(
        f"{quote(student)} has no open request for {assignment}",
        why=_describe_answered(requests, number) or "the student has not asked for a regrade",
        hint=f"labctl course regrades {assignment} {student}"
        if requests
        else f"labctl course grades {assignment}",
    )


def _describe_answered(requests: Sequence[RegradeRequest], number: int) -> str:
    """Say who answered the request with this number, or the last one."""
    answered = [one for one in requests if not one.is_open and number in (0, one.number)]
    if not answered:
        return ""
    which = f"request {number}" if number else "the last one"
    return f"{answered[-1].answered_by or 'staff'} answered {which}"
