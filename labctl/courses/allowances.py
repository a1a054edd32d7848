"""More dollars or more time for one student: written down with who and why, then put into force."""

from __future__ import annotations

import re

from labctl.config.document import shown
from labctl.config.scalars import parse_duration
from labctl.config.times import ANY_S, Moment
from labctl.courses.assignment_seats import assignment_seats
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.ledger import Entry, allowance_usd, due_extensions
from labctl.courses.servers import ENDED, Staff
from labctl.courses.status import ground_of
from labctl.errors import LabError, NotFoundError, PolicyError, UsageError
from labctl.events import Note
from labctl.model import Value
from labctl.servers import attempts, guard
from labctl.submissions.receiver import Receiver

_DOLLARS = re.compile(r"([+-]?)([0-9]{1,6}(?:\.[0-9]{1,2})?)")


class Budgeted(Value, frozen=True):
    """A seat's budget before and after. `in_force` says whether a running server knows it too."""

    seat: str
    before_usd: float
    after_usd: float
    in_force: bool
    server_id: str = ""


def budget(staff: Staff, seat: Seat, text: str, why: str = "") -> Budgeted:
    """Change a seat's budget: `+5` on top, `-5` off, `25` in all.

    UsageError where that is no amount or the course has no budgets. A server that is up is told at
    once; where it cannot be reached the ledger has it all the same, and that is said.
    """
    match = _DOLLARS.fullmatch(text)
    if match is None:
        raise UsageError(f"{shown(text)} is no amount", hint=f"labctl course budget {seat.name} +5")
    folder = staff.folder
    base = folder.config.per_student.budget
    entries = folder.ledger.entries(seat=seat.name)
    before = allowance_usd(entries, seat.name, base)
    if before is None:
        raise UsageError(
            "this course has no budgets",
            why="per_student.budget is not set, so nothing ends at a number of dollars",
            hint=f"edit {folder.config.path}: per_student: {{budget: 20.00}}",
        )
    amount = float(match[2])
    more = {"+": amount, "-": -amount, "": amount - before}[match[1]]
    if before + more < 0:
        raise PolicyError(f"{seat.name} would have a budget below nothing")
    if more:
        folder.ledger.append("budget", seat=seat.name, by=staff.by, why=why, usd=round(more, 2))
    server_id, in_force = _in_force(staff, seat)
    return Budgeted(
        seat=seat.name,
        before_usd=before,
        after_usd=before + more,
        in_force=in_force,
        server_id=server_id,
    )


def _in_force(staff: Staff, seat: Seat) -> tuple[str, bool]:
    """Tell the watchdog of the seat's server what it may cost now."""
    server = staff.state.server_of_lab(seat.lab_id)
    if server is None or server.state in (*ENDED, "stopped"):
        return "", True
    ground = ground_of(staff, seat)
    need = ground.config.server.need
    left = attempts.budget_left_usd(ground, need, but=server.id)
    try:
        guard.arm(ground, server, budget_left_usd=left, ceiling_s=need.max_ttl_s)
    except LabError as error:
        text = f"{seat.name}: its server does not know yet: {error.what}"
        staff.reporter.emit(Note(text=text, level="warning"))
        return server.id, False
    return server.id, True


def history(folder: CourseFolder, seat: Seat) -> list[Entry]:
    """Every change of a seat's budget, the first first."""
    return folder.ledger.entries(seat=seat.name, kind="budget")


class Due(Value, frozen=True):
    """When an assignment is due for a student. `closes_at` None: it never closes."""

    assignment: str
    student: str
    seconds: int
    due: Moment
    closes_at: int | None


def due(
    folder: CourseFolder, assignment: str, student: str, text: str, *, by: str = "", why: str = ""
) -> Due:
    """Move the due time for a student, with their whole team, by `+3d`, `12h`; `0` takes it back.

    It counts from the due time itself: repeated, nothing changes.
    """
    rules = folder.config.assignments.get(assignment)
    if rules is None:
        known = ", ".join(folder.config.assignments) or "none yet"
        raise NotFoundError(
            f"there is no assignment {shown(assignment)}",
            why=f"course.yaml has {known}",
            hint=f"edit {folder.config.path}",
        )
    try:
        seconds = 0 if text in ("0", "+0") else parse_duration(text.removeprefix("+"))
    except ValueError as error:
        hint = f"labctl course due {assignment} {student} +3d"
        raise UsageError(str(error), hint=hint) from None
    if rules.due is None:
        raise UsageError(f"{assignment} has no due time", hint=f"edit {folder.config.path}")
    (seat,) = folder.chosen([student], assignment_seats(folder, assignment, by=by))
    for one in seat.students:
        if due_extensions(folder.ledger.entries(kind="due"), assignment).get(one, 0) != seconds:
            folder.ledger.append(
                "due",
                seat=seat.name,
                student=one,
                by=by,
                why=why,
                assignment=assignment,
                seconds=seconds,
            )
    apply_extensions(folder, assignment)
    due_at = rules.due.at + seconds
    return Due(
        assignment=assignment,
        student=student,
        seconds=seconds,
        due=Moment(at=due_at, offset_s=rules.due.offset_s),
        closes_at=None if rules.late == ANY_S else due_at + rules.late,
    )


def apply_extensions(folder: CourseFolder, assignment: str) -> None:
    """Have the receiver know every extension of the ledger; nothing where it has no such
    assignment yet: whoever makes it there calls this again."""
    receiver = Receiver(folder.drop)
    if not receiver.assignment_file(assignment).is_file():
        return
    wanted = due_extensions(folder.ledger.entries(kind="due"), assignment)
    seats = {one.name: one.students for one in assignment_seats(folder, assignment)}
    for name, students in seats.items():
        most = max((wanted.get(one, 0) for one in students), default=0)
        wanted = {**wanted, **({name: most} if most else {})}
    known = receiver.extensions(assignment)
    for student in wanted.keys() | known.keys():
        if wanted.get(student, 0) != known.get(student, 0):
            receiver.extend(assignment, student, wanted.get(student, 0))
