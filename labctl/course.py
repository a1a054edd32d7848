"""The class Course: the Python interface for a class of students.

    course = Course.load("ml-2026")
    print(course.plan().usd_per_hour)
    for seat in course.costs().seats:
        print(seat.seat, seat.usd, seat.left_usd)
    print(course.grades("hw3"))

Functions in labctl.courses that work on servers take a `CourseOperator`: `course.staff()`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labctl.config import CourseConfig, Paths, find_paths, find_person_name
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.student import Student
from labctl.events import Reporter, SilentReporter
from labctl.lazy import lazy_imports
from labctl.state import State

if TYPE_CHECKING:
    from labctl.courses.allowances import BudgetChange
    from labctl.courses.collect import Collection
    from labctl.courses.grading_run import GradingResult
    from labctl.courses.invitation import Invitation
    from labctl.courses.plan import CoursePlan
    from labctl.courses.records.cost_report import CourseCosts
    from labctl.courses.records.gradebook import Grade
    from labctl.courses.release import ReleaseResult
    from labctl.courses.servers import SeatOutcome
    from labctl.courses.status import CourseStatus
    from labctl.courses.teardown import SeatEnding
    from labctl.courses.totals import StudentTotal

with lazy_imports(__name__):
    from labctl.courses import (
        allowances,
        collect,
        costs,
        grades,
        grading_run,
        invitation,
        plan,
        publish,
        release,
        servers,
        starters,
        status,
        teardown,
        totals,
    )
    from labctl.courses import keys as course_keys


class Course:
    """The folder of a course. Creating the object uses no network and reads no file."""

    def __init__(
        self, folder: CourseFolder, *, paths: Paths, reporter: Reporter | None = None
    ) -> None:
        self.folder = folder
        self.paths = paths
        self.reporter: Reporter = reporter or SilentReporter()

    @classmethod
    def load(cls, path: str | Path = ".", *, reporter: Reporter | None = None) -> Course:
        """Load the course of a folder. ConfigError lists all problems in its course.yaml."""
        folder = CourseFolder(Path(path))
        folder.config  # noqa: B018  It is read at its first use: its ConfigError belongs here.
        return cls(folder, paths=find_paths(), reporter=reporter)

    @functools.cached_property
    def state(self) -> State:
        return State(self.paths.database)

    @property
    def config(self) -> CourseConfig:
        return self.folder.config

    def students(self) -> tuple[Student, ...]:
        """Return the active students in the order of the roster."""
        return self.folder.list_students()

    def seats(self) -> tuple[Seat, ...]:
        return self.folder.list_seats()

    def up(self, seats: Sequence[Seat] | None = None) -> list[SeatOutcome]:
        """Start a server for each seat (default: all seats); the outcomes name each failure."""
        return servers.bring_up_servers(self.staff(), self.seats() if seats is None else seats)

    def status(self, *, refresh: bool = False) -> CourseStatus:
        """Return the state of every seat as recorded; with `refresh`, query the servers first."""
        return status.read_status(self.staff(), self.seats(), refresh=refresh)

    def down(
        self, seats: Sequence[Seat] | None = None, *, discard: bool = False
    ) -> list[SeatEnding]:
        """Download the results of these seats, then remove their servers.

        Without `seats`, this includes the seats of students who left or joined a team. The results
        name each failure.
        """
        all_seats = self.folder.list_seats(active_only=False, former=True)
        return teardown.end_seats(
            self.staff(), all_seats if seats is None else seats, discard=discard
        )

    def collect(self, assignment: str) -> Collection:
        """Fetch the submissions, verify their receipts, and return the one that counts per seat."""
        return collect.collect(self.folder, assignment)

    def grade(self, assignment: str, *, again: bool = False) -> GradingResult:
        """Grade the submissions on the grading server of course.yaml; see docs/grading.md."""
        staff = servers.CourseOperator(self.folder, self.paths, self.state, self.reporter)
        return grading_run.grade_assignment(staff, assignment, again=again)

    def release(self, assignment: str) -> ReleaseResult:
        """Let students read their feedback. Asks before it changes a released score."""
        return release.release_grades(self.folder, assignment, reporter=self.reporter)

    def invite(
        self,
        students: Iterable[str],
        into: Path,
        *,
        host_key: str = "",
        valid_s: int = 14 * 86_400,
        replace: bool = False,
        authorized_keys: Path = Path("~/.ssh/authorized_keys"),
    ) -> list[Invitation]:
        """Write a join file for each student; run it on the keeper's machine.

        Each file works once, for `valid_s` seconds. Starters that were not published are published.
        With `replace`, the devices from which these students have joined lose access now.
        """
        invitation.keeper_address(self.folder)  # without a keeper, nothing is published either
        starters.publish_starters(self.folder, self.paths, only_new=True)
        keys = course_keys.AuthorizedKeys(self.folder, authorized_keys)
        return publish.invite_all(
            self.folder,
            students,
            into,
            keys,
            host_key=host_key,
            valid_s=valid_s,
            replace=replace,
        )

    def staff(self) -> servers.CourseOperator:
        """Return the course with the person who runs this program, for the ledger."""
        return servers.CourseOperator(
            self.folder, self.paths, self.state, self.reporter, by=find_person_name()
        )

    def plan(self, *, offline: bool = False) -> CoursePlan:
        """Return the servers to create, their cost and the quota. It creates nothing."""
        return plan.compute_plan(self.staff(), offline=offline)

    def costs(self, *, refresh: bool = False) -> CourseCosts:
        """Return the cost so far; with `refresh`, query the provider first."""
        return costs.compute_costs(self.staff(), refresh=refresh)

    def change_budget(self, student: str, amount: str, why: str = "") -> BudgetChange:
        """Change the budget of a student's seat: "+5" adds five dollars, "25" sets it to 25."""
        return allowances.change_budget(self.staff(), self.folder.find_seat(student), amount, why)

    def grades(self, assignment: str) -> list[Grade]:
        """Return a grade for every active student."""
        return grades.list_grades(self.folder, assignment)

    def totals(self) -> list[StudentTotal]:
        """Return the total of every active student, without the grades that groups drop."""
        return totals.list_totals(self.folder)
