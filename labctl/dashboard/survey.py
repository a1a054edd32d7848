"""One look at everything that this machine knows of a course: its folder, ledger, state, grades.

Nothing here asks a server or a provider: the keeper does, and writes down what it heard.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from labctl.courses.folder import CourseFolder
from labctl.courses.folder import Seat as CourseSeat
from labctl.courses.ledger import Entry, due_extensions
from labctl.courses.money import SeatCost, course_costs
from labctl.courses.student import Student
from labctl.dashboard.gauges import told_by_watchdog
from labctl.dashboard.grades import Grades, released_of
from labctl.dashboard.hand_ins import HandIns
from labctl.dashboard.view import Due, Gauge, Happening, Machine, Person, Seat, Snapshot
from labctl.model import Run, Server
from labctl.state import State

RUNS_KEPT = 12
"""Of each seat; its own page says how many more there are."""
HAPPENINGS_KEPT = 400
QUIET_KINDS = ("cost",)
"""Lines of the ledger that are sums and no news."""


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
        self._stamps: tuple[tuple[int, int], ...] = ()
        self._told: list[str] = []
        folder.tell = self._told.append
        folder.ledger.tell = self._told.append

    def take(self) -> Snapshot:
        """The course now. LabError where its folder cannot be read."""
        self._told.clear()
        self._read_anew()
        folder, now = self._folder, self._now()
        entries = folder.ledger.entries()
        servers = _youngest(self._state.servers())
        everybody = folder.students(active_only=False)
        living = folder.living(servers.values())
        costs = course_costs(folder.config, everybody, entries, now, living)
        spent = {one.seat: one for one in costs.seats}
        here = {seat.lab_id for seat in folder.seats()}
        seats = [
            seat
            for seat in folder.seats(active_only=False)
            if seat.lab_id in here or seat.lab_id in servers or spent[seat.name].usd
        ]
        keys = {student: seat.pseudonym for seat in seats for student in seat.students}
        books = _books(entries)
        watches = self._watches(len(servers))
        runs = self._runs(servers, entries)
        self._hand_ins.read_on()
        mates: dict[str, list[str]] = {}
        for one in everybody:
            mates.setdefault(one.seat, [one.team] if one.team else []).append(one.id)
        released = released_of(entries)
        assignments = tuple(self._due(name, entries) for name in folder.config.assignments)
        return Snapshot(
            at=now,
            course=folder.config.name,
            seats=tuple(self._seat(one, servers, watches, runs, spent, books) for one in seats),
            people=tuple(
                self._person(one, keys, mates[one.seat], released)
                for one in everybody
                if one.active or one.id in keys
            ),
            assignments=assignments,
            happenings=_happenings(entries, {seat.name: seat.pseudonym for seat in seats}),
            costs=costs,
            notes=tuple(dict.fromkeys(self._told)),
        )

    def _read_anew(self) -> None:
        """Have course.yaml and the roster read again where they were changed."""
        files = (self._folder.path / "course.yaml", self._folder.roster_file)
        stamps = tuple(_stamp(file) for file in files)
        if stamps != self._stamps:
            self._folder.refresh()
            self._folder.students()
            self._stamps = stamps

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
        spent: dict[str, SeatCost],
        books: dict[str, list[Entry]],
    ) -> Seat:
        own = books.get(seat.name, [])
        server = servers.get(seat.lab_id)
        machine = self._machine(seat.pseudonym, server, watches.get(server.id)) if server else None
        cost = spent[seat.name]
        return Seat(
            key=seat.pseudonym,
            name=seat.name,
            lab=seat.lab,
            lab_id=seat.lab_id,
            students=seat.students,
            machine=machine,
            runs=tuple(runs.get(seat.lab_id, [])[: -RUNS_KEPT - 1 : -1]),
            spent_usd=round(cost.usd, 2),
            budget_usd=cost.budget_usd,
            trouble=_trouble(own),
        )

    def _runs(self, servers: dict[str, Server], entries: Iterable[Entry]) -> dict[str, list[Run]]:
        """Seat's lab id -> the runs on its servers, the oldest first; whichever lab they are of."""
        labs = {one.lab_id: one.lab_id for one in self._folder.seats(active_only=False)}
        names = {one.name: one.lab_id for one in self._folder.seats(active_only=False)}
        owners = {server.id: lab_id for lab_id, server in servers.items() if lab_id in labs}
        for one in entries:
            if one.kind == "up" and one.seat in names:
                owners[str(one.detail.get("server_id", ""))] = names[one.seat]
        found: dict[str, list[Run]] = {}
        for run in self._state.runs():
            owner = owners.get(run.server_id) or labs.get(run.lab_id)
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
        mates: list[str],
        released: frozenset[tuple[str, str]],
    ) -> Person:
        return Person(
            key=self._folder.pseudonym(student.id),
            id=student.id,
            name=student.name,
            email=student.email,
            team=student.team,
            section=student.section,
            active=student.active,
            seat=keys.get(student.id, ""),
            hand_ins=self._hand_ins.of(mates),
            grades=self._grades.of(student, self._folder.config.assignments, released),
        )

    def _due(self, name: str, entries: list[Entry]) -> Due:
        rules = self._folder.config.assignments[name]
        return Due(
            name=name,
            due_at=rules.due.at if rules.due else None,
            points=rules.points,
            extensions=due_extensions(entries, name),
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


def _books(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Seat -> its own lines that are no sums."""
    found: dict[str, list[Entry]] = {}
    for one in entries:
        if one.seat and one.kind not in QUIET_KINDS:
            found.setdefault(one.seat, []).append(one)
    return found


def _trouble(own: list[Entry]) -> str:
    """Why the last thing that was asked for this seat was refused; "" where it was not."""
    last = next((one for one in reversed(own) if one.kind in ("up", "refused")), None)
    if last is None or last.kind == "up":
        return ""
    return last.why or str(last.detail.get("error", "")) or "refused"


def _happenings(entries: list[Entry], keys: dict[str, str]) -> tuple[Happening, ...]:
    """The last ones, the newest first; seats by their keys."""
    found = []
    for one in reversed(entries):
        if one.kind in QUIET_KINDS:
            continue
        found.append(
            Happening(
                at=one.at,
                kind=one.kind,
                seat=keys.get(one.seat, ""),
                student=one.student,
                by=one.by,
                why=one.why,
                detail=one.detail,
            )
        )
        if len(found) >= HAPPENINGS_KEPT:
            break
    return tuple(found)
