"""The grades of an assignment, and the file in which a course system takes them back."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from labctl.config.document import shown
from labctl.config.reader import nearest
from labctl.courses.assignment_seats import assignment_seats
from labctl.courses.creation import newest_imported
from labctl.courses.grade_store import Shelf
from labctl.courses.records import roster_formats
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.gradebook import Grade, Stamp, read_grades
from labctl.courses.records.released_grades import (
    as_released,
    is_complete,
    released_line,
    released_lines,
)
from labctl.courses.records.roster_import import compare, load_keys, read_table_file
from labctl.courses.records.student import Student
from labctl.courses.records.writeback import Written, write_back
from labctl.errors import NotFoundError
from labctl.submissions.receiver import Receiver


def grades(folder: CourseFolder, assignment: str, *, everybody: bool = False) -> list[Grade]:
    """A grade for everybody who is in the course (with `everybody`, who has left too).

    A released grade is the one that was released: what differs by now is its `unreleased`.
    NotFoundError where course.yaml has no such assignment.
    """
    lines = released_lines(folder.ledger.entries(kind="released"), assignment)
    found = current_grades(folder, assignment, folder.students(active_only=not everybody))
    return [as_released(one, lines.get(one.student)) for one in found]


def current_grades(
    folder: CourseFolder, assignment: str, students: Sequence[Student]
) -> list[Grade]:
    """The grades of these students as grading, and whoever corrected them, left them."""
    rules = folder.config.assignments.get(assignment)
    if rules is None:
        known = list(folder.config.assignments)
        near = nearest(assignment, known)
        raise NotFoundError(
            f"there is no assignment {shown(assignment)}",
            why=f"course.yaml has {', '.join(known) or 'none yet'}",
            hint=f"labctl course grades {near}" if near else f"edit {folder.config.path}",
        )
    released = released_lines(folder.ledger.entries(kind="released"), assignment)
    every = assignment_seats(folder, assignment)
    seats = {student: seat.name for seat in every for student in seat.students}
    found = read_grades(
        folder.grades,
        assignment,
        rules.points,
        students,
        _stamps(folder, assignment, every),
        frozenset(released),
        seats,
    )
    shelf = Shelf(folder, assignment)
    return [
        msgspec.structs.replace(one, corrected=bool(one.owner) and shelf.is_corrected(one.owner))
        for one in found
    ]


def keep_released(folder: CourseFolder, assignment: str, by: str = "") -> None:
    """Have the ledger know the score of every released grade: earlier versions wrote none."""
    lines = released_lines(folder.ledger.entries(kind="released"), assignment)
    unknown = [Student(id=one) for one, line in lines.items() if one and not is_complete(line)]
    found = current_grades(folder, assignment, unknown) if unknown else []
    folder.ledger.append_all(
        [released_line(assignment, one, by) for one in found if one.score is not None]
    )


def _stamps(folder: CourseFolder, assignment: str, seats: Sequence[Seat]) -> dict[str, Stamp]:
    """What the receiver stamped on the last submission of each, by student and by seat."""
    receiver = Receiver(folder.drop)
    found = {}
    for student in receiver.students(assignment):
        signed = receiver.receipts(assignment, student)
        if signed:
            last = signed[-1].receipt
            found[student] = Stamp(
                number=last.number,
                received=last.received,
                late_s=last.late_s,
                penalty=last.penalty,
            )
    for seat in seats:
        own = [found[one] for one in (seat.name, *seat.students) if one in found]
        if own:
            found[seat.name] = max(own, key=lambda stamp: stamp.received)
    return found


def written(
    folder: CourseFolder, assignment: str, *, to: str = "", penalty: bool = True
) -> Written:
    """The grades in the form of the newest import, or as `to`; nothing is changed here."""
    found = grades(folder, assignment, everybody=True)
    path = newest_imported(folder)
    _, table = read_table_file(path)
    keys = load_keys(folder.private)
    name = roster_formats.sniff(table)
    # Where the keys were lost they are found again, by the addresses for mail and the names.
    known = folder.students(active_only=False)
    diff = compare(table, str(path), known, keys, keep=True)
    return write_back(table, name, assignment, found, diff.keys.keys[name], to=to, penalty=penalty)
