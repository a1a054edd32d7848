"""Budget changes and due-time extensions for one student.

Each is written to the ledger with who granted it and why, then applied.
"""

from __future__ import annotations

import re

from labctl.config.document import quote
from labctl.config.scalars import parse_duration
from labctl.config.times import Moment
from labctl.courses.assignment_seats import list_assignment_seats
from labctl.courses.collect import find_rules
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.spending import allowance_usd, read_due_extensions
from labctl.courses.records.timetable import list_pauses
from labctl.courses.servers import ENDED, CourseOperator
from labctl.courses.status import build_seat_context
from labctl.errors import LabError, NotFoundError, PolicyError, UsageError
from labctl.events import Note
from labctl.model import Value
from labctl.servers import affordable_offers, guard
from labctl.submissions.assignment import judge
from labctl.submissions.receiver import Receiver
from labctl.text import dollars_text

_DOLLARS = re.compile(r"([+-]?)([0-9]{1,6}(?:\.[0-9]{1,2})?)")


class BudgetChange(Value, frozen=True):
    """A seat's budget before and after a change.

    `in_force` is False if the seat's running server could not be given the new limit.
    """

    seat: str
    before_usd: float
    after_usd: float
    in_force: bool
    server_id: str = ""


def change_budget(staff: CourseOperator, seat: Seat, text: str, why: str = "") -> BudgetChange:
    """Change a seat's budget: `+5` on top, `-5` off, `25` in all.

    A running server gets the new limit at once. If it cannot be reached, the ledger still records
    the change, and a warning says so. UsageError for a malformed amount, or if the course has no
    budgets.
    """
    match = _DOLLARS.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{quote(text)} is not an amount", hint=f"labctl course budget {seat.name} +5"
        )
    folder = staff.folder
    base = folder.config.per_student.budget
    entries = folder.ledger.list_entries(seat=seat.name)
    before_usd = allowance_usd(entries, seat.name, base)
    if before_usd is None:
        raise UsageError(
            "this course has no budgets",
            why="per_student.budget is not set, so no spending limit applies",
            hint=f"edit {folder.config.path}: per_student: {{budget: 20.00}}",
        )
    amount = float(match[2])
    change_usd = {"+": amount, "-": -amount, "": amount - before_usd}[match[1]]
    if before_usd + change_usd < 0:
        raise PolicyError(
            f"the budget of {seat.name} would fall below $0.00",
            why=f"it is {dollars_text(before_usd)} now, which is less than {dollars_text(amount)}",
            hint=f"labctl course budget {seat.name} 0   # allows no more spending",
        )
    if change_usd:
        folder.ledger.append(
            "budget", seat=seat.name, by=staff.by, why=why, usd=round(change_usd, 2)
        )
    server_id, in_force = _update_watchdog(staff, seat)
    return BudgetChange(
        seat=seat.name,
        before_usd=before_usd,
        after_usd=before_usd + change_usd,
        in_force=in_force,
        server_id=server_id,
    )


def _update_watchdog(staff: CourseOperator, seat: Seat) -> tuple[str, bool]:
    """Give the watchdog of the seat's server the new limit.

    Returns the server's id ("" if none is running) and whether the limit is in force.
    """
    server = staff.state.get_lab_server(seat.lab_id)
    if server is None or server.state in (*ENDED, "stopped"):
        return "", True
    context = build_seat_context(staff, seat)
    need = context.config.server.need
    left_usd = affordable_offers.budget_left_usd(context, need, but=server.id)
    try:
        guard.arm(context, server, budget_left_usd=left_usd, ceiling_s=need.max_ttl_s)
    except LabError as error:
        text = f"{seat.name}: its server does not have the new budget yet: {error.what}"
        staff.reporter.emit(Note(text=text, level="warning"))
        return server.id, False
    return server.id, True


class DueTimeExtension(Value, frozen=True):
    """When an assignment is due for a student. `closes_at` is None if it never closes."""

    assignment: str
    student: str
    seconds: int
    due: Moment
    closes_at: int | None


class GrantedExtension(Value, frozen=True):
    """A student's extension of an assignment, with who granted it and why."""

    assignment: str
    student: str
    seconds: int
    by: str = ""
    why: str = ""


def extend_due_time(
    folder: CourseFolder, assignment: str, student: str, text: str, *, by: str = "", why: str = ""
) -> DueTimeExtension:
    """Extend the due time of a student and their whole team by `+3d` or `12h`; `0` revokes it.

    The extension counts from the assignment's own due time: repeating it changes nothing.
    """
    rules = folder.config.assignments.get(assignment)
    if rules is None:
        assignments = ", ".join(folder.config.assignments) or "none yet"
        raise NotFoundError(
            f"there is no assignment {quote(assignment)}",
            why=f"course.yaml has {assignments}",
            hint=f"edit {folder.config.path}",
        )
    try:
        seconds = 0 if text in ("0", "+0") else parse_duration(text.removeprefix("+"))
    except ValueError as error:
        hint = f"labctl course due {assignment} {student} +3d"
        raise UsageError(str(error), hint=hint) from None
    if rules.due is None:
        raise UsageError(f"{assignment} has no due time", hint=f"edit {folder.config.path}")
    (seat,) = folder.choose_seats([student], list_assignment_seats(folder, assignment, by=by))
    for member in seat.students:
        if (
            read_due_extensions(folder.ledger.list_entries(kind="due"), assignment).get(member, 0)
            != seconds
        ):
            folder.ledger.append(
                "due",
                seat=seat.name,
                student=member,
                by=by,
                why=why,
                assignment=assignment,
                seconds=seconds,
            )
    apply_extensions(folder, assignment)
    status = judge(rules, rules.due.at, seconds, rules.grace, list_pauses(folder.config))
    return DueTimeExtension(
        assignment=assignment,
        student=student,
        seconds=seconds,
        due=Moment(at=rules.due.at + seconds, offset_s=rules.due.offset_s),
        closes_at=status.closes_at,
    )


def list_extensions(folder: CourseFolder, assignment: str = "") -> list[GrantedExtension]:
    """List the extensions in force, of one assignment or of all, by assignment and student.

    NotFoundError if course.yaml has no such assignment.
    """
    if assignment:
        find_rules(folder, assignment)
    granted: dict[tuple[str, str], GrantedExtension] = {}
    for entry in folder.ledger.list_entries(kind="due"):
        name, student = str(entry.detail.get("assignment", "")), entry.student or entry.seat
        granted[name, student] = GrantedExtension(
            assignment=name,
            student=student,
            seconds=int(entry.detail.get("seconds", 0)),
            by=entry.by,
            why=entry.why,
        )
    return [
        extension
        for (name, _), extension in sorted(granted.items())
        if extension.seconds and assignment in ("", name)
    ]


def apply_extensions(folder: CourseFolder, assignment: str) -> None:
    """Copy every extension in the ledger to the receiver.

    Does nothing while the receiver lacks the assignment: publishing it calls this again.
    """
    receiver = Receiver(folder.drop)
    if not receiver.assignment_file(assignment).is_file():
        return
    extensions = read_due_extensions(folder.ledger.list_entries(kind="due"), assignment)
    seats = {seat.name: seat.students for seat in list_assignment_seats(folder, assignment)}
    for name, students in seats.items():
        longest = max((extensions.get(student, 0) for student in students), default=0)
        extensions = {**extensions, **({name: longest} if longest else {})}
    received = receiver.extensions(assignment)
    for student in extensions.keys() | received.keys():
        if extensions.get(student, 0) != received.get(student, 0):
            receiver.extend(assignment, student, extensions.get(student, 0))
