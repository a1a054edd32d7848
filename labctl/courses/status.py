"""The status of every seat: from local records and the ledger, or refreshed from the servers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from labctl.courses import metering
from labctl.courses.context import build_seat_contexts
from labctl.courses.records.folder import Seat
from labctl.courses.records.gpu_minutes import GpuMinutes, read_gpu_minutes
from labctl.courses.records.last_known import find_open_refusal, is_silent, mark_lost
from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.courses.records.ledger_servers import read_servers
from labctl.courses.records.spending import SeatSpending, allowance_usd, compute_spending
from labctl.courses.seat_reporter import label_events
from labctl.courses.server_contents import list_labs
from labctl.courses.servers import ENDED, CourseOperator
from labctl.courses.shared_seats import SharedSeats
from labctl.courses.watch_reports import DatedWatchReport, read_report
from labctl.errors import LabError, NotFoundError
from labctl.errors.replies import describe_error
from labctl.events import Note
from labctl.lifecycle import fleet
from labctl.lifecycle import status as one_lab
from labctl.model import Run, Server, Value
from labctl.runs import runs
from labctl.servers import adoption
from labctl.servers.context import LabContext
from labctl.servers.fan_out import LoginLimiter
from labctl.servers.watch_reports import parse_watch


class SeatStatus(Value, frozen=True):
    """The status of one seat. Unknown values are None.

    `state` is that of its server, "none" without one, or "elsewhere" if only the ledger knows one.
    `ttl_left_s` is until the end of the server, or of the course's lease of a shared machine.
    Dollars are from the ledger; `budget_usd` is None without a limit. `idle_s` is how long the
    server has been idle, as its watchdog reported at `heard_at`. `run` is the newest known run.
    It is lost if its server has ended. The server is `silent` if its last report is too old.
    `refused` is why the last request was refused, until that is solved. `error` is why the server
    could not be asked. `gpu_minutes` is what Slurm has counted, with the seat's jobs; None with
    another engine.
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
    refused: str = ""
    silent: bool = False
    gpu_minutes: GpuMinutes | None = None


class CourseStatus(Value, frozen=True):
    """The status of all seats, in the roster's order. `usd_per_hour` is for those that run now."""

    course: str
    seats: tuple[SeatStatus, ...]
    running: int
    usd_per_hour: float
    spent_usd: float
    now: float


def read_status(
    staff: CourseOperator, seats: Sequence[Seat], *, refresh: bool = False
) -> CourseStatus:
    """Return the recorded status; with `refresh`, ask the provider and every server first.

    A server that does not answer is an `error` of its seat, and stops no other.
    """
    errors = _refresh_servers(staff, seats) if refresh else {}
    return read_recorded_status(staff, seats, errors)


def read_recorded_status(
    staff: CourseOperator, seats: Sequence[Seat], errors: dict[str, str]
) -> CourseStatus:
    """Return the status from this machine's records and the ledger, without any request."""
    now = time.time()
    entries = staff.folder.ledger.list_entries()
    spent = compute_spending(entries, now)
    # Of each lab and server, the newest comes last.
    servers = {server.lab_id: server for server in staff.state.list_servers()}
    newest_runs = {run.server_id: run for run in staff.state.list_runs()}
    entries_by_seat = _group_entries(entries, seats)
    watched = _read_watch_reports(staff, {server.id for server in servers.values()})
    budget_usd = staff.folder.config.lab.server.need.budget_usd
    folder = staff.folder
    minutes = read_gpu_minutes(folder.config, folder.private, [seat.name for seat in seats])

    def describe_seat(seat: Seat) -> SeatStatus:
        own_entries = entries_by_seat.get(seat.name, [])
        spending = spent.get(seat.name, SeatSpending())
        row = SeatStatus(
            seat=seat.name,
            students=seat.students,
            spent_usd=spending.usd,
            hours=spending.hours,
            budget_usd=allowance_usd(own_entries, seat.name, budget_usd),
            error=errors.get(seat.name, ""),
            gpu_minutes=minutes.get(seat.name),
        )
        server = servers.get(seat.lab_id)
        refused = find_open_refusal(own_entries, server, now)
        row = msgspec.structs.replace(row, refused=refused)
        if server is None:
            return _with_ledger_server(row, own_entries)
        row = _with_server(row, server, now)
        if (report := watched.get(server.id)) is not None:
            row = _with_watch(row, report, now)
        run = newest_runs.get(server.id)
        return msgspec.structs.replace(
            row,
            run=mark_lost(run, server) if run else None,
            silent=is_silent(server, row.heard_at, now),
        )

    rows = [describe_seat(seat) for seat in seats]
    running = [row for row in rows if row.state in ("running", "starting")]
    return CourseStatus(
        course=staff.folder.config.name,
        seats=tuple(rows),
        running=len(running),
        usd_per_hour=sum(row.usd_per_hour for row in running),
        spent_usd=sum(row.spent_usd for row in rows),
        now=now,
    )


def _group_entries(
    entries: Iterable[CourseLedgerEntry], seats: Iterable[Seat]
) -> dict[str, list[CourseLedgerEntry]]:
    """Return the lines of each seat; the line of a refused student names no seat."""
    seat_names = {student: seat.name for seat in seats for student in seat.students}
    grouped: dict[str, list[CourseLedgerEntry]] = {}
    for entry in entries:
        owner = entry.seat or seat_names.get(entry.student, "")
        grouped.setdefault(owner, []).append(entry)
    return grouped


def _read_watch_reports(staff: CourseOperator, ids: set[str]) -> dict[str, DatedWatchReport]:
    """Return each server's last watchdog report."""
    reports_by_id: dict[str, DatedWatchReport] = {}
    for server_id in ids:
        reports = staff.state.list_events(server_id=server_id, kind="watch", limit=1)
        if reports:
            reports_by_id[server_id] = read_report(reports[0])
    return reports_by_id


def _with_ledger_server(row: SeatStatus, entries: Iterable[CourseLedgerEntry]) -> SeatStatus:
    """Show a server that only the ledger knows: another machine created it, such as the keeper."""
    open_servers = [
        (server_id, server)
        for server_id, server in read_servers(entries).items()
        if not server.ended
    ]
    if not open_servers:
        return row
    server_id, server = open_servers[-1]
    return msgspec.structs.replace(
        row, state="elsewhere", server_id=server_id, usd_per_hour=server.price
    )


def _with_server(row: SeatStatus, server: Server, now: float) -> SeatStatus:
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
        ttl_left_s=server.deadline_at - now if server.deadline_at else None,
    )


def _with_watch(row: SeatStatus, report: DatedWatchReport, now: float) -> SeatStatus:
    reported_s = report.watch.ttl_left_s
    left_s = row.ttl_left_s if reported_s is None else reported_s - (now - report.at)
    return msgspec.structs.replace(
        row,
        heard_at=report.at,
        watched=report.watch.alive,
        ttl_left_s=left_s,
        idle_s=report.watch.idle_for_s,
    )


def _refresh_servers(staff: CourseOperator, seats: Sequence[Seat]) -> dict[str, str]:
    """Ask the provider once, and every running server; return the errors by seat."""
    course = staff.course()
    listed = course.provider.servers()
    by_lab = {
        seat.lab_id: context
        for seat, context in zip(
            seats,
            build_seat_contexts(
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
    contexts = [label_events(context, names[lab_id]) for lab_id, context in by_lab.items()]
    login_limiter = LoginLimiter(record_servers(contexts, listed))

    def refresh_seat(context: LabContext) -> None:
        server = staff.state.get_lab_server(context.lab_id)
        if server is None or server.state != "running":
            return
        with login_limiter.acquire_slot(server.endpoint):
            refresh_server(context, server)

    outcomes = fleet.run_for_each(contexts, refresh_seat)
    metering.record_costs(staff.folder, course, listed)
    refresh_gpu_minutes(course)
    report_unavailable_machines(course)
    return {
        names[outcome.context.lab_id]: ": ".join(
            filter(None, [outcome.error.what, outcome.error.why])
        )
        for outcome in outcomes
        if outcome.error is not None
    }


def refresh_gpu_minutes(course: LabContext) -> None:
    """Record what each seat has used of the GPUs, and its jobs, if the course has Slurm."""
    if not isinstance(course.provider, SharedSeats):
        return
    try:
        course.provider.upkeep.record_gpu_minutes()
    except LabError as error:
        text = f"the GPU minutes and jobs are not up to date: {describe_error(error)}"
        course.reporter.emit(Note(text=text, level="warning"))


def report_unavailable_machines(course: LabContext) -> None:
    """Name the machines to which Slurm gives no jobs, and why."""
    if isinstance(course.provider, SharedSeats):
        # `refresh_gpu_minutes` has said that Slurm does not answer.
        with suppress(LabError):
            course.provider.upkeep.report_unavailable()


def record_servers(contexts: Sequence[LabContext], listed: Sequence[Server]) -> list[Server]:
    """Record the servers that the provider has just listed for these seats; return them.

    A server that is listed as it was recorded needs no request.
    """
    by_id = {server.id: server for server in listed if server.state not in ENDED}
    by_lab = {server.lab_id: server for server in by_id.values()}
    servers = []
    for context in contexts:
        recorded = context.state.get_lab_server(context.lab_id)
        if recorded is None and context.lab_id not in by_lab:
            continue
        current = by_id.get(recorded.id) if recorded else None
        if recorded is None or current is None:
            server = adoption.adopt(context, listed)
        else:
            server = _update_record(context, recorded, current)
        if server is not None:
            servers.append(server)
    return servers


def _update_record(context: LabContext, recorded: Server, current: Server) -> Server:
    """Return the record updated from the list, with this machine's own alias and key file."""
    endpoint = msgspec.structs.replace(
        current.endpoint, identity=current.endpoint.identity or recorded.endpoint.identity
    )
    updated = msgspec.structs.replace(current, alias=recorded.alias, endpoint=endpoint)
    if updated != recorded:
        updated = adoption.adopt(context, [current]) or updated
    return updated


def refresh_server(context: LabContext, server: Server) -> None:
    """Refresh the runs of all labs on a seat's server, and record its watchdog's report."""
    for lab in list_labs(context, server):
        reply = runs.refresh(lab, server)
        one_lab.record_watch(context, server, parse_watch(reply.watch))


def find_server(staff: CourseOperator, seat: Seat) -> Server:
    """Return the seat's recorded server; NotFoundError says how to create one."""
    found = staff.state.get_lab_server(seat.lab_id)
    if found is None or found.state in (*ENDED, "stopped"):
        known = read_servers(staff.folder.ledger.list_entries(seat=seat.name))
        elsewhere = any(not server.ended for server in known.values())
        raise NotFoundError(
            f"{seat.name} has no server" + (" in this machine's records" if elsewhere else ""),
            why="another machine created it, such as the keeper" if elsewhere else "",
            hint="labctl course status --refresh"
            if elsewhere
            else f"labctl course up --only {seat.name}",
        )
    return found


def list_running_servers(staff: CourseOperator, seats: Sequence[Seat]) -> list[tuple[Seat, Server]]:
    """Return the seats with a running server, as recorded; NotFoundError without any."""
    by_lab: dict[str, Server] = {}
    for server in staff.state.list_servers():
        if server.state not in (*ENDED, "stopped"):
            by_lab[server.lab_id] = server
    pairs = [(seat, by_lab[seat.lab_id]) for seat in seats if seat.lab_id in by_lab]
    if not pairs:
        raise NotFoundError(
            "no seat has a server", why="this machine has no record of one", hint="labctl course up"
        )
    return pairs


def build_seat_context(staff: CourseOperator, seat: Seat) -> LabContext:
    """Build the context of one seat."""
    (context,) = build_seat_contexts(staff.folder, staff.paths, staff.state, staff.reporter, [seat])
    return context
