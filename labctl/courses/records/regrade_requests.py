"""Students' requests to grade again, and staff's answers, as lines of the ledger. Pure.

The words of a student are untrusted text: they are cleaned before they are stored, and escaped
where they are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from labctl.courses.records.ledger_entries import CourseLedgerDraft, CourseLedgerEntry
from labctl.model import Value

ASKED, ANSWERED = "regrade", "answered"
# For one student and one assignment.
MOST_REQUESTS = 3


class RegradeRequest(Value, frozen=True):
    """A request, and its answer once there is one. `number` counts the student's from 1."""

    assignment: str
    student: str
    number: int
    text: str
    at: float
    answer: str = ""
    accepted: bool = False
    answered_by: str = ""
    answered_at: float = 0.0

    @property
    def is_open(self) -> bool:
        return not self.answered_at


def read_regrades(
    entries: Iterable[CourseLedgerEntry], assignment: str = "", student: str = ""
) -> list[RegradeRequest]:
    """Return the requests in their order, of one assignment or student, or all."""
    requests: dict[tuple[str, str, int], RegradeRequest] = {}
    for entry in entries:
        if entry.kind not in (ASKED, ANSWERED) or student not in ("", entry.student):
            continue
        name, number = str(entry.detail.get("assignment", "")), int(entry.detail.get("number", 0))
        if assignment not in ("", name):
            continue
        key = (name, entry.student, number)
        if entry.kind == ASKED:
            requests[key] = RegradeRequest(
                assignment=name,
                student=entry.student,
                number=number,
                text=entry.why,
                at=entry.at,
            )
        elif (request := requests.get(key)) is not None:
            requests[key] = RegradeRequest(
                assignment=name,
                student=entry.student,
                number=number,
                text=request.text,
                at=request.at,
                answer=entry.why,
                accepted=bool(entry.detail.get("accepted")),
                answered_by=entry.by,
                answered_at=entry.at,
            )
    return list(requests.values())


def refuse_request(earlier: Sequence[RegradeRequest]) -> str:
    """Return why a student with these requests cannot make another one; "" if they can."""
    if any(request.is_open for request in earlier):
        return "your last request has no answer yet"
    if len(earlier) >= MOST_REQUESTS:
        return f"at most {MOST_REQUESTS} requests for an assignment are answered"
    return ""


def draft_request_line(assignment: str, student: str, number: int, text: str) -> CourseLedgerDraft:
    """Return the ledger's line for a request."""
    detail = {"assignment": assignment, "number": number}
    return CourseLedgerDraft(kind=ASKED, student=student, by=student, why=text, detail=detail)


def draft_answer_line(
    request: RegradeRequest, answer: str, *, accepted: bool, by: str = ""
) -> CourseLedgerDraft:
    """Return the ledger's line for an answer."""
    detail = {
        "assignment": request.assignment,
        "number": request.number,
        "accepted": accepted,
    }
    return CourseLedgerDraft(
        kind=ANSWERED, student=request.student, by=by, why=answer, detail=detail
    )
