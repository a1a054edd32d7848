"""What the dashboard shows, as frozen values: one snapshot of a course, made once for everybody.

Keys are pseudonyms (8 hex digits): no name and no id of a student stands in an address. Times are
Unix seconds, `None` where nobody knows.
"""

from __future__ import annotations

import functools
from typing import Literal

import msgspec

from labctl.courses.records.cost_report import CourseCosts
from labctl.model import Run, Value

SeatState = Literal["none", "starting", "running", "stopped", "ending"]
WARN_SHARE, FULL_SHARE = 0.8, 1.0
# A server that does nothing for so long is shown as idle.
IDLE_S = 600.0


class Gauge(Value, frozen=True):
    """A server's processors as last asked: percent busy, the mean of its GPUs; memory in bytes."""

    at: float
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None
    gpu_memory_total_bytes: int | None = None
    gpus: int = 0
    cpu_percent: float | None = None


class Machine(Value, frozen=True):
    """The server of a seat. `idle_s` is how long it has done nothing; `busy` says what it does."""

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
    gauge: Gauge | None = None

    @property
    def bills(self) -> bool:
        return self.state in ("starting", "running", "ending")


class Seat(Value, frozen=True):
    """What one student or one team has. `runs` are the last ones, the newest first.

    `budget_usd` is what it may cost, extensions included; None where nothing limits it.
    """

    key: str
    name: str
    lab: str
    lab_id: str
    students: tuple[str, ...]
    machine: Machine | None = None
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
        """The run to show: the newest that goes on, else the newest."""
        return next(
            (run for run in self.runs if not run.ended), self.runs[0] if self.runs else None
        )

    @property
    def share(self) -> float:
        """Of the budget: 0.5 is half of it."""
        return self.spent_usd / self.budget_usd if self.budget_usd else 0.0

    @property
    def idle(self) -> bool:
        found = self.machine
        return found is not None and found.state == "running" and (found.idle_s or 0) >= IDLE_S

    @property
    def marks(self) -> tuple[str, ...]:
        """What the board can be narrowed to."""
        found = {
            "up": self.state in ("running", "starting"),
            "running": self.run is not None and not self.run.ended,
            "idle": self.idle,
            "budget": self.share >= WARN_SHARE,
            "trouble": bool(self.trouble),
        }
        return tuple(name for name, holds in found.items() if holds)


class HandIn(Value, frozen=True):
    """One submission as its receipt has it: `by` handed it in, whose key is `by_key`.

    `number` counts that student's of an assignment.
    """

    assignment: str
    number: int
    received: str
    by: str = ""
    by_key: str = ""
    late_s: int = 0
    penalty: int = 0
    run: str = ""
    size_bytes: int = 0
    sha256: str = ""


class Grade(Value, frozen=True):
    """What grading found. `score` None: it is not graded, and `said` tells why.

    `claim` is the student's figure against the measured one, `agrees` whether they fit; `flags` are
    evidence for a person to look at. `number` is the submission that was graded.
    """

    assignment: str
    number: int = 0
    score: float | None = None
    points: float | None = None
    said: str = ""
    released: bool = False
    claim: str = ""
    agrees: bool | None = None
    flags: tuple[str, ...] = ()


class Person(Value, frozen=True):
    """A student. `seat` is the key of their seat, which a team shares."""

    key: str
    id: str
    name: str
    email: str = ""
    team: str = ""
    section: str = ""
    active: bool = True
    seat: str = ""
    hand_ins: tuple[HandIn, ...] = ()
    grades: tuple[Grade, ...] = ()

    def handed(self, assignment: str) -> HandIn | None:
        """The last one."""
        return next((one for one in reversed(self.hand_ins) if one.assignment == assignment), None)

    def grade(self, assignment: str) -> Grade | None:
        return next((one for one in self.grades if one.assignment == assignment), None)


class Due(Value, frozen=True):
    """An assignment: when it is due for those without an extension, and what it is worth."""

    name: str
    due_at: int | None = None
    points: float | None = None
    # Student's id -> seconds more.
    extensions: dict[str, int] = msgspec.field(default_factory=dict)


class Happening(Value, frozen=True):
    """A line of the course's ledger, of one seat or of all ("")."""

    at: float
    kind: str
    seat: str = ""
    student: str = ""
    by: str = ""
    why: str = ""
    detail: dict[str, object] = msgspec.field(default_factory=dict)


class Snapshot(Value, frozen=True, dict=True):
    """All of a course at one moment. `notes` are what whoever looks should know."""

    at: float
    course: str
    seats: tuple[Seat, ...] = ()
    people: tuple[Person, ...] = ()
    assignments: tuple[Due, ...] = ()
    happenings: tuple[Happening, ...] = ()
    costs: CourseCosts | None = None
    costs_at: float = 0.0
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def seat_by_key(self) -> dict[str, Seat]:
        return {one.key: one for one in self.seats}

    @functools.cached_property
    def person_by_key(self) -> dict[str, Person]:
        return {one.key: one for one in self.people}

    @functools.cached_property
    def person_by_id(self) -> dict[str, Person]:
        return {one.id: one for one in self.people}

    @property
    def spent_usd(self) -> float:
        return sum(one.spent_usd for one in self.seats)

    @property
    def usd_per_hour(self) -> float:
        return sum(s.machine.usd_per_hour for s in self.seats if s.machine and s.machine.bills)

    @property
    def budget_usd(self) -> float | None:
        known = [one.budget_usd for one in self.seats if one.budget_usd is not None]
        return sum(known) if known else None

    def marked(self, mark: str) -> int:
        return sum(mark in one.marks for one in self.seats)
