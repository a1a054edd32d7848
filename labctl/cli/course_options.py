"""What several of a course's commands share: whose seats are meant, and who is at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from labctl.course import Course
    from labctl.courses.records.folder import Seat
    from labctl.courses.servers import Staff
    from labctl.events import Reporter

F = TypeVar("F", bound=Callable[..., Any])


def only_options(function: F) -> F:
    """`only` and `group`: which seats are meant; all of them for neither."""
    for option in (
        click.option("--group", default="", metavar="NAME", help="This section of the roster."),
        click.option("--only", default="", metavar="NAMES", help="These: alice,bob,team-3."),
    ):
        function = option(function)
    return function


def chosen(course: Course, only: str, group: str, assignment: str = "") -> list[Seat]:
    """The seats meant; NotFoundError, with what there is, where a name or section is none.

    With `assignment` those that it has, which stay as they were when it closed.
    """
    from labctl.courses.assignment_seats import assignment_seats
    from labctl.errors import NotFoundError, UsageError

    folder = course.folder
    names = [name.strip() for name in only.split(",") if name.strip()]
    if only and not names:
        raise UsageError("--only names nobody", hint="--only alice,bob")
    among = assignment_seats(folder, assignment) if assignment else None
    seats = list(folder.chosen(names, among))
    if group:
        members = {one.id for one in folder.students() if one.section == group}
        if not members:
            known = sorted({one.section for one in folder.students()} - {""})
            why = f"there are {', '.join(known)}" if known else "the roster has no sections"
            raise NotFoundError(
                f"there is no section {group!r}", why=why, hint="labctl course roster"
            )
        seats = [seat for seat in seats if members & set(seat.students)]
    if not seats:
        raise NotFoundError("no seat is meant", hint="labctl course roster")
    return seats


def staff_of(course: Course, reporter: Reporter | None = None) -> Staff:
    """The course with who works on it now; what is told goes to `reporter`, else the course's."""
    from labctl.courses.creation import acting
    from labctl.courses.servers import Staff

    return Staff(
        course.folder, course.paths, course.state, reporter or course.reporter, by=acting()
    )
