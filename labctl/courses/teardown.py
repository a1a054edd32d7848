"""The end of seats' servers, and of a course: all of it home, nothing left that bills, proven.

`down` ends servers. `end_of_term` also collects, takes keys back, and asks every provider that the
course ever had a server at what is left there.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from labctl.courses import bake, metering
from labctl.courses.context import seat_grounds
from labctl.courses.grading_server import end_forgotten
from labctl.courses.leftovers import (
    Left,
    asked,
    every_ground,
    labs_of,
    own_labs,
    remove_expired_disks,
)
from labctl.courses.records.folder import FORMER, Seat
from labctl.courses.seat_reporter import Done, SeatReporter, stopping
from labctl.courses.server_contents import SavedSeat, save
from labctl.courses.servers import ENDED, SeatOutcome, Staff, of_course
from labctl.courses.status import take_over
from labctl.errors import LabError, PolicyError
from labctl.events import Decision, Note, Step
from labctl.lifecycle import fleet
from labctl.model import Resource, Server, Value
from labctl.providers import Bake
from labctl.servers import end_server, kept_disks, leftovers
from labctl.servers.context import Ground
from labctl.servers.fan_out import Doors

GIVE_UP = "labctl orphans --terminate --kept-too gives them up"
# Servers whose results come home at the same time: this machine's line is what limits them.
AT_ONCE = 16


class SeatEnding(Value, frozen=True):
    """What came of one seat: what is home now, and its server's end or why it has not ended."""

    seat: str
    students: tuple[str, ...]
    server_id: str = ""
    saved: SavedSeat = SavedSeat()
    ended: bool = False
    error: str = ""
    why: str = ""
    hint: str = ""


def down(staff: Staff, seats: Sequence[Seat], *, discard: bool = False) -> list[SeatEnding]:
    """End the servers of these seats once all that is on them is here; those that had none aside.

    Asked once for all. A seat whose results cannot be saved keeps its server or its disk, and is
    told; the others end. Safe to repeat.
    """
    course = staff.course()
    listed = course.provider.servers()
    metering.accrue(staff.folder, course, listed)
    grounds = seat_grounds(
        staff.folder, staff.paths, staff.state, staff.reporter, seats, course=course, listed=listed
    )
    by_lab = {seat.lab_id: seat for seat in seats}
    servers = {one.lab_id: one for one in take_over(grounds, listed)}
    mine = [one for one in grounds if one.lab_id in servers]
    if not mine:
        _see_to_disks(staff)
        return []
    _agree(staff, [servers[one.lab_id] for one in mine], discard)
    with metering.write_ends(staff.state, [by_lab[one.lab_id] for one in mine]):
        saved = _save_all(staff, mine, servers, by_lab, discard)
        ready = [one.ground for one in saved if one.error is None]
        unended = _end_all(course, [servers[one.lab_id] for one in ready])
        gone = [one for one in ready if one.lab_id not in unended]
        # Not everything is home, and yet it has ended: its disk was kept.
        kept = {one.ground.lab_id for one in saved if one.error and _is_gone(staff, servers, one)}
        ended = [(by_lab[one.lab_id], servers[one.lab_id]) for one in gone]
        metering.ended(staff.folder, ended, staff.by, staff.why, "" if discard else metering.HOME)
        left = [(by_lab[one], servers[one]) for one in servers if one in kept]
        metering.ended(staff.folder, left, staff.by, staff.why, metering.DISK)
    gone += [one for one in mine if one.lab_id in kept]
    _tidy(staff, course, gone)
    _see_to_disks(staff)
    return [_told(by_lab, servers, one, unended, kept) for one in saved]


def _is_gone(staff: Staff, servers: dict[str, Server], one: fleet.Outcome[SavedSeat]) -> bool:
    return staff.state.server(servers[one.ground.lab_id].id) is None


def _agree(staff: Staff, servers: Sequence[Server], discard: bool) -> None:
    price = sum(one.offer.price_usd_per_hour for one in servers)
    lost = "Results that are not here will be LOST. " if discard else ""
    what = f"{len(servers)} servers" if len(servers) > 1 else "one server"
    question = f"{lost}end {what} of {staff.folder.config.name} ({price:.2f} dollars an hour)?"
    detail = "" if discard else "what runs is cancelled, and every result is brought home first"
    if not staff.reporter.ask(Decision(question=question, detail=detail)):
        raise PolicyError(
            "nothing was ended",
            why=f"they go on, at {price:.2f} dollars an hour together",
            hint="labctl course down --yes",
        )


def _save_all(
    staff: Staff,
    grounds: Sequence[Ground],
    servers: dict[str, Server],
    by_lab: dict[str, Seat],
    discard: bool,
) -> list[fleet.Outcome[SavedSeat]]:
    doors = Doors(list(servers.values()))

    def one(ground: Ground) -> SavedSeat:
        server = servers[ground.lab_id]
        with doors.through(server.endpoint):
            return save(ground, server, discard=discard)

    def tell(one: fleet.Outcome[SavedSeat]) -> None:
        error = one.error.what if one.error else ""
        staff.reporter.emit(Done(seat=by_lab[one.ground.lab_id].name, error=error))

    quiet = [
        one.beside(
            one.config,
            one.lab_id,
            SeatReporter(by_lab[one.lab_id].name, staff.reporter, agreed=False),
        )
        for one in grounds
    ]
    halt = partial(stopping, staff.reporter)
    return fleet.each(quiet, one, at_once=AT_ONCE, tell=tell, stopping=halt)


def _end_all(course: Ground, servers: Sequence[Server]) -> dict[str, LabError]:
    """End all of them together; why not, by lab id, for those that their provider did not end."""
    if not servers:
        return {}
    step = Step(name="ending one server" if len(servers) == 1 else f"ending {len(servers)} servers")
    course.reporter.emit(step)
    try:
        end_server.end(course, servers)
    except LabError as error:
        left = {one.lab_id for one in servers if course.state.server(one.id) is not None}
        return dict.fromkeys(left, error)
    course.reporter.emit(msgspec.structs.replace(step, done=True))
    return {}


def _tidy(staff: Staff, course: Ground, gone: Sequence[Ground]) -> None:
    """What is home of kept disks makes them go, as does what was there for one server alone; with
    the last server goes what all shared."""
    if not gone:
        return
    try:
        left = course.provider.leftovers()
        _take_saved(course, gone, left)
        _take_timers(course, {one.lab_id for one in gone}, left)
        up, ours = course.provider.servers(), labs_of(staff)
        if not any(one.lab_id in ours and one.state not in ENDED for one in up):
            _take_shared(course, left)
    except LabError as error:
        text = f"what servers left behind is still there: {error.what}"
        staff.reporter.emit(Note(text=text, level="warning"))


def _see_to_disks(staff: Staff) -> None:
    """Remove kept disks whose time is over, and say what stays, where no keeper does so."""
    if staff.folder.config.keeper is not None:
        return
    try:
        kept = remove_expired_disks(staff)
    except LabError as error:
        text = f"a kept disk whose time is over is still there: {error.what}"
        staff.reporter.emit(Note(text=text, level="warning"))
        return
    if kept:
        count = "1 kept disk costs" if len(kept) == 1 else f"{len(kept)} kept disks cost"
        usd = sum(one.price_usd_per_month for one in kept)
        text = f"{count} {usd:.2f} dollars a month; labctl course up brings back the results"
        staff.reporter.emit(Note(text=f"{text}; {GIVE_UP}", level="warning"))


def _take_saved(course: Ground, gone: Sequence[Ground], left: Sequence[Resource]) -> None:
    """Disks that were kept for results, of which everything came home with this server."""
    mine = {
        one.lab_id: one
        for one in gone
        if one.state.events(lab_id=one.lab_id, kind=kept_disks.SAVED, limit=1)
    }
    found = [one for one in left if one.expires_at and one.lab_id in mine]
    end_server.take_away(course, [o for o in found if kept_disks.is_saved(mine[o.lab_id], o)])


def _take_timers(course: Ground, gone: set[str], left: Sequence[Resource]) -> None:
    """What costs nothing and was there for one server: a timer at the provider."""
    found = [one for one in left if one.lab_id in gone]
    free = [one for one in found if not (one.price_usd_per_month or one.expires_at)]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(lambda one: end_server.take_away(course, [one]), free))


def _take_shared(course: Ground, left: Sequence[Resource]) -> None:
    """What the servers of the course shared at its provider, once none is left."""
    shared = [one for one in left if one.lab_id == course.group]
    end_server.take_away(course, [one for one in shared if one.expires_at is None])


def _told(
    by_lab: dict[str, Seat],
    servers: dict[str, Server],
    one: fleet.Outcome[SavedSeat],
    unended: dict[str, LabError],
    kept: set[str],
) -> SeatEnding:
    seat = by_lab[one.ground.lab_id]
    error = one.error or unended.get(seat.lab_id)
    return SeatEnding(
        seat=seat.name,
        students=seat.students,
        server_id=servers[seat.lab_id].id,
        saved=one.value or SavedSeat(),
        ended=error is None,
        error=of_course(error.what, seat) if error else "",
        why=of_course(error.why, seat) if error else "",
        hint=_hint(seat, one.error, kept) if error else "",
    )


def _hint(seat: Seat, unsaved: LabError | None, kept: set[str]) -> str:
    if seat.lab_id in kept and not seat.students:
        return GIVE_UP
    if seat.lab_id in kept:
        return f"labctl course up --only {seat.name} brings the disk back   # {GIVE_UP}"
    # Of somebody who is in a team by now the bare name would end the team's server.
    again = f"labctl course down --only {'' if seat.students else FORMER}{seat.name}"
    return f"{again}, or {again} --discard to lose what is there" if unsaved else again


class Proof(Value, frozen=True):
    """The end of a course. `collected` is what was fetched by assignment, or why it was not."""

    endings: tuple[SeatEnding, ...]
    left: tuple[Left, ...]
    collected: dict[str, str] = msgspec.field(default_factory=dict)
    revoked_keys: int = 0
    at: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether every server has ended and no provider shows anything that bills."""
        return all(one.ended for one in self.endings) and not any(one.bills for one in self.left)


# Fetch and verify what was handed in for an assignment; what came of it, in words.
Collect = Callable[[str], str]
# Take back every key that opens the course's keeper; how many there were.
Revoke = Callable[[], int]


def end_of_term(staff: Staff, *, collect: Collect, revoke: Revoke, discard: bool = False) -> Proof:
    """Collect, save, end, take keys back, and ask the provider in every region what is left.

    Everything is tried, whatever fails; the proof says what did. Safe to repeat.
    """
    collected = {}
    for name in staff.folder.config.assignments:
        staff.reporter.emit(Step(name=f"collecting {name}"))
        try:
            collected[name] = collect(name)
        except LabError as error:
            collected[name] = f"not collected: {error.what}"
            staff.reporter.emit(Note(text=f"{name}: {error.what}", level="warning"))
        staff.reporter.emit(Step(name=f"collecting {name}", done=True))
    _end_grading(staff)
    seats = staff.folder.seats(active_only=False, former=True)
    endings = down(staff, seats, discard=discard)
    ended = all(one.ended for one in endings)
    if ended:
        _end_own(staff)
    revoked = revoke() if ended else 0
    left = asked(staff)
    proof = Proof(
        endings=tuple(endings),
        left=tuple(left),
        collected=collected,
        revoked_keys=revoked,
        at=time.time(),
    )
    if proof.clean:
        # Nothing is left that this key opens.
        shutil.rmtree(staff.paths.keys_dir / staff.folder.id, ignore_errors=True)
    return proof


def _end_own(staff: Staff) -> None:
    """End what the course had servers and images for besides its seats; what fails is asked about
    at the end, and told there."""
    own = own_labs(staff)
    for ground in every_ground(staff, everywhere=False):
        try:
            servers = [one for one in ground.provider.servers() if one.lab_id in own]
            if servers:
                staff.reporter.emit(Step(name="ending what a check, a bake or grading has left"))
                end_server.end(ground, servers)
            if ground.group and isinstance(ground.provider, Bake):
                bake.drop(staff)
            left = ground.provider.leftovers()
            if ground.group:
                _take_shared(ground, left)
            _take_caches(ground, left)
        except LabError as error:
            staff.reporter.emit(Note(text=error.what, level="warning"))


def _take_caches(course: Ground, left: Sequence[Resource]) -> None:
    """The layers that only servers of the course could use again. They cost disk space."""
    found = [one for one in left if one.kind == leftovers.CACHE]
    end_server.take_away(course, [one for one in found if one.lab and one.lab == course.owner])


def _end_grading(staff: Staff) -> None:
    """The grading server, where an earlier grading was interrupted or kept it."""
    try:
        end_forgotten(staff)
    except LabError as error:
        text = f"the grading server has not ended: {error.what}"
        staff.reporter.emit(Note(text=text, level="warning"))


def outcomes_failed(found: Iterable[SeatOutcome | SeatEnding]) -> int:
    """How many seats something failed for."""
    return sum(bool(one.error) for one in found)
