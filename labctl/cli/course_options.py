"""Options that several course commands share, and the functions that read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from labctl.cli import options
from labctl.cli.wrapping import print_message, read_output_width
from labctl.config import find_person_name
from labctl.errors import NotFoundError, UsageError
from labctl.lazy import lazy_imports

if TYPE_CHECKING:
    from labctl.course import Course
    from labctl.courses.records.folder import CourseFolder, Seat
    from labctl.events import Reporter

with lazy_imports(__name__):
    from labctl.courses import assignment_seats, servers
    from labctl.courses.records import plan_changes

# characters of a name in a table
MAX_NAME = 24
# students whom a message names
MOST_NAMES = 12
# columns from which on tables have whole names, and the length of a name below
WIDE, NARROW_NAME = 100, 14
F = TypeVar("F", bound=Callable[..., Any])
WHY = click.option("--why", default="", help="Reason, recorded in the ledger.")


def only_options(function: F) -> F:
    """Add `--only` and `--group`, which select seats; without both, all seats are selected."""
    for option in (
        click.option(
            "--group",
            default="",
            metavar="NAME",
            help="Only students in this section of the roster.",
        ),
        click.option(
            "--only",
            default="",
            metavar="NAMES",
            help="Only these students or teams, for example alice,bob,team-3.",
        ),
    ):
        function = option(function)
    return function


def select_seats(course: Course, only: str, group: str, assignment: str = "") -> list[Seat]:
    """Return the seats that `--only` and `--group` select.

    With `assignment`, they are selected from its seats, which stay as they were when it closed.
    NotFoundError, with the known names, for an unknown name or section.
    """
    folder = course.folder
    names = [name.strip() for name in only.split(",") if name.strip()]
    if only and not names:
        raise UsageError("--only has no names", hint="labctl course status --only alice,bob")
    candidates = assignment_seats.list_assignment_seats(folder, assignment) if assignment else None
    seats = list(folder.choose_seats(names, candidates))
    if group:
        # A course imported earlier has "L01 and Lab A" as one section.
        members = {
            student.id
            for student in folder.list_students()
            if group in (student.section, *student.sections)
        }
        if not members:
            students = folder.list_students()
            sections = sorted({name for student in students for name in student.sections})
            why = (
                f"the sections are {', '.join(sections)}"
                if sections
                else "the roster has no sections"
            )
            raise NotFoundError(
                f"there is no section {group!r}", why=why, hint="labctl course roster"
            )
        seats = [seat for seat in seats if members & set(seat.students)]
    if not seats:
        raise NotFoundError("no seat matches", hint="labctl course roster")
    return seats


def names_by_seat(folder: CourseFolder, most: int = MAX_NAME) -> dict[str, str]:
    """Return seat -> the name of its student, or the names of its team, in `most` characters."""
    names: dict[str, list[str]] = {}
    for student in folder.list_students(active_only=False):
        names.setdefault(student.seat, []).append(student.name or student.id)
    return {seat: shorten_name(", ".join(people), most) for seat, people in names.items()}


def is_wide_screen() -> bool:
    """Whether a table has room for whole names and bars."""
    return read_output_width() >= WIDE


def fit_names_by_seat(folder: CourseFolder) -> dict[str, str]:
    """Return the names of seats, shorter on a narrow screen."""
    return names_by_seat(folder, MAX_NAME if is_wide_screen() else NARROW_NAME)


def shorten_name(text: str, most: int = MAX_NAME) -> str:
    """Return a name that fits into a table."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def print_grace(folder: CourseFolder, assignment: str) -> None:
    """Print the grace period of an assignment, which the column LATE does not count."""
    rules = folder.config.assignments.get(assignment)
    if rules is not None and rules.due is not None and rules.grace:
        text = f"{plan_changes.grace_text(rules.grace)}; a submission within it is on time"
        print_message(text)


def find_acting_person() -> str:
    """Return who the ledger names for this command: `labctl course --as NAME`, or the login."""
    name: str = click.get_current_context().meta.get(options.ACTING_PERSON, "")
    return name or find_person_name()


def make_staff(course: Course, reporter: Reporter | None = None) -> servers.CourseOperator:
    """Return the course with the acting person; events go to `reporter`, else to the course's."""
    return servers.CourseOperator(
        course.folder,
        course.paths,
        course.state,
        reporter or course.reporter,
        by=find_acting_person(),
    )
