"""What a course costs: per student, team and assignment; what was idle, what will come. Pure.

All of it follows from the ledger's lines, what is alive now, the roster and course.yaml.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from labctl.config import CourseConfig
from labctl.courses.records import term
from labctl.courses.records.ledger_entries import Entry
from labctl.courses.records.spending import Living, Span, Spent, allowance_usd, spans, spending
from labctl.courses.records.student import Student
from labctl.model import Value

HOUR_S, DAY_S = 3600.0, 86_400.0
PACE_DAYS = 14.0
# From less than so many days no pace is told.
LEAST_DAYS = 3.0
IDLE_SHARE = 0.5
GAP_S = 120.0
# As an assignment: after the last due time, or where none has one.
AFTERWARDS = ""


class SeatCost(Value, frozen=True):
    """One seat so far. `budget_usd` with what was given on top; None has no end."""

    seat: str
    students: tuple[str, ...]
    usd: float
    hours: float
    idle_usd: float
    idle_hours: float
    budget_usd: float | None = None

    @property
    def left_usd(self) -> float | None:
        return None if self.budget_usd is None else max(0.0, self.budget_usd - self.usd)

    @property
    def share(self) -> float | None:
        """0 to 1 and above: how much of the budget is spent."""
        if self.budget_usd is None:
            return None
        return self.usd / self.budget_usd if self.budget_usd else 1.0


class StudentCost(Value, frozen=True):
    """A student's part: all of their own seat, or an equal part of their team's."""

    student: str
    team: str
    section: str
    active: bool
    usd: float
    hours: float
    idle_hours: float


class AssignmentCost(Value, frozen=True):
    """Dollars go to the assignment that was due next; "" is what came after the last."""

    assignment: str
    usd: float
    hours: float
    seats: int


class IdleStretch(Value, frozen=True):
    """A server's hours in which nothing ran, mostly; `usd` is what the idle part cost."""

    seat: str
    server_id: str
    since: float
    until: float
    idle_hours: float
    usd: float


class Forecast(Value, frozen=True):
    """Dollars at the end of the term, and what they follow from.

    `basis` is "pace" (the last two weeks go on), "hours" (class hours at the present price) or ""
    (nothing to go by: `expected_usd` is None). `at_most_usd` is what is spent when all budgets
    are; None: some seat has no end.
    """

    until: float | None
    basis: str
    expected_usd: float | None
    at_most_usd: float | None
    usd_per_day: float | None = None
    class_hours_left: float = 0.0


class CourseCosts(Value, frozen=True):
    """`complete` says whether the provider was asked about what lives."""

    seats: tuple[SeatCost, ...]
    students: tuple[StudentCost, ...]
    assignments: tuple[AssignmentCost, ...]
    idle: tuple[IdleStretch, ...]
    forecast: Forecast
    usd: float
    hours: float
    idle_usd: float
    complete: bool


def course_costs(
    config: CourseConfig,
    students: Sequence[Student],
    entries: Sequence[Entry],
    now: float,
    living: Sequence[Living] | None = None,
    *,
    most_idle: int = 10,
) -> CourseCosts:
    """Everything up to `now`. `students` are all of the roster, who have left too."""
    found = spans(entries, now, living)
    totals = spending(entries, now, living)
    seats = seat_costs(students, entries, totals, config.per_student.budget)
    return CourseCosts(
        seats=tuple(seats),
        students=tuple(_student_costs(students, {one.seat: one for one in seats})),
        assignments=tuple(assignment_costs(found, due_times(config))),
        idle=tuple(idle_stretches(found)[:most_idle]),
        forecast=forecast(config, students, seats, found, now),
        usd=sum(one.usd for one in seats),
        hours=sum(one.hours for one in seats),
        idle_usd=sum(one.idle_usd for one in seats),
        complete=living is not None,
    )


def seat_costs(
    students: Sequence[Student],
    entries: Iterable[Entry],
    totals: Mapping[str, Spent],
    budget_usd: float | None,
) -> list[SeatCost]:
    """Every seat that somebody has or that cost something, in the roster's order."""
    members: dict[str, list[str]] = {}
    for student in students:
        members.setdefault(student.seat, []).append(student.id)
    given: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.kind == "budget":
            given.setdefault(entry.seat, []).append(entry)
    costs = []
    for seat in dict.fromkeys([*members, *totals]):
        spent = totals.get(seat, Spent())
        costs.append(
            SeatCost(
                seat=seat,
                students=tuple(members.get(seat, ())),
                usd=spent.usd,
                hours=spent.hours,
                idle_usd=spent.idle_usd,
                idle_hours=spent.idle_hours,
                # A dot begins the seats of the course's own servers, which have no budget.
                budget_usd=None
                if seat.startswith(".")
                else allowance_usd(given.get(seat, ()), seat, budget_usd),
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


def due_times(config: CourseConfig) -> list[tuple[float, str]]:
    """(when it is due, assignment), the first first."""
    dated = [(one.due.at, name) for name, one in config.assignments.items() if one.due]
    return sorted((float(at), name) for at, name in dated)


def assignment_costs(
    found: Iterable[Span], due: Sequence[tuple[float, str]]
) -> list[AssignmentCost]:
    """In the order of their due times; what came after the last of them is the last."""
    usd: dict[str, float] = {}
    hours: dict[str, float] = {}
    seats: dict[str, set[str]] = {}
    for span in found:
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


def idle_stretches(found: Iterable[Span]) -> list[IdleStretch]:
    """Mostly idle stretches, those that cost the most first; neighbours are one."""
    stretches: list[IdleStretch] = []
    for span in found:
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
    return sorted(stretches, key=lambda one: (-one.usd, -one.idle_hours))


def forecast(
    config: CourseConfig,
    students: Sequence[Student],
    seats: Sequence[SeatCost],
    found: Sequence[Span],
    now: float,
) -> Forecast:
    """What the term will have cost at its end."""
    spent = sum(one.usd for one in seats)
    active = {one.seat for one in students if one.active}
    going = [one for one in seats if one.seat in active]
    most = [max(one.usd, one.budget_usd) for one in going if one.budget_usd is not None]
    ended = sum(one.usd for one in seats if one.seat not in active)
    at_most = sum(most) + ended if len(most) == len(going) else None
    zone = config.hours[0].zone if config.hours else "UTC"
    until = term.ends_at(config.term, zone) if config.term else None
    if until is None:
        return Forecast(until=None, basis="", expected_usd=None, at_most_usd=at_most)
    hours_left = term.class_hours(config.hours, config.term, now, until) if until > now else 0.0
    pace = usd_per_day(found, now)
    price = mean_price(found)
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


def usd_per_day(found: Sequence[Span], now: float) -> float | None:
    """Dollars a day over the last two weeks; None where there is too little to tell by."""
    first = min((one.since for one in found), default=now)
    since = max(first, now - PACE_DAYS * DAY_S)
    if now - first < LEAST_DAYS * DAY_S:
        return None
    usd = sum(
        one.usd * (one.until - max(one.since, since)) / (one.until - one.since)
        for one in found
        if one.until > since
    )
    return usd / ((now - since) / DAY_S)


def mean_price(found: Iterable[Span]) -> float | None:
    """Dollars for an hour of one server, as they were."""
    usd = hours = 0.0
    for one in found:
        usd, hours = usd + one.usd, hours + (one.until - one.since) / HOUR_S
    return usd / hours if hours else None
