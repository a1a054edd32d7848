"""The seats of an assignment: the roster's while it is open, the ledger's once it has closed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from labctl.config.course_schema import AssignmentConfig
from labctl.courses.grade_store import Shelf
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.membership import Members, closed_line, closing_time, frozen_members


def assignment_seats(folder: CourseFolder, name: str, *, by: str = "") -> tuple[Seat, ...]:
    """Return the seats of an assignment, with those of students who left.

    The first call after an assignment closed writes its members into the ledger; from then on
    they stay. A student who came later has a seat alone.
    """
    rules = folder.config.assignments.get(name)
    if rules is None:
        return folder.seats(active_only=False)
    members = _freeze(folder, name, rules, by)
    if members is None:
        return folder.seats(active_only=False)
    there = {student for students in members.values() for student in students}
    late = {one.id: (one.id,) for one in folder.students(active_only=False) if one.id not in there}
    return folder.build_seats({**late, **members})


def freeze_closed(folder: CourseFolder, *, by: str = "") -> None:
    """Write down the members of every assignment that has closed and is not frozen yet."""
    for name, rules in folder.config.assignments.items():
        _freeze(folder, name, rules, by)


def choose_seats(every: Sequence[Seat], wanted: Iterable[Seat]) -> tuple[Seat, ...]:
    """Return an assignment's seats that have a name or a student in common with the `wanted`."""
    wanted = tuple(wanted)
    if not wanted:
        return tuple(every)
    names = {one.name for one in wanted}
    students = {student for one in wanted for student in one.students}
    return tuple(one for one in every if one.name in names or students & set(one.students))


def _freeze(folder: CourseFolder, name: str, rules: AssignmentConfig, by: str) -> Members | None:
    closes_at = closing_time(rules)
    if closes_at is None or time.time() < closes_at:
        return None
    known = frozen_members(folder.ledger.entries(kind="closed"), name, rules)
    if known is not None:
        return known
    members, why = _members_now(folder, name, closes_at)
    folder.ledger.append_all([closed_line(name, members, by, why)])
    # Of two processes that get here at once the first line counts.
    return frozen_members(folder.ledger.entries(kind="closed"), name, rules) or members


def _members_now(folder: CourseFolder, name: str, closed_at: float) -> tuple[Members, str]:
    """The members to freeze: what a student was graded as since the close, else the roster's team.

    A grade from before the close says nothing: the team could still change then.
    """
    shelf, found, moved = Shelf(folder, name), dict[str, tuple[str, ...]](), []
    for one in folder.students(active_only=False):
        record = shelf.read(one.id)
        seat = record.seat if record is not None and record.at >= closed_at else one.seat
        if seat != one.seat:
            moved.append(one.id)
        found[seat] = (*found.get(seat, ()), one.id)
    return found, f"as they were graded: {', '.join(moved)}" if moved else ""
