"""The grades of an assignment, and the file in which a course system takes them back."""

from __future__ import annotations

from labctl.actions.courses.begin import newest_imported
from labctl.config.document import shown
from labctl.config.reader import nearest
from labctl.courses import formats
from labctl.courses.folder import CourseFolder
from labctl.courses.gradebook import Grade, Stamp, read_grades
from labctl.courses.importing import compare, load_keys, read_table_file
from labctl.courses.writeback import Written, write_back
from labctl.errors import NotFoundError
from labctl.submissions.receiver import Receiver


def grades(folder: CourseFolder, assignment: str, *, everybody: bool = False) -> list[Grade]:
    """A grade for everybody who is in the course (with `everybody`, who has left too).

    NotFoundError where course.yaml has no such assignment.
    """
    rules = folder.config.assignments.get(assignment)
    if rules is None:
        known = list(folder.config.assignments)
        near = nearest(assignment, known)
        raise NotFoundError(
            f"there is no assignment {shown(assignment)}",
            why=f"course.yaml has {', '.join(known) or 'none yet'}",
            hint=f"labctl course grades {near}" if near else f"edit {folder.config.path}",
        )
    released = {
        one.student
        for one in folder.ledger.entries(kind="released")
        if one.detail.get("assignment") == assignment
    }
    students = folder.students(active_only=not everybody)
    stamps = _stamps(folder, assignment)
    found = read_grades(
        folder.grades, assignment, rules.points, students, stamps, frozenset(released)
    )
    return found


def _stamps(folder: CourseFolder, assignment: str) -> dict[str, Stamp]:
    """What the receiver stamped on the last submission of each."""
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
    return found


def written(
    folder: CourseFolder, assignment: str, *, to: str = "", penalty: bool = True
) -> Written:
    """The grades in the form of the newest import, or as `to`; nothing is changed here."""
    found = grades(folder, assignment, everybody=True)
    path = newest_imported(folder)
    _, table = read_table_file(path)
    keys = load_keys(folder.private)
    name = formats.sniff(table)
    # Where the keys were lost they are found again, by the addresses for mail and the names.
    known = folder.students(active_only=False)
    diff = compare(table, str(path), known, keys, keep=True)
    return write_back(table, name, assignment, found, diff.keys.keys[name], to=to, penalty=penalty)
