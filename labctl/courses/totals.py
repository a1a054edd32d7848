"""Totals over the assignments of a course: for staff, and of released grades for students."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

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
from labctl.courses.records.marks import StudentMarks, read_all_marks
from labctl.courses.records.membership import read_frozen_members
from labctl.courses.records.released_grades import (
    is_complete,
    list_released_lines,
    read_released_grade,
)
from labctl.model import Value
from labctl.submissions.receiver import Receiver

# (assignment, students and teams) -> whether one of them has submitted
HasSubmitted = Callable[[str, Sequence[str]], bool]


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

    `entries` are lines of the course's ledger; those of other kinds are ignored. `marks` are those
    of all rubrics, by assignment and student, if they were read from the ledger already.
    """

    def __init__(
        self,
        folder: CourseFolder,
        entries: Iterable[CourseLedgerEntry],
        marks: Mapping[str, Mapping[str, StudentMarks]] | None = None,
    ) -> None:
        entries = list(entries)
        self._folder, self._config = folder, folder.config
        self._grades = folder.grades
        self._excuses = read_excuses(entries)
        released = [entry for entry in entries if entry.kind == "released"]
        self._lines = {
            name: list_released_lines(released, name) for name in self._config.assignments
        }
        self._judges = {
            name: DeadlineJudge(folder, name)
            for name in self._config.assignments
            if self._config.is_missing_zero(name)
        }
        self._marks = read_all_marks(entries) if marks is None and self._judges else marks or {}
        self._closed_seats = {
            name: _find_closed_seats(folder, entries, name) for name in self._judges
        }

    def find_missing(
        self, student: str, seat: Seat, has_submitted: HasSubmitted
    ) -> tuple[str, ...]:
        """Return the assignments in which a student gets 0 because the seat submitted nothing.

        `seat` is the student's present one; in a closed assignment, the one of then counts. One
        that staff has graded all the same, such as a presentation, waits for its release.
        """
        seats = {name: self._find_seat(name, student) or seat for name in self._judges}
        return tuple(
            name
            for name, judge in self._judges.items()
            if (name, student) not in self._excuses
            and judge.has_closed(seats[name])
            and not has_submitted(name, (seats[name].name, *seats[name].students))
            and not self._is_graded(name, student, seats[name])
        )

    def _find_seat(self, name: str, student: str) -> Seat | None:
        """Return a student's seat at the close, their own for one who joined later; None before."""
        seats = self._closed_seats[name]
        if seats is None:
            return None
        return seats.get(student) or self._folder.build_seats({student: (student,)})[0]

    def _is_graded(self, name: str, student: str, seat: Seat) -> bool:
        owners = (student, seat.name)
        return bool(self._marks.get(name, {}).get(student)) or any(
            (self._grades / name / owner / RESULTS).is_file() for owner in owners
        )

    def read(self, student: str, missing: Collection[str]) -> CourseTotal:
        """Return what a student sees of their total; `missing` is what `find_missing` returns."""
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


def _find_closed_seats(
    folder: CourseFolder, entries: Iterable[CourseLedgerEntry], name: str
) -> dict[str, Seat] | None:
    """Return the seats of students when an assignment closed; None while it is open."""
    members = read_frozen_members(entries, name, folder.config.assignments[name])
    if members is None:
        return None
    return {one: seat for seat in folder.build_seats(members) for one in seat.students}


def read_released_total(folder: CourseFolder, student: str) -> CourseTotal | None:
    """Return what a student sees of their total; None if the course has no assignment groups."""
    if not folder.config.assignment_groups:
        return None
    receiver = Receiver(folder.drop)

    def has_submitted(name: str, owners: Sequence[str]) -> bool:
        return any(receiver.receipts(name, owner) for owner in owners)

    totals = ReleasedTotals(folder, folder.ledger.list_entries())
    missing = totals.find_missing(student, folder.find_seat_of(student), has_submitted)
    return totals.read(student, missing)
