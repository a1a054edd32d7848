"""Comments on lines of submissions, and saved comments, as lines of the ledger. Pure.

A comment keeps the number of its line in the ledger, by which it can be removed. The ledger keeps
removed comments too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from labctl.courses.records.ledger_entries import CourseLedgerDraft, CourseLedgerEntry
from labctl.model import Value

KIND, SAVED_KIND = "comment", "saved_comment"
CODE = "code/"
NOTEBOOK = ".ipynb"


class LineComment(Value, frozen=True):
    """A comment by `by` on a line of a `file` in submission `number` of `student`.

    `file` is its path in the bundle. Lines count from 1; in a notebook, cells do.
    """

    id: int
    assignment: str
    seat: str
    student: str
    number: int
    file: str
    line: int
    text: str
    by: str = ""
    at: float = 0.0

    @property
    def place(self) -> str:
        return format_place(self.file, self.line)


class SavedComment(Value, frozen=True):
    """A comment that the course's staff reuses."""

    id: int
    text: str
    by: str = ""


def format_place(file: str, line: int) -> str:
    """Return the name of a line: "train.py:12", or "intro.ipynb, cell 3"."""
    separator = ", cell " if file.lower().endswith(NOTEBOOK) else ":"
    return f"{file.removeprefix(CODE)}{separator}{line}"


def read_comments(entries: Iterable[CourseLedgerEntry], assignment: str) -> list[LineComment]:
    """Return the comments in force, by seat, submission, file and line."""
    comments: dict[int, LineComment] = {}
    for entry in entries:
        detail = entry.detail
        if entry.kind != KIND or detail.get("assignment") != assignment:
            continue
        if (removed := detail.get("removes")) is not None:
            comments.pop(int(removed), None)
            continue
        comments[entry.n] = LineComment(
            id=entry.n,
            assignment=assignment,
            seat=entry.seat,
            student=entry.student,
            number=int(detail.get("number", 0)),
            file=str(detail.get("file", "")),
            line=int(detail.get("line", 0)),
            text=entry.why,
            by=entry.by,
            at=entry.at,
        )
    return sorted(comments.values(), key=lambda one: (one.seat, one.number, one.file, one.line))


def read_saved_comments(entries: Iterable[CourseLedgerEntry]) -> list[SavedComment]:
    """Return the saved comments, the oldest first."""
    comments: dict[int, SavedComment] = {}
    for entry in entries:
        if entry.kind != SAVED_KIND:
            continue
        if (removed := entry.detail.get("removes")) is not None:
            comments.pop(int(removed), None)
        else:
            comments[entry.n] = SavedComment(id=entry.n, text=entry.why, by=entry.by)
    return list(comments.values())


def draft_comment_line(comment: LineComment) -> CourseLedgerDraft:
    """Return the ledger's line for a new comment, whose `id` and `at` it does not have yet."""
    detail = {
        "assignment": comment.assignment,
        "number": comment.number,
        "file": comment.file,
        "line": comment.line,
    }
    return CourseLedgerDraft(
        kind=KIND,
        seat=comment.seat,
        student=comment.student,
        by=comment.by,
        why=comment.text,
        detail=detail,
    )


def draft_removed_line(comment: LineComment, by: str) -> CourseLedgerDraft:
    """Return the ledger's line that removes a comment."""
    detail = {"assignment": comment.assignment, "removes": comment.id}
    return CourseLedgerDraft(
        kind=KIND, seat=comment.seat, student=comment.student, by=by, detail=detail
    )


def draft_saved_line(text: str, by: str) -> CourseLedgerDraft:
    """Return the ledger's line that saves a comment for reuse."""
    return CourseLedgerDraft(kind=SAVED_KIND, by=by, why=text)


def draft_forgotten_line(comment: SavedComment, by: str) -> CourseLedgerDraft:
    """Return the ledger's line that removes a saved comment."""
    return CourseLedgerDraft(kind=SAVED_KIND, by=by, detail={"removes": comment.id})


def describe_comments(comments: Sequence[LineComment], number: int) -> str:
    """Return a line for each comment, for the student: "train.py:12 (ann): Close the file".

    Those on another submission than `number` name it.
    """
    lines = []
    for comment in comments:
        earlier = "" if comment.number == number else f" of submission {comment.number}"
        by = f" ({comment.by})" if comment.by else ""
        lines.append(f"{comment.place}{earlier}{by}: {comment.text}")
    return "\n".join(lines)
