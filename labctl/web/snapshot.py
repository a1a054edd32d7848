"""Snapshots of a course from this machine's data: its folder, ledger, state and grades.

Nothing here contacts a server or a provider; the keeper does that and records the results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from labctl.courses.records.cost_report import add_gpu_minutes
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.folder import Seat as CourseSeat
from labctl.courses.records.gpu_minutes import read_gpu_minutes
from labctl.courses.records.last_known import find_open_refusal, is_silent, mark_lost
from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.courses.records.regrade_requests import read_regrades
from labctl.courses.records.spending import RunningServer, read_due_extensions
from labctl.courses.records.student import Student
from labctl.courses.records.timetable import find_zone
from labctl.courses.starters import list_published
from labctl.courses.watch_reports import DatedWatchReport, WatchReport, read_report
from labctl.model import Run, Server
from labctl.state import State
from labctl.web.grades import GradeDecisions, Grades, read_decisions
from labctl.web.ledger_view import CostSums, LedgerView
from labctl.web.person_totals import PersonTotalsReader
from labctl.web.server_load import load_from_watchdog
from labctl.web.submission_list import SubmissionList
from labctl.web.view import (
    AssignmentView,
    HistoryEvent,
    PersonView,
    SeatView,
    ServerLoad,
    ServerView,
    Snapshot,
)

# runs shown of each seat
RUNS_KEPT = 12
HAPPENINGS_KEPT = 400


class _RosterCache:
    """Students and seats until the roster changes, because names of seats are slow to compute."""

    def __init__(self, folder: CourseFolder) -> None:
        self.people = folder.list_students(active_only=False)
        self.seats = folder.list_seats(active_only=False)
        self.seat_by_name = {seat.name: seat for seat in self.seats}
        self.active = {student.seat for student in self.people if student.active}
        self.keys = {student.id: folder.pseudonym(student.id) for student in self.people}
        # seat -> the team's name, if it is a team's, and its students
        self.mates: dict[str, list[str]] = {}
        for student in self.people:
            names = self.mates.setdefault(student.seat, [student.team] if student.team else [])
            names.append(student.id)

    def living(self, servers: Mapping[str, Server]) -> list[RunningServer]:
        """Return the servers of seats, in the form that sums of costs need."""
        living = []
        for seat in self.seats:
            server = servers.get(seat.lab_id)
            if server is not None:
                living.append(
                    RunningServer(
                        server_id=server.id,
                        seat=seat.name,
                        created_at=server.created_at,
                        usd_per_hour=server.offer.price_usd_per_hour,
                        stopped=server.state == "stopped",
                    )
                )
        return living


class SnapshotTaker:
    """Takes snapshots, in one thread. No other thread may use `folder` at the same time.

    `read_loads` returns the recent load of servers by the keys of their seats.
    """

    def __init__(
        self,
        folder: CourseFolder,
        state: State,
        read_loads: Callable[[], dict[str, ServerLoad]] = dict,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._state = state
        self._read_loads = read_loads
        self._now = now
        self._hand_ins = SubmissionList(folder.drop, folder.pseudonym)
        self._grades = Grades(folder.grades)
        self._ledger = LedgerView()
        self._sums = CostSums()
        self._roster: _RosterCache | None = None
        self._stamps: tuple[tuple[int, int], ...] = ()
        # notes of the folder and the ledger during the last snapshot
        self._notes: list[str] = []
        folder.notify = self._notes.append
        folder.ledger.notify = self._notes.append

    def take(self) -> Snapshot:
        """Take a snapshot of the course. LabError if its folder cannot be read."""
        self._notes.clear()
        roster = self._read_roster()
        folder, now = self._folder, self._now()
        entries = folder.ledger.list_entries()
        self._ledger.read(entries)
        servers = _newest_by_lab(self._state.list_servers())
        living = roster.living(servers)
        costs = self._sums.make(folder.config, roster.people, entries, now, living)
        names = [seat.seat for seat in costs.seats if seat.students]
        minutes = read_gpu_minutes(folder.config, folder.private, names)
        costs = add_gpu_minutes(costs, minutes)
        spent = self._sums.spent_usd(now, living)
        seats = [
            seat
            for seat in roster.seats
            if seat.name in roster.active or seat.lab_id in servers or spent.get(seat.name)
        ]
        keys = {student: seat.pseudonym for seat in seats for student in seat.students}
        watches = self._read_watches(len(servers))
        runs = self._runs_by_seat(roster, servers)
        self._hand_ins.read_on(folder.config.assignments)
        self._grades.list_owners(folder.config.assignments)
        decisions = read_decisions(self._ledger, folder.config.assignments)
        totals = PersonTotalsReader(folder, self._ledger, self._hand_ins.has_submitted)
        return Snapshot(
            at=now,
            course=folder.config.name,
            seats=tuple(self._make_seat(seat, servers, watches, runs, spent) for seat in seats),
            people=tuple(
                self._make_person(student, keys, roster, decisions, totals)
                for student in roster.people
                if student.active or student.id in keys
            ),
            assignments=self._make_assignments([one.id for one in roster.people], now),
            happenings=_make_happenings(
                self._ledger.news, {seat.name: seat.pseudonym for seat in seats} | keys
            ),
            costs=costs,
            costs_at=self._sums.at,
            notes=tuple(dict.fromkeys(self._notes)),
        )

    def _read_roster(self) -> _RosterCache:
        """Return students and seats; read them again if course.yaml or the roster has changed."""
        files = (self._folder.path / "course.yaml", self._folder.roster_file)
        stamps = tuple(_stamp(file) for file in files)
        if self._roster is None or stamps != self._stamps:
            self._roster = None
            self._folder.refresh()
            self._roster = _RosterCache(self._folder)
            self._sums.costs = None
            self._stamps = stamps
        return self._roster

    def _read_watches(self, servers: int) -> dict[str, DatedWatchReport]:
        """Return server id -> the watchdog's last report."""
        events = self._state.list_events(kind="watch", limit=4 * servers + 50) if servers else []
        return {event.server_id: read_report(event) for event in events}

    def _make_seat(
        self,
        seat: CourseSeat,
        servers: dict[str, Server],
        watches: dict[str, DatedWatchReport],
        runs: dict[str, list[Run]],
        spent: dict[str, float],
    ) -> SeatView:
        entries = self._ledger.entries_of(seat.name, seat.students)
        server = servers.get(seat.lab_id)
        machine = None
        if server is not None:
            machine = self._make_machine(seat.pseudonym, server, watches.get(server.id))
        budget = self._folder.config.per_student.budget
        if budget is not None:
            budget = max(0.0, budget + self._ledger.given_usd.get(seat.name, 0.0))
        return SeatView(
            key=seat.pseudonym,
            name=seat.name,
            lab=seat.lab,
            lab_id=seat.lab_id,
            students=seat.students,
            machine=machine,
            runs=tuple(runs.get(seat.lab_id, [])[: -RUNS_KEPT - 1 : -1]),
            spent_usd=round(spent.get(seat.name, 0.0), 2),
            budget_usd=budget,
            trouble=find_open_refusal(entries, server, self._now()),
        )

    def _runs_by_seat(
        self, roster: _RosterCache, servers: dict[str, Server]
    ) -> dict[str, list[Run]]:
        """Return the lab id of a seat -> runs of any lab on its servers, the oldest first."""
        labs = {seat.lab_id for seat in roster.seats}
        lab_by_seat = {seat.name: seat.lab_id for seat in roster.seats}
        owners = {
            server_id: lab_by_seat.get(seat, "") for server_id, seat in self._ledger.owners.items()
        }
        owners |= {server.id: lab_id for lab_id, server in servers.items() if lab_id in labs}
        existing = {server.id: server for server in servers.values()}
        runs: dict[str, list[Run]] = {}
        for run in self._state.list_runs():
            owner = owners.get(run.server_id) or (run.lab_id if run.lab_id in labs else "")
            if owner:
                runs.setdefault(owner, []).append(mark_lost(run, existing.get(run.server_id)))
        return runs

    def _make_machine(
        self, key: str, server: Server, report: DatedWatchReport | None
    ) -> ServerView:
        offer = server.offer
        deadline_at = server.deadline_at
        watch = report.watch if report else WatchReport()
        if report and watch.ttl_left_s is not None:
            deadline_at = round(report.at + watch.ttl_left_s, -1)
        gauge = self._read_loads().get(key)
        if gauge is None and report and server.state == "running":
            gauge = load_from_watchdog(offer, watch.gpu_percent, report.at)
        count = f"{offer.gpu_count} × " if offer.gpu_count > 1 else ""
        return ServerView(
            id=server.id,
            state="none" if server.state == "terminated" else server.state,
            type=offer.type,
            gpu=f"{count}{offer.gpu_name}" if offer.gpu_name else "",
            where=offer.zone or offer.region or server.provider,
            spot=offer.spot,
            usd_per_hour=offer.price_usd_per_hour,
            created_at=server.created_at,
            deadline_at=deadline_at,
            idle_s=watch.idle_for_s,
            busy=watch.busy or (),
            heard_at=report.at if report else None,
            silent=is_silent(server, report.at if report else None, self._now()),
            gauge=gauge,
        )

    def _make_person(
        self,
        student: Student,
        keys: dict[str, str],
        roster: _RosterCache,
        decisions: GradeDecisions,
        totals: PersonTotalsReader,
    ) -> PersonView:
        hand_ins = self._hand_ins.submissions_of(roster.mates[student.seat])
        assignments = self._folder.config.assignments
        grades = self._grades.read_grades(student, assignments, decisions, hand_ins)
        return PersonView(
            key=roster.keys[student.id],
            id=student.id,
            name=student.name,
            email=student.email,
            team=student.team,
            section=student.section,
            active=student.active,
            seat=keys.get(student.id, ""),
            hand_ins=hand_ins,
            grades=grades,
            totals=totals.read(student.id, roster.seat_by_name[student.seat], grades),
            regrades=tuple(read_regrades(self._ledger.by_student.get(student.id, ()))),
        )

    def _make_assignments(self, students: Sequence[str], now: float) -> tuple[AssignmentView, ...]:
        starters = list_published(self._folder)
        names = self._folder.config.assignments
        return tuple(self._make_due(name, name in starters, students, now) for name in names)

    def _make_due(
        self, name: str, has_starter: bool, students: Sequence[str], now: float
    ) -> AssignmentView:
        rules = self._folder.config.assignments[name]
        extensions = read_due_extensions(self._ledger.of_kinds("due"), name)
        due_at = rules.due.at if rules.due else math.inf
        return AssignmentView(
            name=name,
            due_at=rules.due.at if rules.due else None,
            zone=find_zone(self._folder.config),
            points=rules.points,
            has_starter=has_starter,
            free_days=rules.free_days,
            extensions=extensions,
            closings=self._hand_ins.find_closings(name),
            past_due=frozenset(one for one in students if due_at + extensions.get(one, 0) < now),
        )


def _stamp(file: Path) -> tuple[int, int]:
    """Return the modification time and size of a file, which change when it is edited."""
    try:
        stat = file.stat()
    except OSError:
        return (0, 0)
    return (stat.st_mtime_ns, stat.st_size)


def _newest_by_lab(servers: Iterable[Server]) -> dict[str, Server]:
    """Return lab id -> its newest server; `servers` must be ordered by age."""
    return {server.lab_id: server for server in servers if server.state != "terminated"}


def _make_happenings(
    entries: list[CourseLedgerEntry], keys: dict[str, str]
) -> tuple[HistoryEvent, ...]:
    """Convert the last entries, the newest first, with seats replaced by their keys."""
    return tuple(
        HistoryEvent(
            at=entry.at,
            kind=entry.kind,
            seat=keys.get(entry.seat or entry.student, ""),
            student=entry.student,
            by=entry.by,
            why=entry.why,
            detail=entry.detail,
        )
        for entry in entries[: -HAPPENINGS_KEPT - 1 : -1]
    )
