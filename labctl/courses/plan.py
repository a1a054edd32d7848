"""The plan of a course: what it will create and cost. The last plan shown is remembered."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from labctl.config import CourseConfig
from labctl.config.identity import write_private
from labctl.courses.class_cluster import ClassCluster, list_cluster_machines
from labctl.courses.context import BakedImage, find_baked_image
from labctl.courses.graded_parts import check_parts, describe_parts, list_part_cautions
from labctl.courses.records import plan_changes, timetable
from labctl.courses.records.cost_report import CourseCosts, compute_course_costs
from labctl.courses.records.folder import Seat
from labctl.courses.records.ledger_servers import read_servers
from labctl.courses.records.plan_changes import KeyChange, PlanSnapshot
from labctl.courses.servers import ENDED, CourseOperator
from labctl.courses.starters import StarterSummary, summarize_starters
from labctl.decoding import decode_json
from labctl.errors import LabError
from labctl.errors.replies import describe_error
from labctl.errors.subject import COURSE
from labctl.model import Offer, Value
from labctl.providers import Provider, QuotaRoom
from labctl.servers import machine_images, quotas
from labctl.servers.offers import filter_by_type
from labctl.text import duration_text, price_text

PLAN_FILE = "plan.json"
HOUR_S, WEEK_S = 3600.0, 7 * 86_400.0


class QuotaNeed(Value, frozen=True):
    """An account's quota, and whether it is enough for `servers` at once.

    `request` is the text to send to the provider, "" if the quota suffices.
    """

    market: str
    room: QuotaRoom
    servers: int
    enough: bool
    request: str = ""


class CoursePlan(Value, frozen=True):
    """What a course will create and cost. Dollars are None if they are unknown.

    `servers` is the number of servers up at once. `once_at_most_usd` is the cost of every seat's
    server for its whole ttl, or to the end of its budget. `queue` is what Slurm gives each account,
    and `machines` are those of its cluster, the controller first. `image` is the baked machine
    image; without one, `image_at_most_usd` is what one with the course's Docker image and data
    would cost per month, if the course has any of them.
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
    starters: tuple[StarterSummary, ...] = ()
    assignments: tuple[str, ...] = ()
    grading: tuple[str, ...] = ()
    queue: str = ""
    machines: tuple[str, ...] = ()
    image: BakedImage | None = None
    image_at_most_usd: float | None = None


def compute_plan(staff: CourseOperator, *, offline: bool = False) -> CoursePlan:
    """Compute the plan. Nothing is created or changed; `offline` sends no request.

    `problem` says if the provider does not answer, or has nothing that fits. ConfigError if an
    assignment has files that cannot be handed out, or points that do not add up.
    """
    folder, at = staff.folder, time.time()
    course = staff.course(plain=True)
    machines = list_cluster_machines(folder.config, course.provider)
    starters = summarize_starters(folder, staff.paths, offline=offline)
    config, seats = folder.config, folder.list_seats()
    parts = check_parts(config)
    before = load_plan_snapshot(staff)
    names = [seat.name for seat in seats]
    running = _running_seats(staff)
    costs = compute_course_costs(
        config, folder.list_students(active_only=False), folder.ledger.list_entries(), at
    )
    shared = config.shared
    unpriced = CoursePlan(
        course=config.name,
        first=before is None,
        changes=tuple(plan_changes.list_changes(before.keys if before else {}, _read_keys(config))),
        seats=len(seats),
        students=sum(len(seat.students) for seat in seats),
        new_seats=tuple(name for name in names if before and name not in before.seats),
        gone_seats=tuple(name for name in before.seats if name not in names) if before else (),
        running=tuple(name for name in names if name in running),
        to_make=tuple(name for name in names if name not in running),
        to_end=tuple(sorted(running - set(names))),
        servers=len(machines) or (shared.count_servers(len(seats)) if shared else len(seats)),
        machines=machines,
        accounts_per_server=shared.count_accounts(len(seats)) if shared else 0,
        queue=plan_changes.describe_queue(config),
        limits=plan_changes.describe_server_limits(config),
        cautions=(*_list_cautions(staff, at, starters), *list_part_cautions(config, parts)),
        costs=costs,
        image=find_baked_image(folder),
        starters=starters,
        assignments=tuple(plan_changes.describe_assignments(config)),
        grading=tuple(describe_parts(config, parts)),
        class_hours_per_week=_compute_weekly_class_hours(config, at),
    )
    if offline:
        return unpriced
    try:
        if machines:
            # They have no price, and offers would lack those that the course uses already.
            removed = ClassCluster(folder, course, machines).check()
            cautions = (*unpriced.cautions, *map(plan_changes.describe_removed_machine, removed))
            return msgspec.structs.replace(unpriced, cautions=cautions)
        return _add_prices(staff, unpriced, seats, at)
    except LabError as error:
        error.subject = COURSE
        problem = describe_error(error)
        return msgspec.structs.replace(unpriced, problem=problem, problem_next=error.hint)


def load_plan_snapshot(staff: CourseOperator) -> PlanSnapshot | None:
    """Return the plan that was shown last, or None if it is missing or unreadable."""
    try:
        data = (staff.folder.private / PLAN_FILE).read_bytes()
        return decode_json(data, PlanSnapshot)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def store_plan_snapshot(staff: CourseOperator) -> None:
    """Store course.yaml's keys and the seats as the last plan that was shown."""
    folder = staff.folder
    planned = PlanSnapshot(
        at=time.time(),
        by=staff.by,
        keys=_read_keys(folder.config),
        seats=tuple(seat.name for seat in folder.list_seats()),
    )
    write_private(folder.private / PLAN_FILE, msgspec.json.encode(planned) + b"\n")


def _read_keys(config: CourseConfig) -> dict[str, str]:
    return plan_changes.read_keys(config.path.read_bytes())


def _running_seats(staff: CourseOperator) -> set[str]:
    """Return the seats with a server, by the ledger and this machine's records."""
    folder = staff.folder
    current = staff.course(plain=True).provider.name
    seats = {seat for seat, provider in _list_running(staff) if provider in ("", current)}
    by_lab = {seat.lab_id: seat.name for seat in folder.list_seats(active_only=False, former=True)}
    for server in staff.state.list_servers():
        if server.lab_id in by_lab and server.provider == current and server.state not in ENDED:
            seats.add(by_lab[server.lab_id])
    return seats


def _list_running(staff: CourseOperator) -> list[tuple[str, str]]:
    """Return (seat, provider) of each seat's server without an end in the ledger."""
    servers = read_servers(staff.folder.ledger.list_entries()).values()
    return [
        (server.seat, server.provider)
        for server in servers
        if not server.ended and not server.seat.startswith(".")
    ]


def _list_cautions(
    staff: CourseOperator, at: float, starters: Sequence[StarterSummary]
) -> list[str]:
    own_images = [starter.assignment for starter in starters if starter.has_image]
    cautions = plan_changes.list_cautions(staff.folder.config, at, own_images)
    return [*_warn_former_servers(staff), *cautions]


def _warn_former_servers(staff: CourseOperator) -> list[str]:
    """Warn of servers at a provider that course.yaml no longer names: they still run and cost."""
    current = staff.course(plain=True).provider.name
    counts: dict[str, int] = {}
    for _, provider in _list_running(staff):
        if provider not in ("", current):
            counts[provider] = counts.get(provider, 0) + 1
    return [
        f"{count} still running at {name}, which course.yaml no longer names: "
        f"set `provider: {name}` again until labctl course down has ended them"
        for name, count in counts.items()
    ]


def _compute_weekly_class_hours(config: CourseConfig, now: float) -> float:
    """Return the class hours of one full week of the term, prewarming included."""
    since = now
    if config.term is not None:
        zone = config.hours[0].zone if config.hours else "UTC"
        since = max(now, timetable.term_start(config.term, zone))
    return timetable.class_hours(config.hours, None, since, since + WEEK_S)


def _add_prices(
    staff: CourseOperator, plan: CoursePlan, seats: Sequence[Seat], now: float
) -> CoursePlan:
    """Return the plan with the provider's present offers and quotas, and the costs they imply."""
    config = staff.folder.config
    course = staff.course(plain=True)  # whole servers, even if seats are accounts on them
    need = config.lab.server.need
    offers = filter_by_type(course.provider.offers(need), need)
    most = need.max_price_usd_per_hour
    fitting = [offer for offer in offers if most is None or offer.price_usd_per_hour <= most]
    if not fitting:
        least_usd = offers[0].price_usd_per_hour if offers else None
        cheapest = "" if least_usd is None else f"; the cheapest costs {price_text(least_usd)}"
        problem = f"no server costs at most {price_text(most)}" if most else "no server is offered"
        return msgspec.structs.replace(
            plan, problem=problem + cheapest, problem_next=f"edit {config.path}: server.max_price"
        )
    offer = fitting[0]
    price = offer.price_usd_per_hour
    ttl_h = config.per_student.ttl / HOUR_S
    left_usd = {cost.seat: cost.left_usd for cost in plan.costs.seats}
    whole_ttl_usd = ttl_h * price
    seat_usd = [
        whole_ttl_usd
        if left_usd.get(seat.name) is None
        else min(whole_ttl_usd, left_usd[seat.name] or 0.0)
        for seat in seats
    ]
    if plan.accounts_per_server:
        seat_usd = [whole_ttl_usd] * plan.servers
    weekly = plan.class_hours_per_week * plan.servers * price if config.hours else None
    term_usd = None
    if config.hours and config.term:
        until = timetable.term_end(config.term, config.hours[0].zone)
        hours = (
            timetable.class_hours(config.hours, config.term, now, until, config.holidays)
            if until > now
            else 0.0
        )
        term_usd = hours * plan.servers * price
    lab = config.lab
    has_contents = (lab.has_own_image and lab.image.reference) or lab.data
    return msgspec.structs.replace(
        plan,
        image_at_most_usd=machine_images.estimate_usd_per_month(course.provider)
        if has_contents and plan.image is None
        else None,
        offer=offer,
        usd_per_hour=price * plan.servers,
        once_at_most_usd=sum(seat_usd),
        usd_per_week=weekly,
        term_class_usd=term_usd,
        quotas=tuple(_compare_quotas(course.provider, config, fitting, plan.servers)),
    )


def _compare_quotas(
    provider: Provider, config: CourseConfig, offers: Sequence[Offer], servers: int
) -> list[QuotaNeed]:
    """Compare the quota of each market, spot or on demand, with its best offer's need."""
    best = {offer.spot: offer for offer in reversed(offers)}
    needs = []
    for spot, offer in sorted(best.items(), reverse=True):
        room = quotas.read_room(provider, offer)
        if room is None:
            return []
        enough = room.most is not None and room.most >= servers
        needs.append(
            QuotaNeed(
                market="spot" if spot else "on demand",
                room=room,
                servers=servers,
                enough=enough,
                request="" if enough else request_text(config, offer, room, servers),
            )
        )
    return needs


def request_text(config: CourseConfig, offer: Offer, room: QuotaRoom, servers: int) -> str:
    """Return the text of a quota request, to send weeks ahead. It contains no names."""
    units = f"{servers * room.each:g} {room.units}".strip()
    code = f" ({room.code})" if room.code else ""
    now = "" if room.limit is None else f" It allows {room.limit:g} now."
    when = [
        f"{', '.join(slot.days)} {_clock_text(slot.begins)}-{_clock_text(slot.ends)} {slot.zone}"
        for slot in config.hours
    ]
    during = f" The class meets {'; '.join(when)}." if when else ""
    span = f" from {config.term.first} to {config.term.last}" if config.term else ""
    length = duration_text(config.per_student.ttl)
    return (
        f"Please raise the quota {room.quota}{code} to {units}.{now} "
        f"A university course needs {servers} servers of type {offer.type} "
        f"({'spot' if offer.spot else 'on demand'}, {room.each:g} {room.units} each) at the same "
        f"time{span}, each for {length} at most.{during} A watchdog ends all of them automatically."
    )


def _clock_text(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds % 3600 // 60:02}"
