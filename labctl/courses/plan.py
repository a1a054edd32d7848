"""What the course will make and cost, before anything is made; what was shown is remembered."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from labctl.config import CourseConfig
from labctl.config.identity import write_private
from labctl.config.scalars import duration_text
from labctl.courses.metering import known
from labctl.courses.records import plan_changes, term
from labctl.courses.records.cost_report import CourseCosts, course_costs
from labctl.courses.records.folder import Seat
from labctl.courses.records.plan_changes import KeyChange, Planned
from labctl.courses.servers import ENDED, Staff
from labctl.errors import LabError
from labctl.model import Offer, Value
from labctl.providers import Quotas, Room

PLAN_FILE = "plan.json"
HOUR_S, WEEK_S = 3600.0, 7 * 86_400.0


class QuotaNeed(Value, frozen=True):
    """An account's quota beside what `servers` at once need. `request` is what to send, "" where
    it suffices."""

    market: str
    room: Room
    servers: int
    enough: bool
    request: str = ""


class Plan(Value, frozen=True):
    """Dollars are None where nothing tells. `servers` is how many there will be at once.

    `once_at_most_usd`: every seat's server for its whole ttl, or to the end of its budget.
    """

    course: str
    first: bool
    changes: tuple[KeyChange, ...]
    seats: int
    students: int
    new_seats: tuple[str, ...]
    gone_seats: tuple[str, ...]
    running: tuple[str, ...]
    to_make: tuple[str, ...]
    to_end: tuple[str, ...]
    servers: int
    accounts_per_server: int
    limits: str
    cautions: tuple[str, ...]
    costs: CourseCosts
    offer: Offer | None = None
    usd_per_hour: float | None = None
    once_at_most_usd: float | None = None
    class_hours_per_week: float = 0.0
    usd_per_week: float | None = None
    term_class_usd: float | None = None
    quotas: tuple[QuotaNeed, ...] = ()
    problem: str = ""
    problem_next: str = ""


def plan(staff: Staff, *, offline: bool = False, now: float | None = None) -> Plan:
    """What there is to do. Nothing is made or changed; with `offline` nobody is asked.

    A provider that does not answer, or has nothing that fits, is in `problem`.
    """
    folder, at = staff.folder, time.time() if now is None else now
    config, seats = folder.config, folder.seats()
    before = load(staff)
    names = [one.name for one in seats]
    running = _running(staff)
    costs = course_costs(config, folder.students(active_only=False), folder.ledger.entries(), at)
    shared = config.shared.accounts_per_server if config.shared else 0
    made = Plan(
        course=config.name,
        first=before is None,
        changes=tuple(plan_changes.changes(before.keys if before else {}, _keys(config))),
        seats=len(seats),
        students=sum(len(one.students) for one in seats),
        new_seats=tuple(one for one in names if before and one not in before.seats),
        gone_seats=tuple(one for one in before.seats if one not in names) if before else (),
        running=tuple(one for one in names if one in running),
        to_make=tuple(one for one in names if one not in running),
        to_end=tuple(sorted(running - set(names))),
        servers=-(-len(seats) // shared) if shared else len(seats),
        accounts_per_server=shared,
        limits=plan_changes.limits_text(config),
        cautions=(*_former(staff), *plan_changes.cautions(config, at)),
        costs=costs,
        class_hours_per_week=_weekly(config, at),
    )
    if offline:
        return made
    try:
        return _priced(staff, made, seats, at)
    except LabError as error:
        said = ": ".join(filter(None, [error.what, error.why.replace("\n", "; ")]))
        return msgspec.structs.replace(made, problem=said, problem_next=error.hint)


def load(staff: Staff) -> Planned | None:
    """What was shown last; None where nothing was, or nothing that can be read."""
    try:
        data = (staff.folder.private / PLAN_FILE).read_bytes()
        return msgspec.json.decode(data, type=Planned)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def remember(staff: Staff, now: float | None = None) -> None:
    """Take course.yaml and the seats as they are for what was shown."""
    folder = staff.folder
    shown = Planned(
        at=time.time() if now is None else now,
        by=staff.by,
        keys=_keys(folder.config),
        seats=tuple(one.name for one in folder.seats()),
    )
    write_private(folder.private / PLAN_FILE, msgspec.json.encode(shown) + b"\n")


def _keys(config: CourseConfig) -> dict[str, str]:
    return plan_changes.keys_of(config.path.read_bytes())


def _running(staff: Staff) -> set[str]:
    """Seats with a server, by the ledger and by this machine's record."""
    folder = staff.folder
    now = staff.course(plain=True).provider.name
    found = {seat for seat, provider in _going(staff) if provider in ("", now)}
    by_lab = {one.lab_id: one.name for one in folder.seats(active_only=False, former=True)}
    for server in staff.state.servers():
        if server.lab_id in by_lab and server.provider == now and server.state not in ENDED:
            found.add(by_lab[server.lab_id])
    return found


def _going(staff: Staff) -> list[tuple[str, str]]:
    """(seat, provider) of each server of which the ledger knows no end, the course's own aside."""
    servers = known(staff.folder.ledger.entries()).values()
    return [(o.seat, o.provider) for o in servers if not o.ended and not o.seat.startswith(".")]


def _former(staff: Staff) -> list[str]:
    """Servers at a provider that course.yaml does not name any more: they go on, and cost."""
    now = staff.course(plain=True).provider.name
    counts: dict[str, int] = {}
    for _, provider in _going(staff):
        if provider not in ("", now):
            counts[provider] = counts.get(provider, 0) + 1
    return [
        f"{count} at {name}, which course.yaml names no more, go on: say `provider: {name}` again "
        "until labctl course down has ended them"
        for name, count in counts.items()
    ]


def _weekly(config: CourseConfig, now: float) -> float:
    """Class hours of one whole week of the term, prewarming included."""
    since = now
    if config.term is not None:
        zone = config.hours[0].zone if config.hours else "UTC"
        since = max(now, term.begins_at(config.term, zone))
    return term.class_hours(config.hours, None, since, since + WEEK_S)


def _priced(staff: Staff, made: Plan, seats: Sequence[Seat], now: float) -> Plan:
    """With what the provider says now: offers, quotas, and what follows from them."""
    config = staff.folder.config
    course = staff.course(plain=True)  # whole servers, also where accounts are on them
    need = config.lab.server.need
    offers = course.provider.offers(need)
    most = need.max_price_usd_per_hour
    fitting = [one for one in offers if most is None or one.price_usd_per_hour <= most]
    if not fitting:
        cheapest = f"; the cheapest costs {offers[0].price_usd_per_hour:.2f}" if offers else ""
        said = f"nothing fits under {most:.2f} USD an hour" if most else "nothing is offered"
        return msgspec.structs.replace(
            made, problem=said + cheapest, problem_next=f"edit {config.path}: server.max_price"
        )
    offer = fitting[0]
    price = offer.price_usd_per_hour
    ttl_h = config.per_student.ttl / HOUR_S
    left = {one.seat: one.left_usd for one in made.costs.seats}
    each = [
        ttl_h * price if left.get(s.name) is None else min(ttl_h * price, left[s.name] or 0.0)
        for s in seats
    ]
    if made.accounts_per_server:
        each = [ttl_h * price] * made.servers
    weekly = made.class_hours_per_week * made.servers * price if config.hours else None
    term_usd = None
    if config.hours and config.term:
        until = term.ends_at(config.term, config.hours[0].zone)
        hours = term.class_hours(config.hours, config.term, now, until) if until > now else 0.0
        term_usd = hours * made.servers * price
    return msgspec.structs.replace(
        made,
        offer=offer,
        usd_per_hour=price * made.servers,
        once_at_most_usd=sum(each),
        usd_per_week=weekly,
        term_class_usd=term_usd,
        quotas=tuple(_quotas(course.provider, config, fitting, made.servers)),
    )


def _quotas(
    provider: object, config: CourseConfig, offers: Sequence[Offer], servers: int
) -> list[QuotaNeed]:
    """One for each market that a server may come from: of the best offer there."""
    if not isinstance(provider, Quotas):
        return []
    best = {one.spot: one for one in reversed(offers)}
    found = []
    for spot, offer in sorted(best.items(), reverse=True):
        room = provider.room(offer)
        enough = room.most is not None and room.most >= servers
        found.append(
            QuotaNeed(
                market="spot" if spot else "on demand",
                room=room,
                servers=servers,
                enough=enough,
                request="" if enough else request_text(config, offer, room, servers),
            )
        )
    return found


def request_text(config: CourseConfig, offer: Offer, room: Room, servers: int) -> str:
    """What to send to the provider, weeks ahead. It names the course and nobody of it."""
    units = f"{servers * room.each:g} {room.units}".strip()
    code = f" ({room.code})" if room.code else ""
    now = "" if room.limit is None else f" It allows {room.limit:g} now."
    when = [
        f"{', '.join(one.days)} {_clock(one.begins)}-{_clock(one.ends)} {one.zone}"
        for one in config.hours
    ]
    during = f" The class meets {'; '.join(when)}." if when else ""
    span = f" from {config.term.first} to {config.term.last}" if config.term else ""
    length = duration_text(config.per_student.ttl)
    return (
        f"Please raise the quota {room.quota}{code} to {units}.{now} "
        f"A university course needs {servers} servers of type {offer.type} "
        f"({'spot' if offer.spot else 'on demand'}, {room.each:g} {room.units} each) at the same "
        f"time{span}, each for {length} at most.{during} All of them end themselves by a watchdog."
    )


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds % 3600 // 60:02}"
