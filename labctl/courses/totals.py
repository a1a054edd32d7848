"""Totals over the assignments of a course: for staff, and of released grades for students."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from labctl.courses.grades import list_grades
from labctl.courses.grading.record import RESULTS
from labctl.courses.lateness import DeadlineJudge
from labctl.courses.records.course_total import (
    CountedGrade,
    CourseTotal,
    DroppedGrade,
    compute_total,
)
from labctl.courses.records.excuses import read_excuses
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.gradebook import Grade
from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.courses.records.marks import read_marks
from labctl.courses.records.released_grades import (
    is_complete,
    list_released_lines,
    read_released_grade,
)
from labctl.model import Value
from labctl.submissions.receiver import Receiver


class StudentTotal(Value, frozen=True):
    """A student's grades, in the order of course.yaml, and their total."""

    student: str
    grades: tuple[Grade, ...]
    total: CourseTotal

    @property
    def team(self) -> str:
        return next((grade.team for grade in self.grades if grade.team), "")


def list_totals(folder: CourseFolder) -> list[StudentTotal]:
    """Return the total of each student in the course, of the grades that `list_grades` returns."""
    return _list_totals(folder, list(folder.config.assignments))


def find_dropped(folder: CourseFolder, assignment: str) -> dict[str, DroppedGrade]:
    """Return the grades of an assignment that do not count in a total, by student."""
    names = _list_group(folder, assignment)
    found = {one.student: one.total.find_dropped(assignment) for one in _list_totals(folder, names)}
    return {student: dropped for student, dropped in found.items() if dropped is not None}


def list_drop_reasons(folder: CourseFolder, assignment: str) -> dict[str, str] | None:
    """Return why grades of an assignment do not count, by student; None if it is in no group."""
    if not _list_group(folder, assignment):
        return None
    return {student: one.reason for student, one in find_dropped(folder, assignment).items()}


def _list_group(folder: CourseFolder, assignment: str) -> tuple[str, ...]:
    """Return the assignments of the group that this one is in; () if it is in none."""
    groups = folder.config.assignment_groups.values()
    return next((group.assignments for group in groups if assignment in group.assignments), ())


def _list_totals(folder: CourseFolder, names: Sequence[str]) -> list[StudentTotal]:
    grades: dict[str, list[Grade]] = {}
    for name in names:
        for grade in list_grades(folder, name):
            grades.setdefault(grade.student, []).append(grade)
    return [
        StudentTotal(student=student, grades=tuple(own), total=_add_up(folder, names, own))
        for student, own in grades.items()
    ]


def _add_up(folder: CourseFolder, names: Sequence[str], grades: Sequence[Grade]) -> CourseTotal:
    counted = [
        CountedGrade(assignment=name, final=grade.final, points=grade.points)
        for name, grade in zip(names, grades, strict=True)
        if grade.final is not None
    ]
    return compute_total(counted, folder.config.assignment_groups)


class ReleasedTotals:
    """What students see of their totals: released grades, and missing submissions that count as 0.

    `entries` are lines of the course's ledger; those of other kinds are ignored.
    """

    def __init__(self, folder: CourseFolder, entries: Iterable[CourseLedgerEntry]) -> None:
        entries = list(entries)
        self._config = folder.config
        self._grades = folder.grades
        self._excuses = read_excuses(entries)
        self._lines = {
            name: list_released_lines(entries, name) for name in self._config.assignments
        }
        self._judges = {
            name: DeadlineJudge(folder, name)
            for name in self._config.assignments
            if self._config.is_missing_zero(name)
        }
        self._marks = {name: read_marks(entries, name) for name in self._judges}

    def find_missing(self, student: str, seat: Seat, submitted: Collection[str]) -> tuple[str, ...]:
        """Return the assignments in which a student gets 0 because the seat submitted nothing.

        One that staff has graded all the same, such as a presentation, waits for its release.
        """
        return tuple(
            name
            for name, judge in self._judges.items()
            if name not in submitted
            and (name, student) not in self._excuses
            and judge.has_closed(seat)
            and not self._is_graded(name, student, seat)
        )

    def _is_graded(self, name: str, student: str, seat: Seat) -> bool:
        owners = (student, seat.name)
        return bool(self._marks[name].get(student)) or any(
            (self._grades / name / owner / RESULTS).is_file() for owner in owners
        )

    def read(self, student: str, seat: Seat, submitted: Collection[str]) -> CourseTotal:
        """Return a student's total; `submitted` are the assignments that the seat submitted."""
        missing = self.find_missing(student, seat, submitted)
        counted, zeros = list[CountedGrade](), list[str]()
        for name, rules in self._config.assignments.items():
            line = self._lines[name].get(student)
            if (name, student) in self._excuses:
                continue
            if line is not None and is_complete(line):
                grade = read_released_grade(line)
                final, points = grade.final, grade.points
            elif name in missing:
                zeros.append(name)
                final, points = 0.0, rules.points
            else:
                continue
            if final is not None:
                counted.append(CountedGrade(assignment=name, final=final, points=points))
        return compute_total(counted, self._config.assignment_groups, zeros)


def read_released_total(folder: CourseFolder, student: str) -> CourseTotal | None:
    """Return what a student sees of their total; None if the course has no assignment groups."""
    if not folder.config.assignment_groups:
        return None
    seat, receiver = folder.find_seat_of(student), Receiver(folder.drop)
    owners = dict.fromkeys((seat.name, *seat.students))
    submitted = [
        name
        for name in folder.config.assignments
        if any(receiver.receipts(name, owner) for owner in owners)
    ]
    totals = ReleasedTotals(folder, folder.ledger.list_entries())
    return totals.read(student, seat, submitted)
