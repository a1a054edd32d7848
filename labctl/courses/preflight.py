"""The check before a class: what would go wrong at ten o'clock, with the next step for each.

It changes nothing and costs nothing, except with `boot`, which creates one server, measures it and
ends it again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from labctl.courses.broadcast import run_on_seats
from labctl.courses.context import build_own_context
from labctl.courses.image_check import NAME as IMAGE
from labctl.courses.image_check import check_image, check_reference, load_image
from labctl.courses.join_codes import list_page_users
from labctl.courses.keeper_check import check_keeper
from labctl.courses.key_check import find_rejected_students
from labctl.courses.keys import DEFAULT_FILE, AuthorizedKeys
from labctl.courses.records.folder import Seat
from labctl.courses.seat_reporter import label_events
from labctl.courses.servers import ENDED, LOSS, LOSS_NEXT, CourseOperator, require_price_consent
from labctl.errors import LabError
from labctl.errors.replies import describe_error
from labctl.errors.subject import COURSE
from labctl.lifecycle import up as server_up
from labctl.model import GIB, Check, Offer, Server
from labctl.servers import adoption, attempts, deadlines, end_server, guard, quotas, reachability
from labctl.servers.context import LabContext
from labctl.servers.fan_out import ServerResult, first_hop
from labctl.servers.offers import filter_by_type
from labctl.text import bytes_text, names_text, price_text

LEAST_FREE_BYTES = 5 * GIB
NAMED = 5
_STATE_SCRIPT = (
    'df -Pk "$HOME" | awk \'NR==2 {print "free_kb", $4}\'; '
    "PATH=$PATH:/usr/sbin; sudo -n sshd -T 2>/dev/null | grep -i '^maxstartups'; true"
)


def check_course(
    staff: CourseOperator,
    seats: Sequence[Seat],
    *,
    boot: bool = False,
    keys_file: Path = Path(DEFAULT_FILE),
) -> list[Check]:
    """Check everything that a class needs; with `boot` measure a server's boot too.

    `keys_file` is the authorized_keys of the account that students log in to.
    """
    course = staff.course()
    try:
        listed = course.provider.servers()
    except LabError as error:
        return [_failed_check("provider", error)]
    checks = _check_provider(course, staff.course(plain=True))
    checks += _check_class(staff, course, seats, listed)
    checks += _check_saving(staff)
    keys = AuthorizedKeys(staff.folder, keys_file)
    checks += _check_keys(staff, seats, keys)
    checks += check_keeper(staff, keys)
    up = _recorded_servers(staff, seats, listed)
    checks += _check_servers(staff, up)
    booted = _check_boot(staff, staff.course(plain=True)) if boot else []
    if not any(check.name == IMAGE for check in booted):
        checks.append(check_image(staff, up))
    return checks + booted


def _failed_check(name: str, error: LabError) -> Check:
    error.subject = COURSE
    message = describe_error(error)
    return Check(name=name, ok=False, detail=message, next=error.hint)


def _check_provider(course: LabContext, plain: LabContext) -> list[Check]:
    """Run the provider's own checks, without its quota check: `_check_room` has the class's."""
    checks = course.provider.check(course.config.server.need)
    has_quotas = quotas.has_quotas(plain.provider)
    return [check for check in checks if not (has_quotas and check.name.startswith("quota"))]


def _check_class(
    staff: CourseOperator, course: LabContext, seats: Sequence[Seat], listed: Sequence[Server]
) -> list[Check]:
    """Check offers, prices and quotas for all seats that have no server yet."""
    lab_ids = {server.lab_id for server in listed if server.state not in ENDED}
    missing = [seat for seat in seats if seat.lab_id not in lab_ids]
    up = [seat for seat in staff.folder.list_seats(active_only=False) if seat.lab_id in lab_ids]
    if not missing:
        return [Check(name="servers", ok=True, detail=f"all {len(seats)} seats have one")]
    need = course.config.server.need
    try:
        offers = filter_by_type(course.provider.offers(need), need)
    except LabError as error:
        return [_failed_check("offers", error)]
    most = need.max_price_usd_per_hour
    fitting = [offer for offer in offers if most is None or offer.price_usd_per_hour <= most]
    if not fitting:
        cheapest = price_text(offers[0].price_usd_per_hour) if offers else ""
        detail = f"no server fits; the cheapest costs {cheapest}" if cheapest else ""
        fix = "raise server.max_price in course.yaml, or lower the requirements under server.gpu"
        return [Check(name="prices", ok=False, detail=detail or "no server is offered", next=fix)]
    return [
        _check_price(course, fitting[0], len(missing)),
        *_check_room(staff, fitting[0], len(missing) + len(up)),
        *_check_deadline(staff, course, fitting[0]),
    ]


def _check_deadline(staff: CourseOperator, course: LabContext, offer: Offer) -> list[Check]:
    """Check that the provider ends servers: students are root there and could stop the rest."""
    config = staff.folder.config
    if config.keeper is None or config.shared is not None or not offer.price_usd_per_hour:
        return []
    lack = deadlines.explain_missing_timer(course.provider)
    good = f"{course.provider.name} ends each server by itself at its deadline"
    fix = "set that up, or use shared servers: `shared:` in course.yaml"
    bad = f"the keeper gives students no server, since {lack}"
    return [
        Check(
            name="end of servers",
            ok=not lack,
            detail=bad if lack else good,
            next=fix if lack else "",
        )
    ]


def _check_saving(staff: CourseOperator) -> list[Check]:
    """Check that results are saved when a server's time or budget runs out."""
    if not guard.can_lose_results(staff.course(plain=True)):
        return []
    return [Check(name="saving results", ok=False, detail=LOSS, next=LOSS_NEXT)]


def _count_servers(offer: Offer, count: int) -> str:
    return f"one {offer.type}" if count == 1 else f"{count} x {offer.type}"


def _check_price(course: LabContext, offer: Offer, count: int) -> Check:
    need, price = course.config.server.need, offer.price_usd_per_hour
    total = f": {price_text(count * price)} together" if count > 1 else ""
    detail = _count_servers(offer, count)
    detail += f" at {price_text(price)}{total}" if price else ", free"
    if offer.spot and offer.week_high_usd_per_hour:
        each = " each" if count > 1 else ""
        highest = price_text(offer.week_high_usd_per_hour)
        detail += f" (spot; up to {highest}{each} within a week)"
    short = need.budget_usd is not None and price > need.budget_usd
    return Check(
        name="prices",
        ok=not short,
        detail=detail + ("; an hour costs more than a seat's whole budget" if short else ""),
        next="raise per_student.budget in course.yaml" if short else "",
    )


def _check_room(staff: CourseOperator, offer: Offer, count: int) -> list[Check]:
    """Check the quota for this many seats, those that are up included: it counts them too."""
    shared = staff.folder.config.shared
    count = shared.count_servers(count) if shared else count
    provider = staff.course(
        plain=True
    ).provider  # whole servers, even if seats are accounts on them
    try:
        room = quotas.read_room(provider, offer)
    except LabError as error:
        return [_failed_check("quota", error)]
    if room is None:
        return []
    if room.most is None:
        detail = f"{room.quota} is unknown; {count * room.each:g} {room.units} are needed"
        return [Check(name="quota", ok=False, detail=detail, next=room.next)]
    verb = "needs" if count == 1 else "need"
    needs = f"{_count_servers(offer, count)} {verb} {count * room.each:g} {room.units}"
    detail = f"{needs}, {room.limit or 0:g} are allowed ({room.quota})"
    ok = room.most >= count
    return [Check(name="quota", ok=ok, detail=detail, next="" if ok else room.next)]


def _check_keys(staff: CourseOperator, seats: Sequence[Seat], keys: AuthorizedKeys) -> list[Check]:
    """Check who has joined, and on the keeper's machine that its sshd accepts each key."""
    if staff.folder.config.keeper is None:
        return []
    local = set(keys.list_students())
    # Only the keeper's machine has the keys: elsewhere the ledger has to do.
    joined = local or {entry.student for entry in staff.folder.ledger.list_entries(kind="joined")}
    joined = {*joined, *list_page_users(staff.folder)}
    everybody = [student for seat in seats for student in seat.students]
    missing = [student for student in everybody if student not in joined]
    detail = f"{len(everybody) - len(missing)} of {len(everybody)} students have joined"
    if joined and not local:
        detail += " (keys can only be tried on the keeper's machine)"
    if missing:
        detail += f"; not yet: {names_text(missing, NAMED)}"
    names = "--all" if len(missing) > NAMED else " ".join(missing)
    fix = f"labctl course invite {names}   # then send out the files; earlier files stop working"
    joined_check = Check(
        name="students' keys", ok=not missing, detail=detail, next=fix if missing else ""
    )
    return [
        joined_check,
        *_check_sshd(staff, keys, [student for student in everybody if student in local]),
    ]


def _check_sshd(
    staff: CourseOperator, keys: AuthorizedKeys, students: Sequence[str]
) -> list[Check]:
    """Try each student's key at the keeper's own sshd."""
    if not students:
        return []
    try:
        refused = [
            student for student in find_rejected_students(staff.folder, keys) if student in students
        ]
    except LabError as error:
        return [_failed_check("keeper's sshd", error)]
    detail = f"it accepts {len(students) - len(refused)} of {len(students)} keys"
    if refused:
        detail += f"; rejected: {names_text(refused, NAMED)}"
    again = "sshd -T | grep -i authorizedkeys\n"
    again += f"labctl course invite {' '.join(refused)}   # if these students should have access"
    return [
        Check(name="keeper's sshd", ok=not refused, detail=detail, next=again if refused else "")
    ]


def _recorded_servers(
    staff: CourseOperator, seats: Sequence[Seat], listed: Sequence[Server]
) -> list[tuple[Seat, Server]]:
    """Return the seats' servers that are on record here and that the provider shows."""
    recorded = {
        server.lab_id: server for server in staff.state.list_servers() if server.state not in ENDED
    }
    listed_ids = {server.id for server in listed}
    return [
        (seat, recorded[seat.lab_id])
        for seat in seats
        if seat.lab_id in recorded and recorded[seat.lab_id].id in listed_ids
    ]


def _check_servers(staff: CourseOperator, pairs: Sequence[tuple[Seat, Server]]) -> list[Check]:
    """Log in to each of these servers, and check what the login finds."""
    if not pairs:
        return []
    answers = run_on_seats(staff, pairs, _STATE_SCRIPT)
    return [_check_logins(answers), *_check_disks(staff, answers), *_check_startups(pairs, answers)]


def _check_logins(answers: Sequence[ServerResult]) -> Check:
    lost = [answer for answer in answers if answer.code is None]
    detail = f"{len(answers) - len(lost)} of {len(answers)} servers accept a login"
    if lost:
        names = [f"{answer.alias} ({answer.error})" for answer in lost]
        detail += f"; not {names_text(names, NAMED)}"
    again = f"labctl course up --only {','.join(answer.alias for answer in lost)}"
    return Check(name="logins", ok=not lost, detail=detail, next=again if lost else "")


def _check_disks(staff: CourseOperator, answers: Sequence[ServerResult]) -> list[Check]:
    free = {
        answer.alias: int(kib) * 1024 for answer in answers if (kib := _word(answer, "free_kb"))
    }
    if not free:
        return []
    least = max(LEAST_FREE_BYTES, staff.folder.config.per_student.disk)
    short = {name: size for name, size in free.items() if size < least}
    name, size = min(free.items(), key=lambda item: item[1])
    detail = f"the fullest, {name}, has {bytes_text(size)} free; {bytes_text(least)} is needed"
    ask = f"labctl course ssh {name} -- du -xh --max-depth=2"
    return [Check(name="disks", ok=not short, detail=detail, next=ask if short else "")]


def _check_startups(
    pairs: Sequence[tuple[Seat, Server]], answers: Sequence[ServerResult]
) -> list[Check]:
    """Check that one sshd accepts all of its seats' logins at once."""
    limits_by_hop: dict[str, list[str]] = {}
    for (_, server), answer in zip(pairs, answers, strict=True):
        limits_by_hop.setdefault(first_hop(server.endpoint), []).append(
            _word(answer, "maxstartups")
        )
    checks = []
    for name, limits in limits_by_hop.items():
        limit = next(filter(None, limits), "")
        seats = len(limits)
        if seats < 2 or not limit:
            continue
        begin = int(limit.split(":")[0])
        ok = begin > seats
        checks.append(
            Check(
                name=f"sshd of {name}",
                ok=ok,
                detail=f"{seats} seats; beyond {begin} simultaneous logins some are dropped",
                next=""
                if ok
                else f"on that machine: MaxStartups {2 * seats}:30:{4 * seats} "
                "in sshd_config, then reload sshd",
            )
        )
    return checks


def _word(answer: ServerResult, key: str) -> str:
    for line in answer.stdout.splitlines():
        name, _, value = line.partition(" ")
        if name.lower() == key and value:
            return value.strip()
    return ""


def _check_boot(staff: CourseOperator, course: LabContext) -> list[Check]:
    """Create one server like a student's, measure how long each step takes, and end it."""
    context = build_own_context(staff.folder, course, "check")
    need = require_price_consent(course, [context]) or context.config.server.need
    context = label_events(context, context.config.name, agreed=True)
    started_at = time.monotonic()
    times: list[str] = []
    images: list[Check] = []

    def record(step: str) -> None:
        times.append(f"{step} after {time.monotonic() - started_at:.0f} s")

    try:
        try:
            server = adoption.adopt(context) or attempts.create_server(
                context, need or context.config.server.need
            )
            reachability.wait_until_reachable(context, server)
            record("first login")
            server = server_up.make_ready(context, server)
            record("ready")
            if check_reference(staff) is None:
                images.append(load_image(context, server, "the test server"))
                record("image loaded" if images[0].ok else "no image")
            total_s = time.monotonic() - started_at
        finally:
            _end_test_server(context)
    except LabError as error:
        return [*images, _failed_check("boot", error)]
    return [*images, _check_prewarm(staff, total_s, ", ".join(times))]


def _end_test_server(context: LabContext) -> None:
    server = context.state.get_lab_server(context.lab_id)
    if server is not None:
        end_server.end(context, [server])


def _check_prewarm(staff: CourseOperator, took_s: float, detail: str) -> Check:
    """Check that class hours create servers early enough."""
    hours = staff.folder.config.hours
    shortest = min((slot.prewarm for slot in hours), default=0)
    ok = not hours or took_s <= shortest
    return Check(
        name="boot",
        ok=ok,
        detail=detail,
        next="" if ok else f"prewarm: {int(took_s // 60) + 5}m under hours in course.yaml",
    )
