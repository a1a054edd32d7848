"""Marks: the points that people give for the items of a rubric, as lines of the ledger. Pure.

Every mark that was ever given stays in the ledger; the last one for a student and an item counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import msgspec

from labctl.courses.grading.results import GraderTest
from labctl.courses.records.ledger_entries import CourseLedgerDraft, CourseLedgerEntry
from labctl.decoding import convert_value
from labctl.model import Value

KIND = "mark"


class MarkedSubmission(Value, frozen=True):
    """The submission that a mark is for: its number (0 if nothing was submitted) and arrival."""

    number: int = 0
    received: str = ""

    def is_older_than(self, other: MarkedSubmission) -> bool:
        """Tell whether it arrived first. Each student of a team counts their own numbers."""
        return (self.received, self.number) < (other.received, other.number)


class ItemMark(Value, frozen=True):
    """The points for one item, given by `by` at Unix time `at`, with a note for the student.

    `submission` is None if an earlier version wrote the mark.
    """

    points: float
    note: str = ""
    by: str = ""
    at: float = 0.0
    submission: MarkedSubmission | None = None

    def is_outdated(self, submission: MarkedSubmission) -> bool:
        """Tell whether the mark is for an older submission than this one."""
        if self.submission is not None:
            return self.submission.is_older_than(submission)
        if not submission.received:
            return False
        return self.at < datetime.fromisoformat(submission.received).timestamp()


class RubricItem(Value, frozen=True):
    """One item of the rubric, worth `points`, and a student's mark; None if it is not marked."""

    name: str
    points: float
    mark: ItemMark | None = None


# item -> mark
StudentMarks = Mapping[str, ItemMark]


def read_all_marks(
    entries: Iterable[CourseLedgerEntry],
) -> dict[str, dict[str, dict[str, ItemMark]]]:
    """Return assignment -> student -> item -> the mark that counts, read in one pass.

    A mark that was taken back is left out.
    """
    marks: dict[str, dict[str, dict[str, ItemMark]]] = {}
    for entry in entries:
        if entry.kind == KIND:
            add_mark(marks, entry)
    return marks


def add_mark(marks: dict[str, dict[str, dict[str, ItemMark]]], entry: CourseLedgerEntry) -> None:
    """Add a mark, or take one back. The student gets a new mapping; earlier ones do not change."""
    item, points = str(entry.detail.get("item", "")), entry.detail.get("points")
    by_student = marks.setdefault(str(entry.detail.get("assignment", "")), {})
    own = dict(by_student.get(entry.student, {}))
    if points is None:
        own.pop(item, None)
    else:
        own[item] = ItemMark(
            points=float(points),
            note=entry.why,
            by=entry.by,
            at=entry.at,
            submission=_read_submission(entry),
        )
    by_student[entry.student] = own


def _read_submission(entry: CourseLedgerEntry) -> MarkedSubmission | None:
    submission = entry.detail.get("submission")
    return convert_value(submission, MarkedSubmission) if submission is not None else None


def read_marks(
    entries: Iterable[CourseLedgerEntry], assignment: str
) -> dict[str, dict[str, ItemMark]]:
    """Return student -> item -> the mark that counts, of one assignment."""
    own = (entry for entry in entries if entry.detail.get("assignment") == assignment)
    return read_all_marks(own).get(assignment, {})


def list_items(rubric: Mapping[str, float], marks: StudentMarks) -> tuple[RubricItem, ...]:
    """Return the rubric with a student's marks.

    A mark above its item's points does not count: course.yaml was changed since it was given.
    """
    return tuple(
        RubricItem(
            name=name,
            points=points,
            mark=mark if (mark := marks.get(name)) and mark.points <= points else None,
        )
        for name, points in rubric.items()
    )


def list_unmarked(items: Iterable[RubricItem]) -> list[str]:
    """Return the names of the items without a mark."""
    return [item.name for item in items if item.mark is None]


def sum_marks(items: Iterable[RubricItem]) -> float:
    """Return the points that were given so far."""
    return round(sum(item.mark.points for item in items if item.mark), 3)


def draft_mark_line(
    assignment: str,
    seat: str,
    student: str,
    item: str,
    points: float | None,
    *,
    submission: MarkedSubmission | None = None,
    by: str = "",
    note: str = "",
) -> CourseLedgerDraft:
    """Return the ledger's line for a mark of this submission; without points it takes it back."""
    detail = {"assignment": assignment, "item": item, "points": points}
    if submission is not None:
        detail["submission"] = msgspec.to_builtins(submission)
    return CourseLedgerDraft(kind=KIND, seat=seat, student=student, by=by, why=note, detail=detail)


def list_notes(
    entries: Iterable[CourseLedgerEntry], assignment: str, item: str, most: int
) -> list[str]:
    """Return the notes given for an item so far, the most frequent first."""
    notes = Counter(
        entry.why
        for entry in entries
        if entry.kind == KIND
        and entry.why
        and (entry.detail.get("assignment"), entry.detail.get("item")) == (assignment, item)
    )
    return [note for note, _ in notes.most_common(most)]


def as_test(item: RubricItem) -> GraderTest:
    """Return a marked item as a line of the results, where the student reads it."""
    mark = item.mark
    note = " - ".join(filter(None, [mark.note, mark.by and f"marked by {mark.by}"])) if mark else ""
    return GraderTest(
        name=item.name,
        score=mark.points if mark else None,
        max_score=item.points,
        output=note,
        visibility="after_published",
    )


def describe_items(items: Sequence[RubricItem]) -> str:
    """Return a line for each item: "code: 17 of 20 (ann): clear names"."""
    lines = []
    for item in items:
        if item.mark is None:
            lines.append(f"{item.name}: not marked yet, of {item.points:g}")
            continue
        by = f" ({item.mark.by})" if item.mark.by else ""
        note = f": {item.mark.note}" if item.mark.note else ""
        lines.append(f"{item.name}: {item.mark.points:g} of {item.points:g}{by}{note}")
    return "\n".join(lines)
