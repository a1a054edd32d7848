"""Ending seats' servers, and a whole course, with proof that results are saved and nothing bills.

`end_seats` ends servers. `end_of_term` also collects submissions, revokes keys, and lists what is
left at every provider where the course ever had a server.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from labctl.courses import bake, end_consent, metering
from labctl.courses.context import build_seat_contexts
from labctl.courses.end_consent import NO_ACCESS, AccessCount
from labctl.courses.grading_server import end_forgotten
from labctl.courses.leftovers import (
    ProviderLeftovers,
    build_provider_contexts,
    list_lab_ids,
    list_leftovers,
    list_own_lab_ids,
    remove_expired_disks,
    remove_timers,
)
from labctl.courses.records.folder import Seat
from labctl.courses.seat_reporter import label_events, make_done_notifier, report_stopping
from labctl.courses.seat_results import SeatFailure, SeatResult
from labctl.courses.server_contents import SavedSeat, save_server
from labctl.courses.servers import ENDED, CourseOperator
from labctl.courses.shared_seats import SharedSeats
from labctl.courses.status import record_servers
from labctl.errors import LabError
from labctl.errors.subject import Subject, Text
from labctl.events import Note, Step
from labctl.lifecycle import fleet
from labctl.lifecycle.unsaved_server import UnsavedHomeError
from labctl.model import Resource, Server, Value
from labctl.servers import end_server, kept_disks, leftovers, machine_images
from labctl.servers.context import LabContext
from labctl.servers.fan_out import LoginLimiter
from labctl.text import add_next, dollars_text

GIVE_UP = "labctl orphans --terminate --kept-too   # deletes them"
# Servers saved at the same time: the bandwidth of this machine is the limit.
AT_ONCE = 16


class SeatEnding(SeatResult, frozen=True):
    """The result for one seat: what was saved, and whether its server ended or why not."""

    server_id: str = ""
    saved: SavedSeat = SavedSeat()
    ended: bool = False


def end_seats(
    staff: CourseOperator, seats: Sequence[Seat], *, discard: bool = False, agreed: bool = False
) -> list[SeatEnding]:
    """Save what is on these seats' servers, then end them; return a result for each server.

    One consent covers all; with `agreed` the user gave it before. A seat whose results cannot be
    saved keeps its server or its disk, with an error; the others end. Safe to repeat.
    """
    course = staff.course()
    listed = course.provider.servers()
    metering.record_costs(staff.folder, course, listed)
    contexts = build_seat_contexts(
        staff.folder, staff.paths, staff.state, staff.reporter, seats, course=course, listed=listed
    )
    by_lab = {seat.lab_id: seat for seat in seats}
    servers = {server.lab_id: server for server in record_servers(contexts, listed)}
    with_server = [context for context in contexts if context.lab_id in servers]
    if not with_server:
        _handle_kept_disks(staff)
        return []
    if not agreed:
        end_consent.require_consent(
            staff, [servers[one.lab_id] for one in with_server], discard=discard
        )
    with metering.hold_end_locks(staff.state, [by_lab[context.lab_id] for context in with_server]):
        saved = _save_all(staff, with_server, servers, by_lab, discard)
        ready = [outcome.context for outcome in saved if outcome.error is None]
        unended = _end_all(course, [servers[context.lab_id] for context in ready])
        ended_contexts = [context for context in ready if context.lab_id not in unended]
        # Servers that ended without everything saved: their disks were kept.
        with_kept_disk = {
            outcome.context.lab_id
            for outcome in saved
            if outcome.error and _has_no_record(staff, servers, outcome)
        }
        ended = [(by_lab[context.lab_id], servers[context.lab_id]) for context in ended_contexts]
        metering.record_ends(
            staff.folder, ended, staff.by, staff.why, "" if discard else metering.HOME
        )
        with_disk = [
            (by_lab[lab_id], servers[lab_id]) for lab_id in servers if lab_id in with_kept_disk
        ]
        metering.record_ends(staff.folder, with_disk, staff.by, staff.why, metering.DISK)
    ended_contexts += [context for context in with_server if context.lab_id in with_kept_disk]
    _remove_leftovers(staff, course, ended_contexts)
    _handle_kept_disks(staff)
    return [
        _describe_ending(by_lab, servers, outcome, unended, with_kept_disk) for outcome in saved
    ]


def _has_no_record(
    staff: CourseOperator, servers: dict[str, Server], outcome: fleet.LabOutcome[SavedSeat]
) -> bool:
    return staff.state.get_server(servers[outcome.context.lab_id].id) is None


def _save_all(
    staff: CourseOperator,
    contexts: Sequence[LabContext],
    servers: dict[str, Server],
    by_lab: dict[str, Seat],
    discard: bool,
) -> list[fleet.LabOutcome[SavedSeat]]:
    login_limiter = LoginLimiter(list(servers.values()))

    def save_seat(context: LabContext) -> SavedSeat:
        server = servers[context.lab_id]
        with login_limiter.acquire_slot(server.endpoint):
            return save_server(context, server, discard=discard)

    reporting = [label_events(context, by_lab[context.lab_id].name) for context in contexts]
    return fleet.run_for_each(
        reporting,
        save_seat,
        at_once=AT_ONCE,
        on_result=make_done_notifier(staff.reporter, by_lab),
        stopping=partial(report_stopping, staff.reporter),
    )


def _end_all(course: LabContext, servers: Sequence[Server]) -> dict[str, LabError]:
    """End all servers together; return the errors of those that did not end, by lab id."""
    if not servers:
        return {}
    step = Step(name="ending one server" if len(servers) == 1 else f"ending {len(servers)} servers")
    course.reporter.emit(step)
    try:
        end_server.end(course, servers)
    except LabError as error:
        unended = {
            server.lab_id for server in servers if course.state.get_server(server.id) is not None
        }
        return dict.fromkeys(unended, error)
    course.reporter.emit(msgspec.structs.replace(step, done=True))
    return {}


def _remove_leftovers(
    staff: CourseOperator, course: LabContext, ended: Sequence[LabContext]
) -> None:
    """Remove saved disks and timers of ended servers; after the last server, the shared parts."""
    if not ended:
        return
    try:
        leftover_resources = course.provider.leftovers()
        _remove_saved_disks(course, ended, leftover_resources)
        remove_timers(course, {context.lab_id for context in ended}, leftover_resources)
        up, ours = course.provider.servers(), list_lab_ids(staff)
        if not any(server.lab_id in ours and server.state not in ENDED for server in up):
            _remove_shared(course, leftover_resources)
    except LabError as error:
        text = f"leftovers of ended servers could not be removed: {error.what}"
        staff.reporter.emit(Note(text=text, level="warning"))


def _handle_kept_disks(staff: CourseOperator) -> None:
    """Remove expired kept disks and report the others, unless a keeper does so."""
    if staff.folder.config.keeper is not None:
        return
    try:
        disks = remove_expired_disks(staff)
    except LabError as error:
        text = f"an expired disk could not be removed: {error.what}"
        staff.reporter.emit(Note(text=text, level="warning"))
        return
    if disks:
        count = "1 kept disk costs" if len(disks) == 1 else f"{len(disks)} kept disks cost"
        usd = sum(disk.price_usd_per_month for disk in disks)
        text = f"{count} {dollars_text(usd)} a month; labctl course up restores the results"
        staff.reporter.emit(Note(text=add_next(text, GIVE_UP), level="warning"))


def _remove_saved_disks(
    course: LabContext, ended: Sequence[LabContext], leftover_resources: Sequence[Resource]
) -> None:
    """Remove kept disks whose results have all been saved."""
    with_saved = {
        context.lab_id: context
        for context in ended
        if context.state.list_events(lab_id=context.lab_id, kind=kept_disks.SAVED, limit=1)
    }
    disks = [disk for disk in leftover_resources if disk.expires_at and disk.lab_id in with_saved]
    end_server.remove_resources(
        course, [disk for disk in disks if kept_disks.is_saved(with_saved[disk.lab_id], disk)]
    )


def _remove_shared(course: LabContext, leftover_resources: Sequence[Resource]) -> None:
    """Remove what the course's servers shared at the provider, once none is left."""
    shared = [resource for resource in leftover_resources if resource.lab_id == course.group]
    end_server.remove_resources(
        course, [resource for resource in shared if resource.expires_at is None]
    )


def _describe_ending(
    by_lab: dict[str, Seat],
    servers: dict[str, Server],
    outcome: fleet.LabOutcome[SavedSeat],
    unended: dict[str, LabError],
    with_kept_disk: set[str],
) -> SeatEnding:
    seat = by_lab[outcome.context.lab_id]
    error = outcome.error or unended.get(seat.lab_id)
    return SeatEnding(
        seat=seat.name,
        students=seat.students,
        server_id=servers[seat.lab_id].id,
        saved=outcome.value or SavedSeat(),
        ended=error is None,
        failure=SeatFailure(
            outcome.context.subject, error, _ending_hint(seat, outcome, with_kept_disk)
        )
        if error
        else None,
    )


def _ending_hint(
    seat: Seat, outcome: fleet.LabOutcome[SavedSeat], with_kept_disk: set[str]
) -> Text:
    if isinstance(outcome.error, UnsavedHomeError):
        return outcome.error.next_step
    if seat.lab_id in with_kept_disk and not seat.students:
        return GIVE_UP
    if seat.lab_id in with_kept_disk:
        return lambda subject: f"{subject.up}   # restores the disk\n{GIVE_UP}"
    if outcome.error:
        return _render_discard_hint
    return lambda subject: subject.down


def _render_discard_hint(subject: Subject) -> str:
    return f"{subject.down}\n{subject.down} --discard   # deletes unsaved results"


class EndProof(Value, frozen=True):
    """The result of ending a course. `collected` describes the collection of each assignment."""

    endings: tuple[SeatEnding, ...]
    left: tuple[ProviderLeftovers, ...]
    collected: dict[str, str] = msgspec.field(default_factory=dict)
    revoked_keys: int = 0
    at: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether every server has ended and no provider shows anything that bills."""
        return all(ending.ended for ending in self.endings) and not any(
            provider.has_costs for provider in self.left
        )

    def as_json(self) -> dict[str, object]:
        """Return the fields for --json."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return fields | {"endings": [ending.as_json() for ending in self.endings]}


# Collects and verifies an assignment's submissions; returns a description.
Collect = Callable[[str], str]
# Revokes every key to the course's keeper; returns how many there were.
Revoke = Callable[[], int]


def end_of_term(
    staff: CourseOperator,
    *,
    collect: Collect,
    revoke: Revoke,
    access: AccessCount = NO_ACCESS,
    discard: bool = False,
) -> EndProof:
    """Collect, save, end and revoke, then list what is left at the providers in every region.

    One consent, before the first step, names all of them; `access` is what `revoke` would remove.
    Every step is tried even if another fails; the proof says what failed. Safe to repeat.
    """
    end_consent.require_term_consent(staff, access, discard=discard)
    collected = {}
    for name in staff.folder.config.assignments:
        staff.reporter.emit(Step(name=f"collecting {name}"))
        try:
            collected[name] = collect(name)
        except LabError as error:
            collected[name] = f"not collected: {error.what}"
        staff.reporter.emit(Step(name=f"collecting {name}", done=True))
    _end_grading(staff)
    seats = staff.folder.list_seats(active_only=False, former=True)
    endings = end_seats(staff, seats, discard=discard, agreed=True)
    _release_class_hours(staff)
    ended = all(ending.ended for ending in endings)
    if ended:
        step = Step(name="removing leftovers of ended servers")
        staff.reporter.emit(step)
        _remove_everywhere(staff)
        staff.reporter.emit(Step(name=step.name, done=True))
    revoked = revoke() if ended else 0
    remaining = list_leftovers(staff)
    proof = EndProof(
        endings=tuple(endings),
        left=tuple(remaining),
        collected=collected,
        revoked_keys=revoked,
        at=time.time(),
    )
    if proof.is_clean:
        # No server is left that accepts this key.
        shutil.rmtree(staff.paths.keys_dir / staff.folder.id, ignore_errors=True)
    return proof


def _release_class_hours(staff: CourseOperator) -> None:
    """End the class hours that Slurm has reserved: a keeper keeps them for the next class."""
    provider = staff.course().provider
    if not isinstance(provider, SharedSeats):
        return
    try:
        provider.upkeep.correct_hours(release=True)
    except LabError as error:  # for example, another command changes Slurm now
        text = f"class hours may still be reserved in Slurm: {error.what}"
        staff.reporter.emit(Note(text=text, level="warning"))


def _remove_everywhere(staff: CourseOperator) -> None:
    """Remove at every provider what the course left: at all of them at once, from one list each."""
    contexts = build_provider_contexts(staff)
    with ThreadPoolExecutor(len(contexts)) as threads:
        list(threads.map(partial(_remove_at_provider, staff), contexts))


def _remove_at_provider(staff: CourseOperator, context: LabContext) -> None:
    """End the course's own servers; remove its images, caches, and free parts of ended servers.

    A failure is only a warning here: the final listing shows what is left.
    """
    own = list_own_lab_ids(staff)
    try:
        listed = context.provider.servers()
        servers = [server for server in listed if server.lab_id in own]
        if servers:
            staff.reporter.emit(Step(name="ending leftovers of a check, a bake or a grading"))
            end_server.end(context, servers)
        if context.group and machine_images.can_make_images(context.provider):
            bake.drop_images(staff)
        resources = context.provider.leftovers()
        if context.group:
            _remove_shared(context, resources)
        _remove_caches(context, resources)
        up = {server.lab_id for server in listed if server.state not in ENDED} - own
        remove_timers(context, list_lab_ids(staff) - {staff.folder.id} - up, resources)
    except LabError as error:
        text = ": ".join(filter(None, [error.what, error.why]))
        staff.reporter.emit(Note(text=text, level="warning"))


def _remove_caches(course: LabContext, leftover_resources: Sequence[Resource]) -> None:
    """Remove caches that only the course's servers could use again; they take disk space."""
    caches = [resource for resource in leftover_resources if resource.kind == leftovers.CACHE]
    end_server.remove_resources(
        course, [cache for cache in caches if cache.lab and cache.lab == course.owner]
    )


def _end_grading(staff: CourseOperator) -> None:
    """End the grading server that an interrupted or earlier grading left."""
    try:
        end_forgotten(staff)
    except LabError as error:
        text = f"the grading server has not ended: {error.what}"
        staff.reporter.emit(Note(text=text, level="warning"))
