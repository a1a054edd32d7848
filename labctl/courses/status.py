"""Every seat at a glance: from the record and the ledger at once, or asked of everybody now."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from labctl.courses import metering
from labctl.courses.context import seat_grounds
from labctl.courses.records.folder import Seat
from labctl.courses.records.ledger_entries import Entry
from labctl.courses.records.spending import Spent, allowance_usd, spending
from labctl.courses.seat_reporter import SeatReporter
from labctl.courses.server_contents import labs_on
from labctl.courses.servers import ENDED, Staff
from labctl.errors import NotFoundError, PolicyError
from labctl.lifecycle import fleet
from labctl.lifecycle import status as one_lab
from labctl.model import Run, Server, Value
from labctl.runs import runs
from labctl.servers import adoption
from labctl.servers.context import Ground
from labctl.servers.fan_out import Doors


class SeatNow(Value, frozen=True):
    """One seat. `state` is its server's, "none" without one, "elsewhere" where only the ledger
    knows one. Dollars are the ledger's; `budget_usd` None has no end. What is not known is None.

    `idle_s` is for how long nothing has happened there, as its watchdog last said, at `heard_at`.
    `run` is the youngest that was seen there. `error` is why it could not be asked.
    """

    seat: str
    students: tuple[str, ...]
    state: str = "none"
    server_id: str = ""
    alias: str = ""
    provider: str = ""
    type: str = ""
    spot: bool = False
    usd_per_hour: float = 0.0
    up_s: float = 0.0
    ttl_left_s: float | None = None
    idle_s: float | None = None
    heard_at: float | None = None
    watched: bool = False
    spent_usd: float = 0.0
    budget_usd: float | None = None
    hours: float = 0.0
    run: Run | None = None
    error: str = ""


class CourseNow(Value, frozen=True):
    """All seats, in the roster's order. `usd_per_hour` is what runs now."""

    course: str
    seats: tuple[SeatNow, ...]
    running: int
    usd_per_hour: float
    spent_usd: float
    now: float


def status(staff: Staff, seats: Sequence[Seat], *, refresh: bool = False) -> CourseNow:
    """As recorded here; with `refresh` as the provider and every server say now.

    A server that does not answer is told with its seat, and stops no other.
    """
    errors = _asked(staff, seats) if refresh else {}
    return recorded(staff, seats, errors)


def recorded(staff: Staff, seats: Sequence[Seat], errors: dict[str, str]) -> CourseNow:
    """What this machine's record and the course's ledger say; nobody is asked."""
    now = time.time()
    entries = staff.folder.ledger.entries()
    spent = spending(entries, now)
    servers: dict[str, Server] = {}
    for server in staff.state.servers():
        servers[server.lab_id] = server  # the youngest comes last
    youngest: dict[str, Run] = {}
    for run in staff.state.runs():
        youngest[run.server_id] = run
    mine: dict[str, list[Entry]] = {}
    for entry in entries:
        mine.setdefault(entry.seat, []).append(entry)
    watched = _watched(staff, {server.id for server in servers.values()})
    budget_usd = staff.folder.config.lab.server.need.budget_usd
    rows = []
    for seat in seats:
        own = mine.get(seat.name, [])
        row = SeatNow(
            seat=seat.name,
            students=seat.students,
            spent_usd=spent.get(seat.name, Spent()).usd,
            hours=spent.get(seat.name, Spent()).hours,
            budget_usd=allowance_usd(own, seat.name, budget_usd),
            error=errors.get(seat.name, ""),
        )
        server_here = servers.get(seat.lab_id)
        if server_here is None:
            rows.append(_elsewhere(row, own))
            continue
        watch, heard_at = watched.get(server_here.id, ({}, None))
        row = _with_server(row, server_here, now)
        row = _with_watch(row, watch, heard_at, now)
        rows.append(msgspec.structs.replace(row, run=youngest.get(server_here.id)))
    going = [one for one in rows if one.state in ("running", "starting")]
    return CourseNow(
        course=staff.folder.config.name,
        seats=tuple(rows),
        running=len(going),
        usd_per_hour=sum(one.usd_per_hour for one in going),
        spent_usd=sum(one.spent_usd for one in rows),
        now=now,
    )


def _watched(staff: Staff, ids: set[str]) -> dict[str, tuple[dict[str, Any], float]]:
    """What each server's watchdog said last, and when."""
    found: dict[str, tuple[dict[str, Any], float]] = {}
    for server_id in ids:
        told = staff.state.events(server_id=server_id, kind="watch", limit=1)
        if told:
            found[server_id] = (told[0].detail["watch"], told[0].at)
    return found


def _elsewhere(row: SeatNow, own: Iterable[Entry]) -> SeatNow:
    """A server that another machine made, such as the keeper's: the ledger alone knows it."""
    open_ones = [(name, one) for name, one in metering.known(own).items() if not one.ended]
    if not open_ones:
        return row
    server_id, known = open_ones[-1]
    return msgspec.structs.replace(
        row, state="elsewhere", server_id=server_id, usd_per_hour=known.price
    )


def _with_server(row: SeatNow, server: Server, now: float) -> SeatNow:
    return msgspec.structs.replace(
        row,
        state=server.state,
        server_id=server.id,
        alias=server.alias,
        provider=server.provider,
        type=server.offer.type,
        spot=server.offer.spot,
        usd_per_hour=server.offer.price_usd_per_hour,
        up_s=now - server.created_at,
    )


def _with_watch(row: SeatNow, watch: dict[str, Any], heard_at: float | None, now: float) -> SeatNow:
    if heard_at is None:
        return row
    left = watch.get("ttl_left_s")
    return msgspec.structs.replace(
        row,
        heard_at=heard_at,
        watched=bool(watch.get("alive")),
        ttl_left_s=None if left is None else left - (now - heard_at),
        idle_s=watch.get("idle_for_s"),
    )


def _asked(staff: Staff, seats: Sequence[Seat]) -> dict[str, str]:
    """Ask the provider once and every running server; errors by seat."""
    course = staff.course()
    listed = course.provider.servers()
    grounds = {
        seat.lab_id: ground
        for seat, ground in zip(
            seats,
            seat_grounds(
                staff.folder,
                staff.paths,
                staff.state,
                staff.reporter,
                seats,
                course=course,
                listed=listed,
            ),
            strict=True,
        )
    }
    names = {seat.lab_id: seat.name for seat in seats}
    told = [
        one.beside(
            one.config, one.lab_id, SeatReporter(names[lab_id], staff.reporter, agreed=False)
        )
        for lab_id, one in grounds.items()
    ]
    doors = Doors(take_over(told, listed))

    def look(ground: Ground) -> None:
        server = staff.state.server_of_lab(ground.lab_id)
        if server is None or server.state != "running":
            return
        with doors.through(server.endpoint):
            look_at(ground, server)

    outcomes = fleet.each(told, look)
    metering.accrue(staff.folder, course, listed)
    return {
        names[one.ground.lab_id]: " ".join(filter(None, [one.error.what, one.error.why]))
        for one in outcomes
        if one.error is not None
    }


def take_over(grounds: Sequence[Ground], listed: Sequence[Server]) -> list[Server]:
    """Record what the provider has just shown of these seats; the servers that they have.

    Nobody is asked about a server that is shown as it was recorded.
    """
    shown = {one.id: one for one in listed if one.state not in ENDED}
    by_lab = {one.lab_id: one for one in shown.values()}
    found = []
    for ground in grounds:
        known = ground.state.server_of_lab(ground.lab_id)
        if known is None and ground.lab_id not in by_lab:
            continue
        now = shown.get(known.id) if known else None
        if known is None or now is None:
            adopted = _adopted(ground, listed)
        else:
            adopted = _renewed(ground, known, now)
        if adopted is not None:
            found.append(adopted)
    return found


def _adopted(ground: Ground, listed: Sequence[Server]) -> Server | None:
    try:
        return adoption.adopt(ground, listed)
    except PolicyError as error:  # of a lab: the seat's name is that of its directory
        error.what = error.what.replace(ground.config.name, ground.config.root.name)
        error.hint = error.hint.replace("labctl down", "labctl course down")
        raise


def _renewed(ground: Ground, known: Server, now: Server) -> Server:
    """The record with what has changed; its alias and key file are this machine's own."""
    endpoint = msgspec.structs.replace(
        now.endpoint, identity=now.endpoint.identity or known.endpoint.identity
    )
    fresh = msgspec.structs.replace(now, alias=known.alias, endpoint=endpoint)
    if fresh != known:
        fresh = adoption.adopt(ground, [now]) or fresh
    return fresh


def look_at(ground: Ground, server: Server) -> None:
    """Ask a seat's server about all its labs, and write down what its watchdog says."""
    for lab in labs_on(ground, server):
        reply = runs.refresh(lab, server)
        one_lab.keep_watch(ground, server, reply.get("watch") or {})


def server_of(staff: Staff, seat: Seat) -> Server:
    """The seat's server as recorded; NotFoundError with the command that makes one."""
    found = staff.state.server_of_lab(seat.lab_id)
    if found is None or found.state in (*ENDED, "stopped"):
        known = metering.known(staff.folder.ledger.entries(seat=seat.name))
        elsewhere = any(not one.ended for one in known.values())
        raise NotFoundError(
            f"{seat.name} has no server" + (" on this machine's record" if elsewhere else ""),
            why="another machine, such as the keeper's, made it" if elsewhere else "",
            hint="labctl course status --refresh"
            if elsewhere
            else f"labctl course up --only {seat.name}",
        )
    return found


def servers_of(staff: Staff, seats: Sequence[Seat]) -> list[tuple[Seat, Server]]:
    """The seats that have a server that runs, as recorded; NotFoundError where none has."""
    by_lab: dict[str, Server] = {}
    for one in staff.state.servers():
        if one.state not in (*ENDED, "stopped"):
            by_lab[one.lab_id] = one
    found = [(seat, by_lab[seat.lab_id]) for seat in seats if seat.lab_id in by_lab]
    if not found:
        raise NotFoundError(
            "no seat has a server", why="none is on record here", hint="labctl course up"
        )
    return found


def ground_of(staff: Staff, seat: Seat) -> Ground:
    """The ground of one seat."""
    (found,) = seat_grounds(staff.folder, staff.paths, staff.state, staff.reporter, [seat])
    return found
