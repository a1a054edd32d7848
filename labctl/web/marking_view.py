"""What the page for marking shows of one seat, read from the course's folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from labctl.courses.assignment_seats import list_assignment_seats
from labctl.courses.commenting import MOST_FILE_BYTES, list_saved_comments
from labctl.courses.grade_store import GradeStore
from labctl.courses.grades import list_current_grades, read_tests
from labctl.courses.grading.results import GraderTest
from labctl.courses.marking import list_seat_grades
from labctl.courses.records.comments import (
    LineComment,
    SavedComment,
    read_comments,
)
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.gradebook import Grade
from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.courses.records.marks import read_marks, sum_marks
from labctl.courses.records.regrade_requests import RegradeRequest, read_regrades
from labctl.courses.records.released_grades import as_released, list_released_lines
from labctl.courses.records.student import Student
from labctl.courses.rubric_form import SeatMark, merge_marks
from labctl.courses.submission_files import ReadableSubmission, find_bundle_sha256, open_submission
from labctl.errors import LabError, NotFoundError
from labctl.model import Value
from labctl.web.submission_view import FileView, Kind, PartView, list_parts, open_part

Result = TypeVar("Result")


class ItemView(Value, frozen=True):
    """An item of the rubric, worth `worth` points, with the mark that its fields show.

    The mark `is_outdated` if it is for an older submission.
    """

    name: str
    worth: float
    mark: SeatMark
    is_outdated: bool = False


class RegradeView(Value, frozen=True):
    """An open regrade request, and the key of its student."""

    key: str
    request: RegradeRequest


class PlaceInList(Value, frozen=True):
    """Where a seat is among those with work. Keys are "" if there is no such seat."""

    position: int
    total: int
    unmarked: int
    previous: str = ""
    next: str = ""
    previous_unmarked: str = ""
    next_unmarked: str = ""


class MarkingView(Value, frozen=True):
    """One seat's submission of one assignment, its rubric and its grade.

    `grade` is that of its first student without an excuse. `marked_points` are the marks so far,
    `graded_points` what the automatic grading is worth. `regrades` have no answer yet. `problem`
    says why the submission cannot be read. `bundle_sha256` is that of the submission that counts,
    also if it cannot be read. `failure` says why the automatic grading failed. `seen` is the grade
    that students see, if it is another one.
    """

    assignment: str
    seat: Seat
    place: PlaceInList
    submission: ReadableSubmission | None
    parts: tuple[PartView, ...]
    shown: FileView | None
    items: tuple[ItemView, ...]
    grade: Grade
    marked_points: float
    graded_points: float
    tests: tuple[GraderTest, ...]
    comments: tuple[LineComment, ...]
    saved: tuple[SavedComment, ...]
    bundle_sha256: str
    regrades: tuple[RegradeView, ...] = ()
    problem: str = ""
    failure: str = ""
    seen: Grade | None = None

    def list_kind(self, kind: Kind) -> list[PartView]:
        return [part for part in self.parts if part.kind == kind]

    @property
    def earlier_comments(self) -> tuple[LineComment, ...]:
        """The comments on submissions that do not count any more."""
        receipt = self.submission.receipt if self.submission else None
        current = (receipt.student, receipt.number) if receipt else ("", 0)
        return tuple(one for one in self.comments if (one.student, one.number) != current)


class MarkingReader:
    """Reads the course for the page. It has its own CourseFolder, used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._folder: CourseFolder | None = None

    @contextmanager
    def open_folder(self) -> Iterator[CourseFolder]:
        """Give one thread the folder, as it is now."""
        with self._lock:
            if self._folder is None:
                self._folder = CourseFolder(self._path)
            self._folder.refresh()
            yield self._folder

    def find_seat(self, folder: CourseFolder, assignment: str, key: str) -> Seat:
        """Return the seat of an assignment with its key, or that of one of its students.

        NotFoundError for an unknown one.
        """
        if assignment in folder.config.assignments:
            for seat in list_assignment_seats(folder, assignment):
                if key in (seat.pseudonym, *map(folder.pseudonym, seat.students)):
                    return seat
        raise NotFoundError("this seat does not exist in this assignment")

    def change(
        self, assignment: str, key: str, change: Callable[[CourseFolder, Seat], Result]
    ) -> Result:
        """Call `change` with the folder and the seat; no other thread has the folder meanwhile."""
        with self.open_folder() as folder:
            return change(folder, self.find_seat(folder, assignment, key))

    def find_path(
        self, folder: CourseFolder, assignment: str, seat: Seat, number: int | None
    ) -> str:
        """Return the path of a file by its place in the bundle; NotFoundError without it."""
        submission = open_submission(folder, assignment, seat)
        if submission is None or number is None or number >= len(submission.members):
            raise NotFoundError("this file does not exist in the submission")
        return submission.members[number].path

    def read(
        self, assignment: str, key: str, file: int | None = None, *, hidden: bool = False
    ) -> MarkingView:
        """Return what the page shows, with this file of the bundle open; by default the first."""
        with self.open_folder() as folder:
            seat = self.find_seat(folder, assignment, key)
            entries = folder.ledger.list_entries()
            submission, problem = _try_to_open(folder, assignment, seat)
            owners = (seat.name, *seat.students)
            comments = tuple(
                one for one in read_comments(entries, assignment) if one.student in owners
            )
            parts = list_parts(submission, comments) if submission else ()
            rules, marks = folder.config.assignments[assignment], read_marks(entries, assignment)
            listed = list_seat_grades(folder, assignment)
            own = next((grades for one, grades in listed if one.name == seat.name), None)
            grade = own[0] if own else self._read_grade(folder, assignment, seat)
            store = GradeStore(folder, assignment)
            record = store.read_record(grade.owner) if grade.owner else None
            return MarkingView(
                assignment=assignment,
                seat=seat,
                place=find_place(listed, seat, hidden=hidden),
                submission=submission,
                parts=parts,
                shown=open_part(submission, parts, file, comments),
                items=tuple(
                    ItemView(
                        name=name,
                        worth=worth,
                        mark=merge_marks(seat, marks, name),
                        is_outdated=any(name in one.outdated_marks for one in own or ()),
                    )
                    for name, worth in rules.rubric.items()
                ),
                grade=grade,
                marked_points=sum_marks(grade.items),
                graded_points=rules.graded_points,
                tests=read_tests(store, grade),
                comments=comments,
                saved=tuple(list_saved_comments(folder)),
                bundle_sha256=find_bundle_sha256(folder, assignment, seat),
                regrades=_list_open_regrades(folder, assignment, seat),
                problem=problem,
                failure=record.message if record else "",
                seen=_find_seen_grade(grade, entries, assignment),
            )

    def _read_grade(self, folder: CourseFolder, assignment: str, seat: Seat) -> Grade:
        """Return the grade of the first student of a seat without work, or with excuses only."""
        return list_current_grades(folder, assignment, [Student(id=seat.students[0])])[0]

    def read_report(self, assignment: str, key: str) -> bytes:
        """Return the report of the submission that counts; NotFoundError without one."""
        with self.open_folder() as folder:
            seat = self.find_seat(folder, assignment, key)
            submission = open_submission(folder, assignment, seat)
        if submission is None:
            raise NotFoundError("this seat has no submission")
        return submission.read_file("report.html", MOST_FILE_BYTES)

    def find_place(self, assignment: str, key: str, *, hidden: bool) -> PlaceInList:
        """Return the place of a seat; without a key, one before the first."""
        with self.open_folder() as folder:
            seat = self.find_seat(folder, assignment, key) if key else None
            return find_place(list_seat_grades(folder, assignment), seat, hidden=hidden)


def _find_seen_grade(
    grade: Grade, entries: Iterable[CourseLedgerEntry], assignment: str
) -> Grade | None:
    """Return the released grade if the next release would change it."""
    line = list_released_lines(entries, assignment).get(grade.student)
    released = as_released(grade, line)
    return released if released.unreleased is not None else None


def _list_open_regrades(
    folder: CourseFolder, assignment: str, seat: Seat
) -> tuple[RegradeView, ...]:
    requests = read_regrades(folder.ledger.list_entries(), assignment)
    return tuple(
        RegradeView(key=folder.pseudonym(one.student), request=one)
        for one in requests
        if one.is_open and one.student in seat.students
    )


def _try_to_open(
    folder: CourseFolder, assignment: str, seat: Seat
) -> tuple[ReadableSubmission | None, str]:
    """Return the submission; None and the reason if it is damaged, as it can still be marked."""
    try:
        return open_submission(folder, assignment, seat), ""
    except LabError as error:
        return None, describe_error(error)


def find_place(
    listed: Sequence[tuple[Seat, Sequence[Grade]]], seat: Seat | None, *, hidden: bool
) -> PlaceInList:
    """Return the place of a seat in the roster's order, or in that of the keys if it is hidden.

    Next and previous go round, so that what was skipped comes again.
    """
    if hidden:
        listed = sorted(listed, key=lambda pair: pair[0].pseudonym)
    keys = [one.pseudonym for one, _ in listed]
    unmarked = {one.pseudonym for one, own in listed if any(grade.items_to_mark for grade in own)}
    own = seat.pseudonym if seat else ""
    at = keys.index(own) if own in keys else -1
    after, before = keys[at + 1 :] + keys[: max(at, 0)], keys[at + 1 :] + keys[: max(at, 0)]
    before.reverse()
    return PlaceInList(
        position=at + 1,
        total=len(keys),
        unmarked=len(unmarked),
        previous=next(iter(before), ""),
        next=next(iter(after), ""),
        previous_unmarked=next((key for key in before if key in unmarked), ""),
        next_unmarked=next((key for key in after if key in unmarked), ""),
    )


def describe_error(error: LabError) -> str:
    """Return what failed and why, as sentences."""
    return " ".join(filter(None, [f"{error.what[:1].upper()}{error.what[1:]}.", error.why]))
