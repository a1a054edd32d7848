"""Course: the same as Lab for a roster. What a Python user calls.

    course = Course.load("ml-2026")
    print(course.plan().usd_per_hour)
    for seat in course.costs().seats:
        print(seat.seat, seat.usd, seat.left_usd)
    print(course.grades("hw3"))

Flows on servers take a `Staff`: `course.staff()`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labctl.config import CourseConfig, Paths, paths
from labctl.courses.loading import open_course
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.student import Student
from labctl.events import Reporter, Silent
from labctl.state import State

if TYPE_CHECKING:
    from labctl.courses.allowances import Budgeted
    from labctl.courses.collect import Collection
    from labctl.courses.grading_run import Grading
    from labctl.courses.invitation import Invitation
    from labctl.courses.plan import Plan
    from labctl.courses.records.cost_report import CourseCosts
    from labctl.courses.records.gradebook import Grade
    from labctl.courses.release import Released
    from labctl.courses.servers import SeatOutcome, Staff
    from labctl.courses.status import CourseNow
    from labctl.courses.teardown import SeatEnding


class Course:
    """One course's folder. Making it touches no network and reads no file."""

    def __init__(
        self, folder: CourseFolder, *, paths: Paths, reporter: Reporter | None = None
    ) -> None:
        self.folder = folder
        self.paths = paths
        self.reporter: Reporter = reporter or Silent()

    @classmethod
    def load(cls, path: str | Path = ".", *, reporter: Reporter | None = None) -> Course:
        """The course of a folder. ConfigError lists everything wrong in its course.yaml."""
        course = cls(open_course(path), paths=paths(), reporter=reporter)
        assert course.config
        return course

    @functools.cached_property
    def state(self) -> State:
        return State(self.paths.database)

    @property
    def config(self) -> CourseConfig:
        return self.folder.config

    def students(self) -> tuple[Student, ...]:
        """Everybody who is in the course now, in the roster's order."""
        return self.folder.students()

    def seats(self) -> tuple[Seat, ...]:
        return self.folder.seats()

    def seat_of(self, student: str) -> Seat:
        """NotFoundError, with the nearest id, for somebody who was never in the course."""
        return self.folder.seat_of(student)

    def up(self, seats: Sequence[Seat] | None = None) -> list[SeatOutcome]:
        """A ready server for each seat (for all); what failed is told seat by seat."""
        from labctl.courses.servers import up

        return up(self.staff(), self.seats() if seats is None else seats)

    def status(self, *, refresh: bool = False) -> CourseNow:
        """Every seat from the ledger and the record; with `refresh` as all of it is now."""
        from labctl.courses.status import status

        return status(self.staff(), self.seats(), refresh=refresh)

    def down(
        self, seats: Sequence[Seat] | None = None, *, discard: bool = False
    ) -> list[SeatEnding]:
        """Results home, then the servers of these seats end; what could not is told.

        Of all for None, those too that were left or whose student went into a team.
        """
        from labctl.courses.teardown import down

        every = self.folder.seats(active_only=False, former=True)
        return down(self.staff(), every if seats is None else seats, discard=discard)

    def collect(self, assignment: str) -> Collection:
        """What was handed in, held against its receipts: for each seat the one that counts."""
        from labctl.courses.collect import collect

        return collect(self.folder, assignment)

    def grade(self, assignment: str, *, again: bool = False) -> Grading:
        """Grade what was handed in, on the grading server of course.yaml; see docs."""
        from labctl.courses.grading_run import grade
        from labctl.courses.servers import Staff

        staff = Staff(self.folder, self.paths, self.state, self.reporter)
        return grade(staff, assignment, again=again)

    def release(self, assignment: str) -> Released:
        """Let students read the feedback of what is graded; asks where a released score changes."""
        from labctl.courses.release import release

        return release(self.folder, assignment, reporter=self.reporter)

    def invite(
        self,
        students: Iterable[str],
        into: Path,
        *,
        host_key: str = "",
        valid_s: int = 14 * 86_400,
        authorized_keys: Path = Path("~/.ssh/authorized_keys"),
    ) -> list[Invitation]:
        """A join file for each, on the keeper's machine; each works once, for `valid_s` seconds."""
        from labctl.courses.keys import Keys
        from labctl.courses.publish import invite_all

        keys = Keys(self.folder, authorized_keys)
        return invite_all(self.folder, students, into, keys, host_key=host_key, valid_s=valid_s)

    def staff(self) -> Staff:
        """Whoever runs this program, as who works on the course: their name is in the ledger."""
        from labctl.courses.creation import acting
        from labctl.courses.servers import Staff

        return Staff(self.folder, self.paths, self.state, self.reporter, by=acting())

    def plan(self, *, offline: bool = False) -> Plan:
        """What there is to make, what it costs, whether the quota allows it. Makes nothing."""
        from labctl.courses.plan import plan

        return plan(self.staff(), offline=offline)

    def costs(self, *, refresh: bool = False) -> CourseCosts:
        """Dollars so far; with `refresh` the provider is asked what lives."""
        from labctl.courses.costs import costs

        return costs(self.staff(), refresh=refresh)

    def budget(self, student: str, amount: str, why: str = "") -> Budgeted:
        """Change the budget of a student's seat: "+5" on top, "25" in all."""
        from labctl.courses.allowances import budget

        return budget(self.staff(), self.folder.seat(student), amount, why)

    def grades(self, assignment: str) -> list[Grade]:
        """A grade for everybody who is in the course."""
        from labctl.courses.grades import grades

        return grades(self.folder, assignment)
