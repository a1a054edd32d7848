"""The seats of an assignment: from the roster while it is open, from the ledger once it closed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from labctl.config.course_schema import AssignmentConfig
from labctl.courses.grade_store import GradeStore
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.membership import (
    Members,
    closing_time,
    draft_closed_line,
    read_frozen_members,
)


def list_assignment_seats(folder: CourseFolder, name: str, *, by: str = "") -> tuple[Seat, ...]:
    """Return the seats of an assignment, including those of students who left.

    The first call after the assignment closed writes its teams to the ledger; they never change
    after that. A student who joined later gets a seat of their own.
    """
    rules = folder.config.assignments.get(name)
    if rules is None:
        return folder.list_seats(active_only=False)
    members = _freeze(folder, name, rules, by)
    if members is None:
        return folder.list_seats(active_only=False)
    frozen_ids = {student for students in members.values() for student in students}
    late = {
        student.id: (student.id,)
        for student in folder.list_students(active_only=False)
        if student.id not in frozen_ids
    }
    return folder.build_seats({**late, **members})


def freeze_closed(folder: CourseFolder, *, by: str = "") -> None:
    """Write the teams of every closed assignment to the ledger, unless they are there already."""
    for name, rules in folder.config.assignments.items():
        _freeze(folder, name, rules, by)


def choose_seats(every: Sequence[Seat], wanted: Iterable[Seat]) -> tuple[Seat, ...]:
    """Return the seats that share a name or a student with one of `wanted`; all if it is empty."""
    wanted = tuple(wanted)
    if not wanted:
        return tuple(every)
    names = {seat.name for seat in wanted}
    students = {student for seat in wanted for student in seat.students}
    return tuple(seat for seat in every if seat.name in names or students & set(seat.students))


def _freeze(folder: CourseFolder, name: str, rules: AssignmentConfig, by: str) -> Members | None:
    closes_at = closing_time(rules)
    if closes_at is None or time.time() < closes_at:
        return None
    frozen = read_frozen_members(folder.ledger.list_entries(kind="closed"), name, rules)
    if frozen is not None:
        return frozen
    members, why = _collect_members(folder, name, closes_at)
    folder.ledger.append_all([draft_closed_line(name, members, by, why)])
    # If two processes get here at once, the first line in the ledger counts.
    return read_frozen_members(folder.ledger.list_entries(kind="closed"), name, rules) or members


def _collect_members(folder: CourseFolder, name: str, closed_at: float) -> tuple[Members, str]:
    """Return the teams to freeze, and a note for the ledger ("" if the roster was enough).

    A student belongs to the seat they were graded as since the close, otherwise to the roster's.
    A grade from before the close does not count: the team could still change then.
    """
    grade_store, teams, moved = GradeStore(folder, name), dict[str, tuple[str, ...]](), []
    for student in folder.list_students(active_only=False):
        record = grade_store.read_record(student.id)
        seat = record.seat if record is not None and record.at >= closed_at else student.seat
        if seat != student.seat:
            moved.append(student.id)
        teams[seat] = (*teams.get(seat, ()), student.id)
    return teams, f"as they were graded: {', '.join(moved)}" if moved else ""
