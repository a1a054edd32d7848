"""One look at everything that this machine knows of a course: its folder, ledger, state, grades.

Nothing here asks a server or a provider: the keeper does, and writes down what it heard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.folder import Seat as CourseSeat
from labctl.courses.records.ledger import Entry, Living, due_extensions
from labctl.courses.records.student import Student
from labctl.model import Run, Server
from labctl.state import State
from labctl.web.grades import Grades, frozen_seats, released_of
from labctl.web.ledger_view import Books, Sums
from labctl.web.server_load import told_by_watchdog
from labctl.web.submission_list import HandIns
from labctl.web.view import Due, Gauge, Happening, Machine, Person, Seat, Snapshot

# Of each seat; its own page says how many more there are.
RUNS_KEPT = 12
HAPPENINGS_KEPT = 400
# For so long it is trouble that something was refused.
TROUBLE_S = 12 * 3600.0


class _Roster:
    """Who there is, as long as nobody changes it: seats' names take a while to work out."""

    def __init__(self, folder: CourseFolder) -> None:
        self.people = folder.students(active_only=False)
        self.seats = folder.seats(active_only=False)
        self.active = {one.seat for one in self.people if one.active}
        self.keys = {one.id: folder.pseudonym(one.id) for one in self.people}
        # Seat -> its own name, where it is a team's, and its students.
        self.mates: dict[str, list[str]] = {}
        for one in self.people:
            self.mates.setdefault(one.seat, [one.team] if one.team else []).append(one.id)

    def living(self, servers: Mapping[str, Server]) -> list[Living]:
        """The seats' servers on record, as the sums need them."""
        found = []
        for seat in self.seats:
            one = servers.get(seat.lab_id)
            if one is not None:
                found.append(
                    Living(
                        server_id=one.id,
                        seat=seat.name,
                        created_at=one.created_at,
                        usd_per_hour=one.offer.price_usd_per_hour,
                        stopped=one.state == "stopped",
                    )
                )
        return found


class Survey:
    """Makes snapshots. For one thread; `folder` should be read by nobody else meanwhile.

    `gauges` tells what servers said of themselves lately, by seats' keys.
    """

    def __init__(
        self,
        folder: CourseFolder,
        state: State,
        gauges: Callable[[], dict[str, Gauge]] = dict,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._state = state
        self._gauges = gauges
        self._now = now
        self._hand_ins = HandIns(folder.drop, folder.pseudonym)
        self._grades = Grades(folder.grades)
        self._books = Books()
        self._sums = Sums()
        self._known: _Roster | None = None
        self._stamps: tuple[tuple[int, int], ...] = ()
        self._told: list[str] = []
        folder.tell = self._told.append
        folder.ledger.tell = self._told.append

    def take(self) -> Snapshot:
        """The course now. LabError where its folder cannot be read."""
        self._told.clear()
        roster = self._roster()
        folder, now = self._folder, self._now()
        entries = folder.ledger.entries()
        self._books.read(entries)
        servers = _youngest(self._state.servers())
        living = roster.living(servers)
        costs = self._sums.make(folder.config, roster.people, entries, now, living)
        spent = self._sums.spent_usd(now, living)
        seats = [
            one
            for one in roster.seats
            if one.name in roster.active or one.lab_id in servers or spent.get(one.name)
        ]
        keys = {student: seat.pseudonym for seat in seats for student in seat.students}
        watches = self._watches(len(servers))
        runs = self._runs(roster, servers)
        self._hand_ins.read_on()
        released = released_of(self._books.news)
        frozen = frozen_seats(self._books.news, folder.config.assignments)
        return Snapshot(
            at=now,
            course=folder.config.name,
            seats=tuple(self._seat(one, servers, watches, runs, spent) for one in seats),
            people=tuple(
                self._person(one, keys, roster, released, frozen)
                for one in roster.people
                if one.active or one.id in keys
            ),
            assignments=tuple(self._due(name) for name in folder.config.assignments),
            happenings=_happenings(
                self._books.news, {one.name: one.pseudonym for one in seats} | keys
            ),
            costs=costs,
            costs_at=self._sums.at,
            notes=tuple(dict.fromkeys(self._told)),
        )

    def _roster(self) -> _Roster:
        """Who there is; read again where course.yaml or the roster was changed."""
        files = (self._folder.path / "course.yaml", self._folder.roster_file)
        stamps = tuple(_stamp(file) for file in files)
        if self._known is None or stamps != self._stamps:
            self._known = None
            self._folder.refresh()
            self._known = _Roster(self._folder)
            self._sums.costs = None
            self._stamps = stamps
        return self._known

    def _watches(self, servers: int) -> dict[str, tuple[dict[str, Any], float]]:
        """Server -> what its watchdog said last, and when."""
        said = self._state.events(kind="watch", limit=4 * servers + 50) if servers else []
        return {one.server_id: (one.detail.get("watch") or {}, one.at) for one in said}

    def _seat(
        self,
        seat: CourseSeat,
        servers: dict[str, Server],
        watches: dict[str, tuple[dict[str, Any], float]],
        runs: dict[str, list[Run]],
        spent: dict[str, float],
    ) -> Seat:
        own = self._books.of(seat.name, seat.students)
        server = servers.get(seat.lab_id)
        machine = self._machine(seat.pseudonym, server, watches.get(server.id)) if server else None
        budget = self._folder.config.per_student.budget
        if budget is not None:
            budget = max(0.0, budget + self._books.given_usd.get(seat.name, 0.0))
        return Seat(
            key=seat.pseudonym,
            name=seat.name,
            lab=seat.lab,
            lab_id=seat.lab_id,
            students=seat.students,
            machine=machine,
            runs=tuple(runs.get(seat.lab_id, [])[: -RUNS_KEPT - 1 : -1]),
            spent_usd=round(spent.get(seat.name, 0.0), 2),
            budget_usd=budget,
            trouble=_trouble(own, self._now() - TROUBLE_S),
        )

    def _runs(self, roster: _Roster, servers: dict[str, Server]) -> dict[str, list[Run]]:
        """Seat's lab id -> the runs on its servers, the oldest first; whichever lab they are of."""
        labs = {seat.lab_id for seat in roster.seats}
        names = {seat.name: seat.lab_id for seat in roster.seats}
        owners = {one: names.get(seat, "") for one, seat in self._books.owners.items()}
        owners |= {server.id: lab_id for lab_id, server in servers.items() if lab_id in labs}
        found: dict[str, list[Run]] = {}
        for run in self._state.runs():
            owner = owners.get(run.server_id) or (run.lab_id if run.lab_id in labs else "")
            if owner:
                found.setdefault(owner, []).append(run)
        return found

    def _machine(
        self, key: str, server: Server, watched: tuple[dict[str, Any], float] | None
    ) -> Machine:
        offer = server.offer
        said, heard_at = watched or ({}, None)
        deadline_at = server.deadline_at
        if heard_at is not None and said.get("ttl_left_s") is not None:
            deadline_at = round(heard_at + float(said["ttl_left_s"]), -1)
        busy = tuple(str(one) for one in said.get("busy") or ())
        gauge = self._gauges().get(key)
        if gauge is None and heard_at is not None and server.state == "running":
            gauge = told_by_watchdog(offer, busy, heard_at)
        count = f"{offer.gpu_count} × " if offer.gpu_count > 1 else ""
        return Machine(
            id=server.id,
            state="none" if server.state == "terminated" else server.state,
            type=offer.type,
            gpu=f"{count}{offer.gpu_name}" if offer.gpu_name else "",
            where=offer.zone or offer.region or server.provider,
            spot=offer.spot,
            usd_per_hour=offer.price_usd_per_hour,
            created_at=server.created_at,
            deadline_at=deadline_at,
            idle_s=said.get("idle_for_s"),
            busy=busy,
            heard_at=heard_at,
            gauge=gauge,
        )

    def _person(
        self,
        student: Student,
        keys: dict[str, str],
        roster: _Roster,
        released: frozenset[tuple[str, str]],
        frozen: Mapping[str, Mapping[str, str]],
    ) -> Person:
        return Person(
            key=roster.keys[student.id],
            id=student.id,
            name=student.name,
            email=student.email,
            team=student.team,
            section=student.section,
            active=student.active,
            seat=keys.get(student.id, ""),
            hand_ins=self._hand_ins.of(roster.mates[student.seat]),
            grades=self._grades.of(student, self._folder.config.assignments, released, frozen),
        )

    def _due(self, name: str) -> Due:
        rules = self._folder.config.assignments[name]
        return Due(
            name=name,
            due_at=rules.due.at if rules.due else None,
            points=rules.points,
            extensions=due_extensions(self._books.news, name),
        )


def _stamp(file: Path) -> tuple[int, int]:
    try:
        about = file.stat()
    except OSError:
        return (0, 0)
    return (about.st_mtime_ns, about.st_size)


def _youngest(servers: Iterable[Server]) -> dict[str, Server]:
    """Lab id -> its server; the record is in the order of age."""
    return {one.lab_id: one for one in servers if one.state != "terminated"}


def _trouble(own: list[Entry], since: float) -> str:
    """Why the last thing that was asked for this seat was refused; "" where it was not lately."""
    last = next((one for one in reversed(own) if one.kind in ("up", "refused")), None)
    if last is None or last.kind == "up" or last.at < since:
        return ""
    return last.why or str(last.detail.get("error", "")) or "refused"


def _happenings(entries: list[Entry], keys: dict[str, str]) -> tuple[Happening, ...]:
    """The last ones, the newest first; seats by their keys."""
    return tuple(
        Happening(
            at=one.at,
            kind=one.kind,
            seat=keys.get(one.seat or one.student, ""),
            student=one.student,
            by=one.by,
            why=one.why,
            detail=one.detail,
        )
        for one in entries[: -HAPPENINGS_KEPT - 1 : -1]
    )
