"""The costs of a course: per student, team and assignment; idle time; a forecast. Pure.

Everything follows from the ledger's lines, the running servers, the roster and course.yaml.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from labctl.config import CourseConfig
from labctl.courses.records import timetable
from labctl.courses.records.gpu_minutes import GpuMinutes
from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.courses.records.spending import (
    RunningServer,
    SeatSpending,
    ServerSpan,
    allowance_usd,
    compute_spending,
    list_spans,
)
from labctl.courses.records.student import Student
from labctl.model import Value

HOUR_S, DAY_S = 3600.0, 86_400.0
PACE_DAYS = 14.0
# Days of data that a pace needs at least.
LEAST_DAYS = 3.0
IDLE_SHARE = 0.5
GAP_S = 120.0
# idle stretches that a report lists
MOST_IDLE = 10
# The "assignment" of costs after the last due time, or of all if none has a due time.
AFTERWARDS = ""


class SeatCost(Value, frozen=True):
    """The costs of one seat so far. `budget_usd` includes later grants; None means no limit.

    `gpu_minutes` is what Slurm has counted, with the seat's jobs; None with another engine.
    """

    seat: str
    students: tuple[str, ...]
    usd: float
    hours: float
    idle_usd: float
    idle_hours: float
    budget_usd: float | None = None
    gpu_minutes: GpuMinutes | None = None

    @property
    def left_usd(self) -> float | None:
        return None if self.budget_usd is None else max(0.0, self.budget_usd - self.usd)

    @property
    def share(self) -> float | None:
        """How much of the budget is spent: 1 is all of it; more is possible."""
        if self.budget_usd is None:
            return None
        return self.usd / self.budget_usd if self.budget_usd else 1.0


class StudentCost(Value, frozen=True):
    """A student's share: all of their own seat, or an equal part of their team's."""

    student: str
    team: str
    section: str
    active: bool
    usd: float
    hours: float
    idle_hours: float


class AssignmentCost(Value, frozen=True):
    """Costs until an assignment was due, since the previous one; "" is after the last."""

    assignment: str
    usd: float
    hours: float
    seats: int


class IdleStretch(Value, frozen=True):
    """A stretch in which a server was mostly idle; `usd` is the cost of the idle part."""

    seat: str
    server_id: str
    since: float
    until: float
    idle_hours: float
    usd: float


class Forecast(Value, frozen=True):
    """The expected costs at the end of the term.

    `basis` is "pace" (as in the last two weeks), "hours" (class hours at the average price) or ""
    (unknown: `expected_usd` is None). `at_most_usd` is the cost if all budgets are used up; None if
    a seat has no limit.
    """

    until: float | None
    basis: str
    expected_usd: float | None
    at_most_usd: float | None
    usd_per_day: float | None = None
    class_hours_left: float = 0.0


class CourseCosts(Value, frozen=True):
    """The costs of a course. `complete` is True if the provider was asked for running servers.

    `image_usd_per_month` is the price of the baked machine image, which is not in `usd`.
    """

    seats: tuple[SeatCost, ...]
    students: tuple[StudentCost, ...]
    assignments: tuple[AssignmentCost, ...]
    idle: tuple[IdleStretch, ...]
    forecast: Forecast
    usd: float
    hours: float
    idle_usd: float
    complete: bool
    image_usd_per_month: float = 0.0


def compute_course_costs(
    config: CourseConfig,
    students: Sequence[Student],
    entries: Sequence[CourseLedgerEntry],
    now: float,
    living: Sequence[RunningServer] | None = None,
) -> CourseCosts:
    """Compute all costs up to `now`. `students` are all of the roster, past ones included."""
    stretches = list_spans(entries, now, living)
    totals = compute_spending(entries, now, living)
    seats = compute_seat_costs(students, entries, totals, config.per_student.budget)
    return CourseCosts(
        seats=tuple(seats),
        students=tuple(_student_costs(students, {seat.seat: seat for seat in seats})),
        assignments=tuple(compute_assignment_costs(stretches, list_due_times(config))),
        idle=tuple(find_idle_stretches(stretches)[:MOST_IDLE]),
        forecast=compute_forecast(config, students, seats, stretches, now),
        usd=sum(seat.usd for seat in seats),
        hours=sum(seat.hours for seat in seats),
        idle_usd=sum(seat.idle_usd for seat in seats),
        complete=living is not None,
    )


def add_gpu_minutes(costs: CourseCosts, minutes: Mapping[str, GpuMinutes]) -> CourseCosts:
    """Return the costs with what each seat has used of the GPUs."""
    seats = (
        msgspec.structs.replace(seat, gpu_minutes=minutes.get(seat.seat)) for seat in costs.seats
    )
    return msgspec.structs.replace(costs, seats=tuple(seats))


def compute_seat_costs(
    students: Sequence[Student],
    entries: Iterable[CourseLedgerEntry],
    totals: Mapping[str, SeatSpending],
    budget_usd: float | None,
) -> list[SeatCost]:
    """Return the costs of every seat with students or with costs, in the roster's order."""
    members: dict[str, list[str]] = {}
    for student in students:
        members.setdefault(student.seat, []).append(student.id)
    budget_lines: dict[str, list[CourseLedgerEntry]] = {}
    for entry in entries:
        if entry.kind == "budget":
            budget_lines.setdefault(entry.seat, []).append(entry)
    costs = []
    for seat in dict.fromkeys([*members, *totals]):
        spent = totals.get(seat, SeatSpending())
        costs.append(
            SeatCost(
                seat=seat,
                students=tuple(members.get(seat, ())),
                usd=spent.usd,
                hours=spent.hours,
                idle_usd=spent.idle_usd,
                idle_hours=spent.idle_hours,
                # Names of the course's own seats begin with a dot; they have no budget.
                budget_usd=None
                if seat.startswith(".")
                else allowance_usd(budget_lines.get(seat, ()), seat, budget_usd),
            )
        )
    return costs


def _student_costs(
    students: Sequence[Student], seats: Mapping[str, SeatCost]
) -> Iterable[StudentCost]:
    for student in students:
        seat = seats[student.seat]
        part = 1 / len(seat.students)
        yield StudentCost(
            student=student.id,
            team=student.team,
            section=student.section,
            active=student.active,
            usd=seat.usd * part,
            hours=seat.hours * part,
            idle_hours=seat.idle_hours * part,
        )


def list_due_times(config: CourseConfig) -> list[tuple[float, str]]:
    """Return (due time, assignment) for each with a due time, the earliest first."""
    dated = [(rules.due.at, name) for name, rules in config.assignments.items() if rules.due]
    return sorted((float(at), name) for at, name in dated)


def compute_assignment_costs(
    stretches: Iterable[ServerSpan], due: Sequence[tuple[float, str]]
) -> list[AssignmentCost]:
    """Return the costs by assignment, in the order of due times; later costs come last."""
    usd: dict[str, float] = {}
    hours: dict[str, float] = {}
    seats: dict[str, set[str]] = {}
    for span in stretches:
        at = span.since
        for due_at, name in [*due, (float("inf"), AFTERWARDS)]:
            end = min(span.until, due_at)
            if end <= at:
                continue
            share = (end - at) / (span.until - span.since)
            usd[name] = usd.get(name, 0.0) + span.usd * share
            hours[name] = hours.get(name, 0.0) + (end - at) / HOUR_S
            seats.setdefault(name, set()).add(span.seat)
            at = end
    return [
        AssignmentCost(assignment=name, usd=usd[name], hours=hours[name], seats=len(seats[name]))
        for name in [*(name for _, name in due), AFTERWARDS]
        if name in usd
    ]


def find_idle_stretches(history: Iterable[ServerSpan]) -> list[IdleStretch]:
    """Return the mostly idle stretches, the most expensive first; adjacent ones are merged."""
    stretches: list[IdleStretch] = []
    for span in history:
        length_s = span.until - span.since
        if length_s <= 0 or span.idle_s < IDLE_SHARE * length_s:
            continue
        usd = span.usd * span.idle_s / length_s
        last = stretches[-1] if stretches else None
        joined = (
            last is not None
            and last.server_id == span.server_id
            and span.since - last.until <= GAP_S
        )
        if last is not None and joined:
            stretches.pop()
        stretches.append(
            IdleStretch(
                seat=span.seat,
                server_id=span.server_id,
                since=last.since if last is not None and joined else span.since,
                until=span.until,
                idle_hours=span.idle_s / HOUR_S + (last.idle_hours if last and joined else 0.0),
                usd=usd + (last.usd if last and joined else 0.0),
            )
        )
    return sorted(stretches, key=lambda stretch: (-stretch.usd, -stretch.idle_hours))


def compute_forecast(
    config: CourseConfig,
    students: Sequence[Student],
    seats: Sequence[SeatCost],
    stretches: Sequence[ServerSpan],
    now: float,
) -> Forecast:
    """Forecast the costs at the end of the term."""
    spent = sum(seat.usd for seat in seats)
    active = {student.seat for student in students if student.active}
    in_use = [seat for seat in seats if seat.seat in active]
    limits = [max(seat.usd, seat.budget_usd) for seat in in_use if seat.budget_usd is not None]
    former_usd = sum(seat.usd for seat in seats if seat.seat not in active)
    at_most = sum(limits) + former_usd if len(limits) == len(in_use) else None
    zone = config.hours[0].zone if config.hours else "UTC"
    until = timetable.term_end(config.term, zone) if config.term else None
    if until is None:
        return Forecast(until=None, basis="", expected_usd=None, at_most_usd=at_most)
    hours_left = (
        timetable.class_hours(config.hours, config.term, now, until, config.holidays)
        if until > now
        else 0.0
    )
    pace = compute_usd_per_day(stretches, now)
    price = compute_mean_price(stretches)
    basis, more = "", None
    if pace is not None:
        basis, more = "pace", pace * max(0.0, until - now) / DAY_S
    elif config.hours and price is not None:
        basis, more = "hours", hours_left * len(active) * price
    expected = None if more is None else spent + more
    if expected is not None and at_most is not None:
        expected = min(expected, at_most)
    return Forecast(
        until=until,
        basis=basis,
        expected_usd=expected,
        at_most_usd=at_most,
        usd_per_day=pace,
        class_hours_left=hours_left,
    )


def compute_usd_per_day(stretches: Sequence[ServerSpan], now: float) -> float | None:
    """Return the dollars a day over the last two weeks; None with less than LEAST_DAYS of data."""
    first = min((span.since for span in stretches), default=now)
    since = max(first, now - PACE_DAYS * DAY_S)
    if now - first < LEAST_DAYS * DAY_S:
        return None
    usd = sum(
        span.usd * (span.until - max(span.since, since)) / (span.until - span.since)
        for span in stretches
        if span.until > since
    )
    return usd / ((now - since) / DAY_S)


def compute_mean_price(stretches: Iterable[ServerSpan]) -> float | None:
    """Return the average price of a server hour so far; None if there was none."""
    usd = hours = 0.0
    for span in stretches:
        usd, hours = usd + span.usd, hours + (span.until - span.since) / HOUR_S
    return usd / hours if hours else None
