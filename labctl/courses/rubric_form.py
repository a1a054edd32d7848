"""The marks of a seat for several items of the rubric at once, as a form sends them.

Several graders may have the form open. It names the marks that its grader saw, so that nobody
replaces a mark without having seen it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from labctl.courses.marking import choose_students, clean_note, parse_points, require_rubric
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.gradebook import points_text
from labctl.courses.records.ledger_entries import CourseLedgerDraft
from labctl.courses.records.marks import (
    ItemMark,
    MarkedSubmission,
    StudentMarks,
    draft_mark_line,
    read_marks,
)
from labctl.courses.submission_files import find_submission, require_submission
from labctl.errors import NotFoundError, UsageError
from labctl.model import Value


class SeatMark(Value, frozen=True):
    """The points and note that all students of a seat have for an item, as a form shows them.

    Both are "" without a mark. If the students' marks differ, `differing` has them.
    """

    points: str = ""
    note: str = ""
    by: str = ""
    at: float = 0.0
    differing: Mapping[str, str] = {}

    @property
    def version(self) -> str:
        """What a form repeats, so that a change by somebody else is noticed."""
        text = repr((self.points, self.note, sorted(self.differing.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class ItemEdit(Value, frozen=True):
    """What a grader typed for an item; `points` "" takes the mark back.

    `shown` is the mark that the form showed, and `version` its version. `is_confirmed` gives the
    same mark again: it was given for an older submission, and is still right.
    """

    item: str
    points: str
    note: str
    shown: tuple[str, str]
    version: str
    is_confirmed: bool = False

    @property
    def is_change(self) -> bool:
        return self.is_confirmed or (self.points, self.note) != self.shown


class PreparedAnswer(Value, frozen=True):
    """The ledger's line for an answer to a regrade request; `check` fails once it has another."""

    draft: CourseLedgerDraft
    check: Callable[[], None]


class SavedMarks(Value, frozen=True):
    """The items that were saved, or why nothing was.

    `conflicts` are items that somebody else changed meanwhile; `problems` says what is wrong with
    what was typed for an item.
    """

    saved: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    problems: Mapping[str, str] = {}


def merge_marks(seat: Seat, marks: Mapping[str, StudentMarks], item: str) -> SeatMark:
    """Return the mark that the students of a seat have for an item."""
    own = {student: marks.get(student, {}).get(item) for student in seat.students}
    texts = {student: _mark_text(mark) for student, mark in own.items()}
    if len(set(texts.values())) > 1:
        return SeatMark(differing={student: points for student, (points, _) in texts.items()})
    mark = next(iter(own.values()), None)
    if mark is None:
        return SeatMark()
    return SeatMark(points=points_text(mark.points), note=mark.note, by=mark.by, at=mark.at)


def draft_edit(shown: SeatMark, item: str, points: str) -> ItemEdit:
    """Return the edit that gives an item these points, and leaves the note of its mark."""
    return ItemEdit(
        item=item,
        points=points,
        note=shown.note,
        shown=(shown.points, shown.note),
        version=shown.version,
    )


def save_marks(
    folder: CourseFolder,
    assignment: str,
    name: str,
    edits: Sequence[ItemEdit],
    *,
    by: str,
    bundle_sha256: str | None = None,
    answer: PreparedAnswer | None = None,
) -> SavedMarks:
    """Save what a grader changed in a form, for all students of a seat: all of it or nothing.

    `answer` is that to a regrade request, which is saved with the marks. PolicyError if the
    submission that counts is not the one with this `bundle_sha256`, as `require_submission`
    compares it; NotFoundError for an item that the rubric does not have, or if the request has
    another answer.
    """
    rubric = require_rubric(folder, assignment)
    seat, _ = choose_students(folder, assignment, name, by=by)
    changed = [edit for edit in edits if edit.is_change]
    if problems := dict(_find_problems(rubric, assignment, name, changed)):
        return SavedMarks(problems=problems)
    # Before `check`, which fails if another submission arrives meanwhile.
    submission = find_submission(folder, assignment, seat)
    drafts = [
        draft for edit in changed for draft in _draft_lines(assignment, seat, edit, submission, by)
    ]
    drafts += [answer.draft] if answer else []
    conflicts: list[str] = []

    def check() -> None:
        require_submission(folder, assignment, seat, bundle_sha256)
        if answer:
            answer.check()
        marks = read_marks(folder.ledger.list_entries(kind="mark"), assignment)
        conflicts[:] = [
            edit.item
            for edit in changed
            if merge_marks(seat, marks, edit.item).version != edit.version
        ]
        if conflicts:
            raise _StaleFormError

    try:
        folder.ledger.append_all(drafts, check=check)
    except _StaleFormError:
        return SavedMarks(conflicts=tuple(conflicts))
    return SavedMarks(saved=tuple(edit.item for edit in changed))


class _StaleFormError(Exception):
    pass


def _draft_lines(
    assignment: str, seat: Seat, edit: ItemEdit, submission: MarkedSubmission, by: str
) -> list[CourseLedgerDraft]:
    """Return the ledger's lines for a mark, or for taking it back, one for each student."""
    points = float(edit.points) if edit.points else None
    note = clean_note(edit.note) if edit.points else ""
    return [
        draft_mark_line(
            assignment,
            seat.name,
            student,
            edit.item,
            points,
            submission=submission,
            by=by,
            note=note,
        )
        for student in seat.students
    ]


def _mark_text(mark: ItemMark | None) -> tuple[str, str]:
    return (points_text(mark.points), mark.note) if mark else ("", "")


def _find_problems(
    rubric: Mapping[str, float], assignment: str, name: str, edits: Sequence[ItemEdit]
) -> Iterator[tuple[str, str]]:
    """Yield the items whose points cannot be given, each with the reason."""
    for edit in edits:
        if edit.item not in rubric:
            raise NotFoundError(f"the rubric of {assignment} has no item {edit.item[:100]!a}")
        if not edit.points:
            if edit.note and edit.note != edit.shown[1]:
                yield edit.item, "a note needs points"
            continue
        try:
            parse_points(edit.points, assignment, name, edit.item, rubric[edit.item])
        except UsageError as error:
            yield edit.item, error.what
