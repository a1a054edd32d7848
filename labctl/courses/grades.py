"""The grades of an assignment, and the file to upload to the course system."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from labctl.config.document import quote
from labctl.config.reader import find_nearest
from labctl.courses.assignment_seats import list_assignment_seats
from labctl.courses.creation import find_newest_import
from labctl.courses.grade_store import GradeStore
from labctl.courses.records import roster_formats
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.gradebook import Grade, Stamp, read_grades
from labctl.courses.records.released_grades import (
    as_released,
    draft_released_line,
    is_complete,
    list_released_lines,
)
from labctl.courses.records.roster_import import compare, load_keys, read_table_file
from labctl.courses.records.student import Student
from labctl.courses.records.writeback import GradeExport, write_back
from labctl.errors import NotFoundError
from labctl.submissions.receiver import Receiver


def list_grades(folder: CourseFolder, assignment: str, *, everybody: bool = False) -> list[Grade]:
    """Return a grade for each student in the course; with `everybody`, for those who left too.

    A released grade shows what was released; a change since then is its `unreleased`.
    NotFoundError if course.yaml has no such assignment.
    """
    lines = list_released_lines(folder.ledger.list_entries(kind="released"), assignment)
    current = list_current_grades(
        folder, assignment, folder.list_students(active_only=not everybody)
    )
    return [as_released(grade, lines.get(grade.student)) for grade in current]


def list_current_grades(
    folder: CourseFolder, assignment: str, students: Sequence[Student]
) -> list[Grade]:
    """Return the present grades of these students, corrections included, released or not."""
    rules = folder.config.assignments.get(assignment)
    if rules is None:
        names = list(folder.config.assignments)
        near = find_nearest(assignment, names)
        raise NotFoundError(
            f"there is no assignment {quote(assignment)}",
            why=f"course.yaml has {', '.join(names) or 'none yet'}",
            hint=f"labctl course grades {near}" if near else f"edit {folder.config.path}",
        )
    released = list_released_lines(folder.ledger.list_entries(kind="released"), assignment)
    all_seats = list_assignment_seats(folder, assignment)
    seats = {student: seat.name for seat in all_seats for student in seat.students}
    stored = read_grades(
        folder.grades,
        assignment,
        rules.points,
        students,
        _stamps(folder, assignment, all_seats),
        frozenset(released),
        seats,
    )
    grade_store = GradeStore(folder, assignment)
    return [
        msgspec.structs.replace(
            grade, corrected=bool(grade.owner) and grade_store.is_corrected(grade.owner)
        )
        for grade in stored
    ]


def record_released_scores(folder: CourseFolder, assignment: str, by: str = "") -> None:
    """Add the score of released grades to the ledger where an earlier version wrote none."""
    lines = list_released_lines(folder.ledger.list_entries(kind="released"), assignment)
    incomplete = [
        Student(id=student) for student, line in lines.items() if student and not is_complete(line)
    ]
    current = list_current_grades(folder, assignment, incomplete) if incomplete else []
    folder.ledger.append_all(
        [draft_released_line(assignment, grade, by) for grade in current if grade.score is not None]
    )


def _stamps(folder: CourseFolder, assignment: str, seats: Sequence[Seat]) -> dict[str, Stamp]:
    """Return the receiver's stamp on each one's last submission, by student and by seat."""
    receiver = Receiver(folder.drop)
    stamps = {}
    for student in receiver.students(assignment):
        signed = receiver.receipts(assignment, student)
        if signed:
            last = signed[-1].receipt
            stamps[student] = Stamp(
                number=last.number,
                received=last.received,
                late_s=last.late_s,
                penalty=last.penalty,
            )
    for seat in seats:
        own = [stamps[owner] for owner in (seat.name, *seat.students) if owner in stamps]
        if own:
            stamps[seat.name] = max(own, key=lambda stamp: stamp.received)
    return stamps


def export_grades(
    folder: CourseFolder, assignment: str, *, to: str = "", penalty: bool = True
) -> GradeExport:
    """Return the grades in the format of the newest import, or in format `to`; write nothing."""
    all_grades = list_grades(folder, assignment, everybody=True)
    path = find_newest_import(folder)
    _, table = read_table_file(path)
    keys = load_keys(folder.private)
    name = roster_formats.detect_format(table)
    # If the keys were lost, students are matched again by mail address and name.
    students = folder.list_students(active_only=False)
    diff = compare(table, str(path), students, keys, keep=True)
    return write_back(
        table, name, assignment, all_grades, diff.keys.keys[name], to=to, penalty=penalty
    )
