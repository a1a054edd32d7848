"""The penalty of late submissions after free days, computed from receipts, never stored by hand."""

from __future__ import annotations

import time
from collections.abc import Mapping

from labctl.config.course_schema import AssignmentConfig
from labctl.config.times import ANY_S
from labctl.courses.assignment_seats import list_assignment_seats
from labctl.courses.records.excuses import read_excuses
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.free_days import FreeDays, LateWork, spend_free_days
from labctl.courses.records.spending import read_due_extensions
from labctl.courses.records.timetable import list_pauses
from labctl.submissions.assignment import (
    DeadlineStatus,
    compute_penalty,
    count_late_days,
    judge,
)
from labctl.submissions.receipt import Receipt
from labctl.submissions.receiver import Receiver


class DeadlineJudge:
    """The rules of an assignment with the extensions and holidays of now, read once."""

    def __init__(self, folder: CourseFolder, assignment: str) -> None:
        self.rules = folder.config.assignments[assignment]
        self._extensions = read_due_extensions(folder.ledger.list_entries(kind="due"), assignment)
        self._pauses = list_pauses(folder.config)

    def judge(self, seat: Seat, at: float | None = None) -> DeadlineStatus:
        """Judge a seat's submission at Unix time `at`, by default now."""
        rules = self.rules
        return judge(
            rules,
            time.time() if at is None else at,
            max((self._extensions.get(one, 0) for one in seat.students), default=0),
            rules.grace if rules.due else 0,
            self._pauses,
        )

    def has_closed(self, seat: Seat) -> bool:
        """Tell whether a seat that has submitted nothing missed the assignment.

        One that always accepts late work is missed when it is due.
        """
        status = self.judge(seat)
        return not status.accepted or (self.rules.late == ANY_S and status.late_s > 0)


def compute_free_days(
    folder: CourseFolder, assignment: str, days: Mapping[str, int]
) -> dict[str, FreeDays]:
    """Return seat -> the free days that it spends in this assignment; `days` are its late days.

    The late days of assignments that were due before follow from their receipts. {} if the
    assignment has no free days.
    """
    rules = folder.config.assignments[assignment]
    if not rules.free_days or rules.due is None:
        return {}
    earlier = sorted(
        (other.due.at, name)
        for name, other in folder.config.assignments.items()
        if other.due is not None
        and other.free_days
        and (other.due.at, name) < (rules.due.at, assignment)
    )
    works = [_read_work(folder, name) for _, name in earlier]
    works.append(_make_work(folder, assignment, days))
    spent = spend_free_days(works)
    return {seat: spent[assignment, seat] for seat in days}


def read_free_days_left(folder: CourseFolder, assignment: str, student: str) -> tuple[int, int]:
    """Return the free days of the term, and those that a student can still spend in an assignment.

    (0, 0) if it has none, or the course has no such assignment or student.
    """
    rules = folder.config.assignments.get(assignment)
    if rules is None or not rules.free_days or rules.due is None:
        return 0, 0
    for seat in list_assignment_seats(folder, assignment):
        if student in seat.students:
            spent = compute_free_days(folder, assignment, {seat.name: rules.free_days})
            return rules.free_days, spent[seat.name].used
    return 0, 0


def reduce_penalty(rules: AssignmentConfig, late_s: int, free_days: FreeDays) -> int:
    """Return the penalty in percent for the late days that no free day covers."""
    days = count_late_days(late_s, rules.grace) - free_days.used
    return compute_penalty(max(0, days), rules.penalty)


def find_counting_receipt(
    receiver: Receiver, deadline: DeadlineJudge, assignment: str, seat: Seat
) -> Receipt | None:
    """Return the receipt of a seat's last submission that the rules accept; None without one.

    Unlike `collect`, it does not verify the bundle.
    """
    receipts = [
        signed.receipt
        for member in dict.fromkeys((seat.name, *seat.students))
        for signed in receiver.receipts(assignment, member)
    ]
    # As in `collect`: of two in the same second, the one with the higher number is the last.
    receipts.sort(key=lambda receipt: (receipt.received_at, receipt.number))
    for receipt in reversed(receipts):
        if deadline.judge(seat, receipt.received_at).accepted:
            return receipt
    return None


def _read_work(folder: CourseFolder, name: str) -> LateWork:
    receiver, days = Receiver(folder.drop), dict[str, int]()
    deadline = DeadlineJudge(folder, name)
    for seat in list_assignment_seats(folder, name):
        receipt = find_counting_receipt(receiver, deadline, name, seat)
        if receipt is not None:
            late_s = deadline.judge(seat, receipt.received_at).late_s
            days[seat.name] = count_late_days(late_s, deadline.rules.grace)
    return _make_work(folder, name, days)


def _make_work(folder: CourseFolder, name: str, days: Mapping[str, int]) -> LateWork:
    excuses = read_excuses(folder.ledger.list_entries(kind="excuse"), name)
    return LateWork(
        assignment=name,
        free_days=folder.config.assignments[name].free_days,
        days=days,
        members={
            seat.name: tuple(one for one in seat.students if (name, one) not in excuses)
            for seat in list_assignment_seats(folder, name)
        },
    )
