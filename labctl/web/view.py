"""The values that the dashboard shows: one frozen snapshot of a course, shared by all pages.

Keys are pseudonyms (8 hex digits), so that no address contains a name or an id of a student. Times
are Unix seconds, `None` if unknown.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import UTC, tzinfo
from typing import Literal

import msgspec

from labctl.courses.records.cost_report import CourseCosts
from labctl.courses.records.course_total import CourseTotal, DroppedGrade
from labctl.courses.records.regrade_requests import RegradeRequest
from labctl.model import Run, Value

SeatState = Literal["none", "starting", "running", "stopped", "ending"]
WARN_SHARE = 0.8
# time without work after which a server is shown as idle
IDLE_S = 600.0


class ServerLoad(Value, frozen=True):
    """The load of a server at `at`: mean use of its GPUs in percent, CPU in percent, memory."""

    at: float
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None
    gpu_memory_total_bytes: int | None = None
    gpus: int = 0
    cpu_percent: float | None = None


class ServerView(Value, frozen=True):
    """The server of a seat. `idle_s` is the time since its last work; `busy` lists its activity.

    `heard_at` is when its watchdog reported last; it is `silent` if that is too long ago.
    """

    id: str
    state: SeatState
    type: str = ""
    gpu: str = ""
    where: str = ""
    spot: bool = False
    usd_per_hour: float = 0.0
    created_at: float = 0.0
    deadline_at: float | None = None
    idle_s: float | None = None
    busy: tuple[str, ...] = ()
    heard_at: float | None = None
    silent: bool = False
    gauge: ServerLoad | None = None

    @property
    def bills(self) -> bool:
        return self.state in ("starting", "running", "ending")


class SeatView(Value, frozen=True):
    """The seat of a student or a team. `runs` are the last ones, the newest first.

    `budget_usd` includes what staff added; None means unlimited.
    """

    key: str
    name: str
    lab: str
    lab_id: str
    students: tuple[str, ...]
    machine: ServerView | None = None
    runs: tuple[Run, ...] = ()
    spent_usd: float = 0.0
    budget_usd: float | None = None
    trouble: str = ""

    @property
    def team(self) -> bool:
        return len(self.students) > 1

    @property
    def state(self) -> SeatState:
        return self.machine.state if self.machine else "none"

    @property
    def run(self) -> Run | None:
        """The run to show: the newest active one, or else the newest."""
        return next(
            (run for run in self.runs if not run.has_ended), self.runs[0] if self.runs else None
        )

    @property
    def silent(self) -> bool:
        return self.machine is not None and self.machine.silent

    @property
    def share(self) -> float:
        """The share of the budget that is spent, 0.5 for half of it."""
        return self.spent_usd / self.budget_usd if self.budget_usd else 0.0

    @property
    def idle(self) -> bool:
        machine = self.machine
        if machine is None or machine.state != "running" or machine.silent:
            return False
        return (machine.idle_s or 0) >= IDLE_S

    @property
    def marks(self) -> tuple[str, ...]:
        """The filters of the board that this seat passes."""
        matches = {
            "up": self.state in ("running", "starting"),
            "running": self.run is not None and not self.run.has_ended and not self.silent,
            "idle": self.idle,
            "budget": self.share >= WARN_SHARE,
            "trouble": bool(self.trouble) or self.silent,
        }
        return tuple(name for name, holds in matches.items() if holds)


class SubmissionView(Value, frozen=True):
    """A submission according to its receipt: `by` submitted it, `by_key` is their key.

    `number` counts the submissions of this student for the assignment. `late_s`, `penalty` and
    `accepted` follow the rules and extensions of now, as in `labctl course collect`.
    """

    assignment: str
    number: int
    received: str
    by: str = ""
    by_key: str = ""
    late_s: int = 0
    penalty: int = 0
    accepted: bool = True
    has_report: bool = False
    run: str = ""
    size_bytes: int = 0
    sha256: str = ""


class GradeView(Value, frozen=True):
    """A grade. If `score` is None, it is not graded, and `feedback` has the reason.

    `claim` compares the student's figure with the measured one, `agrees` tells whether they match;
    `flags` are findings that a person should review. `number` is the graded submission, which
    arrived at `received`. `automatic` is what the automatic grading gave, before the penalty in
    percent and without marks; `free_days` says how many of them the submission used. An excused
    student has no score. `released_score` is the score that the student sees, if it is known.
    `outdated` are the items of the rubric that were marked for an older submission than the one
    that was graded, or that counts.
    """

    assignment: str
    number: int = 0
    received: str = ""
    score: float | None = None
    automatic: float | None = None
    penalty: int = 0
    free_days: str = ""
    points: float | None = None
    feedback: str = ""
    released: bool = False
    released_score: float | None = None
    claim: str = ""
    agrees: bool | None = None
    flags: tuple[str, ...] = ()
    excused: bool = False
    outdated: tuple[str, ...] = ()

    @property
    def has_unseen_change(self) -> bool:
        """Whether the student sees another score until the next release."""
        is_known = self.released_score is not None and not self.excused
        return is_known and self.released_score != self.score


def find_counting(hand_ins: Sequence[SubmissionView], assignment: str) -> SubmissionView | None:
    """Return the submission of these, the oldest first, that counts; None if all were too late."""
    own = (one for one in reversed(hand_ins) if one.assignment == assignment and one.accepted)
    return next(own, None)


class PersonTotals(Value, frozen=True):
    """The totals of a student in a course with assignment groups.

    `present` is that of the grades which staff sees, `released` that which the student sees. None
    without groups.
    """

    present: CourseTotal | None = None
    released: CourseTotal | None = None


class PersonView(Value, frozen=True):
    """A student. `seat` is the key of their seat; the members of a team have the same."""

    key: str
    id: str
    name: str
    email: str = ""
    team: str = ""
    section: str = ""
    active: bool = True
    seat: str = ""
    hand_ins: tuple[SubmissionView, ...] = ()
    grades: tuple[GradeView, ...] = ()
    regrades: tuple[RegradeRequest, ...] = ()
    totals: PersonTotals = PersonTotals()

    def list_regrades(self, assignment: str) -> tuple[RegradeRequest, ...]:
        """Return the student's regrade requests for an assignment, the oldest first."""
        return tuple(one for one in self.regrades if one.assignment == assignment)

    def find_submission(self, assignment: str) -> SubmissionView | None:
        """Return the submission for an assignment that counts: the last one that is accepted."""
        last = (one for one in reversed(self.hand_ins) if one.assignment == assignment)
        return self.find_counting(assignment) or next(last, None)

    def find_counting(self, assignment: str) -> SubmissionView | None:
        """Return the submission that counts; None if all were too late."""
        return find_counting(self.hand_ins, assignment)

    def find_dropped(self, assignment: str) -> DroppedGrade | None:
        """Return why a grade that staff sees does not count; None if it does."""
        total = self.totals.present
        return total.find_dropped(assignment) if total is not None else None

    def grade(self, assignment: str) -> GradeView | None:
        return next((one for one in self.grades if one.assignment == assignment), None)


class AssignmentView(Value, frozen=True):
    """An assignment: its due time without extensions, and its points.

    `zone` is the course's time zone. `has_starter` is whether it hands out files now, `free_days`
    how many late days without a penalty a student has over the term. `past_due` has the ids of
    students whose due time, extensions included, has passed.
    """

    name: str
    due_at: int | None = None
    zone: tzinfo = UTC
    points: float | None = None
    has_starter: bool = False
    free_days: int = 0
    # student id -> seconds of extension
    extensions: dict[str, int] = msgspec.field(default_factory=dict)
    # student id -> Unix time; "" for students without an extension. Empty if it never closes.
    closings: dict[str, int] = msgspec.field(default_factory=dict)
    past_due: frozenset[str] = frozenset()

    def find_closing(self, student: str) -> int | None:
        """Return when the assignment closes for a student; None if it never does."""
        return self.closings.get(student, self.closings.get(""))


class HistoryEvent(Value, frozen=True):
    """A line of the course's ledger, for one seat, or for all (key "")."""

    at: float
    kind: str
    seat: str = ""
    student: str = ""
    by: str = ""
    why: str = ""
    detail: dict[str, object] = msgspec.field(default_factory=dict)


class Snapshot(Value, frozen=True, dict=True):
    """The state of a course at the time `at`. `notes` are warnings for the readers of the pages."""

    at: float
    course: str
    seats: tuple[SeatView, ...] = ()
    people: tuple[PersonView, ...] = ()
    assignments: tuple[AssignmentView, ...] = ()
    happenings: tuple[HistoryEvent, ...] = ()
    costs: CourseCosts | None = None
    costs_at: float = 0.0
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def seat_by_key(self) -> dict[str, SeatView]:
        return {seat.key: seat for seat in self.seats}

    @functools.cached_property
    def person_by_key(self) -> dict[str, PersonView]:
        return {person.key: person for person in self.people}

    @functools.cached_property
    def person_by_id(self) -> dict[str, PersonView]:
        return {person.id: person for person in self.people}

    @functools.cached_property
    def open_regrades(self) -> tuple[tuple[PersonView, RegradeRequest], ...]:
        """The regrade requests without an answer, the oldest first."""
        pairs = [(one, request) for one in self.people for request in one.regrades]
        return tuple(
            sorted((pair for pair in pairs if pair[1].is_open), key=lambda pair: pair[1].at)
        )

    @property
    def spent_usd(self) -> float:
        return sum(seat.spent_usd for seat in self.seats)

    @property
    def usd_per_hour(self) -> float:
        return sum(s.machine.usd_per_hour for s in self.seats if s.machine and s.machine.bills)

    @property
    def budget_usd(self) -> float | None:
        budgets = [seat.budget_usd for seat in self.seats if seat.budget_usd is not None]
        return sum(budgets) if budgets else None

    @property
    def oldest_report_at(self) -> float | None:
        """When the server reported last whose report is the oldest; None without any report."""
        machines = [seat.machine for seat in self.seats if seat.machine is not None]
        times = [one.heard_at for one in machines if one.bills and one.heard_at is not None]
        return min(times, default=None)

    def count_marked(self, mark: str) -> int:
        """Count the seats that pass a filter."""
        return sum(mark in seat.marks for seat in self.seats)
