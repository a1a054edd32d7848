"""Grades that changed after their release. Students see them after the next release only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labctl.cli.exit_codes import clean, print_next
from labctl.cli.wrapping import print_message
from labctl.courses.grades import list_grades
from labctl.courses.records.released_grades import change_text

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from labctl.courses.records.folder import CourseFolder
    from labctl.courses.records.gradebook import Grade


def print_unreleased_changes(assignment: str, grades: Sequence[Grade]) -> None:
    """List the released grades that a new release would change."""
    changed = [grade for grade in grades if grade.unreleased is not None]
    if not changed:
        return
    print_message("Students still see the released grades. The next release changes:")
    for grade in changed:
        print_message(f"  {clean(change_text(grade))}")
    print_next(f"labctl course grades {assignment} --release   # asks first")


def print_unseen_change(folder: CourseFolder, assignment: str, names: Collection[str]) -> None:
    """Say what these students and teams do not see yet, if their grades were released already.

    That is another grade, or only a note or a comment.
    """
    grades = [
        grade
        for grade in list_grades(folder, assignment)
        if grade.released and not {grade.student, grade.team}.isdisjoint(names)
    ]
    if any(grade.unreleased is not None for grade in grades):
        print_unreleased_changes(assignment, grades)
    elif grades:
        names = ", ".join(grade.student for grade in grades)
        print_message(f"{clean(names)} can read this after the next release.")
        print_next(f"labctl course grades {assignment} --release")
