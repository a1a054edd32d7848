"""The class-day check: what would go wrong at ten o'clock, with the exact next step for each.

Nothing is changed and nothing costs, but for `boot`, which makes one server, measures it, and ends
it again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from labctl.courses.broadcast import ask_all
from labctl.courses.context import own_ground
from labctl.courses.image_check import NAME as IMAGE
from labctl.courses.image_check import check_image, judge_name, load_image
from labctl.courses.keeper_check import check_keeper
from labctl.courses.key_check import not_let_in
from labctl.courses.keys import DEFAULT_FILE, Keys
from labctl.courses.records.folder import Seat
from labctl.courses.seat_operations import no_deadline
from labctl.courses.seat_reporter import SeatReporter
from labctl.courses.servers import ENDED, LOSS, LOSS_NEXT, Staff, agreed
from labctl.errors import LabError, NoOfferError
from labctl.lifecycle import up as server_up
from labctl.model import GIB, Check, Offer, Server
from labctl.providers import Quotas
from labctl.servers import adoption, attempts, end_server, guard, reachability
from labctl.servers.context import Ground
from labctl.servers.fan_out import Answer, door

LEAST_FREE_BYTES = 5 * GIB
NAMED = 5
_LOOK = (
    'df -Pk "$HOME" | awk \'NR==2 {print "free_kb", $4}\'; '
    "PATH=$PATH:/usr/sbin; sudo -n sshd -T 2>/dev/null | grep -i '^maxstartups'; true"
)


def check(
    staff: Staff,
    seats: Sequence[Seat],
    *,
    boot: bool = False,
    keys_file: Path = Path(DEFAULT_FILE),
) -> list[Check]:
    """Everything that a class needs, one Check each; with `boot` a boot is measured too.

    `keys_file` is the authorized_keys of the account that students log in to.
    """
    course = staff.course()
    try:
        listed = course.provider.servers()
    except LabError as error:
        return [_failed("provider", error)]
    found = _of_provider(course, staff.course(plain=True))
    found += _of_class(staff, course, seats, listed)
    found += _results(staff)
    keys = Keys(staff.folder, keys_file)
    found += _keys(staff, seats, keys)
    found += check_keeper(staff, keys)
    up = _recorded(staff, seats, listed)
    found += _servers(staff, up)
    booted = _boot(staff, staff.course(plain=True)) if boot else []
    if not any(one.name == IMAGE for one in booted):
        found.append(check_image(staff, up))
    return found + booted


def _failed(name: str, error: LabError) -> Check:
    said = ": ".join(filter(None, [error.what, error.why.replace("\n", "; ")]))
    return Check(name=name, ok=False, detail=said, next=error.hint)


def _of_provider(course: Ground, plain: Ground) -> list[Check]:
    """What `labctl doctor` asks of the provider, quotas aside: they are the class's here."""
    checks = course.provider.check(course.config.server.need)
    quotas = isinstance(plain.provider, Quotas)
    return [one for one in checks if not (quotas and one.name.startswith("quota"))]


def _of_class(
    staff: Staff, course: Ground, seats: Sequence[Seat], listed: Sequence[Server]
) -> list[Check]:
    """Offers, prices and quotas for all that have no server yet."""
    there = {one.lab_id for one in listed if one.state not in ENDED}
    missing = [seat for seat in seats if seat.lab_id not in there]
    up = [one for one in staff.folder.seats(active_only=False) if one.lab_id in there]
    if not missing:
        return [Check(name="servers", ok=True, detail=f"all {len(seats)} seats have one")]
    need = course.config.server.need
    try:
        offers = course.provider.offers(need)
    except NoOfferError as error:
        return [_failed("offers", error)]
    except LabError as error:
        return [_failed("offers", error)]
    most = need.max_price_usd_per_hour
    fitting = [one for one in offers if most is None or one.price_usd_per_hour <= most]
    if not fitting:
        detail = f"nothing fits; the cheapest costs {offers[0].price_usd_per_hour:.2f} an hour" * (
            bool(offers)
        )
        said = "raise server.max_price in course.yaml, or ask for less under server.gpu"
        return [Check(name="prices", ok=False, detail=detail or "nothing is offered", next=said)]
    return [
        _price(course, fitting[0], len(missing)),
        *_room(staff, fitting[0], len(missing) + len(up)),
        *_deadline(staff, course, fitting[0]),
    ]


def _deadline(staff: Staff, course: Ground, offer: Offer) -> list[Check]:
    """Whether the keeper may hand servers out: students are root there, and could stop all else."""
    config = staff.folder.config
    if config.keeper is None or config.shared is not None or not offer.price_usd_per_hour:
        return []
    lack = no_deadline(course.provider)
    after = f"{course.provider.name} ends each server by itself at its time"
    mend = "set that up, or give accounts on shared servers: `shared:` in course.yaml"
    said = f"the keeper gives students no server: {lack}"
    return [
        Check(
            name="end of servers",
            ok=not lack,
            detail=said if lack else after,
            next=mend if lack else "",
        )
    ]


def _results(staff: Staff) -> list[Check]:
    """Whether anybody saves what is on a server when its time or budget is over."""
    if not guard.can_lose_results(staff.course(plain=True)):
        return []
    return [Check(name="saving results", ok=False, detail=LOSS, next=LOSS_NEXT)]


def _price(course: Ground, offer: Offer, count: int) -> Check:
    need, price = course.config.server.need, offer.price_usd_per_hour
    detail = f"{count} x {offer.type} at {price:.2f}: {count * price:.2f} dollars an hour"
    if offer.spot and offer.week_high_usd_per_hour:
        detail += f" (spot; up to {offer.week_high_usd_per_hour:.2f} each within a week)"
    short = need.budget_usd is not None and price > need.budget_usd
    return Check(
        name="prices",
        ok=not short,
        detail=detail + ("; an hour costs more than a seat's whole budget" if short else ""),
        next="raise per_student.budget in course.yaml" if short else "",
    )


def _room(staff: Staff, offer: Offer, count: int) -> list[Check]:
    """Quota for so many seats, those that are up included: it counts them too."""
    shared = staff.folder.config.shared
    count = -(-count // shared.accounts_per_server) if shared else count
    provider = staff.course(plain=True).provider  # whole servers, also where accounts are on them
    if not isinstance(provider, Quotas):
        return []
    try:
        room = provider.room(offer)
    except LabError as error:
        return [_failed("quota", error)]
    if room.most is None:
        detail = f"{room.quota} is not told; {count * room.each:g} {room.units} are needed"
        return [Check(name="quota", ok=False, detail=detail, next=room.next)]
    needs = f"{count} x {offer.type} need {count * room.each:g} {room.units}"
    detail = f"{needs}, {room.limit or 0:g} are allowed ({room.quota})"
    ok = room.most >= count
    return [Check(name="quota", ok=ok, detail=detail, next="" if ok else room.next)]


def _keys(staff: Staff, seats: Sequence[Seat], keys: Keys) -> list[Check]:
    """Who has joined, and on the keeper's machine whether its sshd takes the key of each."""
    if staff.folder.config.keeper is None:
        return []
    here = set(keys.students())
    # Elsewhere nobody knows the keys: what the keeper wrote down has to do.
    joined = here or {one.student for one in staff.folder.ledger.entries(kind="joined")}
    everybody = [student for seat in seats for student in seat.students]
    missing = [one for one in everybody if one not in joined]
    detail = f"{len(everybody) - len(missing)} of {len(everybody)} students have joined"
    if joined and not here:
        detail += " (their keys can be tried on the keeper's machine alone)"
    if missing:
        detail += f"; not yet: {_some(missing)}"
    mend = f"labctl course invite {' '.join(missing)}   # then hand out the files"
    found = Check(
        name="students' keys", ok=not missing, detail=detail, next=mend if missing else ""
    )
    return [found, *_tried(staff, keys, [one for one in everybody if one in here])]


def _tried(staff: Staff, keys: Keys, students: Sequence[str]) -> list[Check]:
    """Each key, at the keeper's own sshd, as its student would come with it."""
    if not students:
        return []
    try:
        refused = [one for one in not_let_in(staff.folder, keys) if one in students]
    except LabError as error:
        return [_failed("keeper's sshd", error)]
    detail = f"it takes {len(students) - len(refused)} of {len(students)} keys"
    if refused:
        detail += f"; not those of {_some(refused)}"
    again = f"sshd -T | grep -i authorizedkeys; else labctl course invite {' '.join(refused)}"
    return [
        Check(name="keeper's sshd", ok=not refused, detail=detail, next=again if refused else "")
    ]


def _recorded(
    staff: Staff, seats: Sequence[Seat], listed: Sequence[Server]
) -> list[tuple[Seat, Server]]:
    """The seats' servers that are on record here, and that the provider shows."""
    recorded = {one.lab_id: one for one in staff.state.servers() if one.state not in ENDED}
    shown = {one.id for one in listed}
    return [
        (seat, recorded[seat.lab_id])
        for seat in seats
        if seat.lab_id in recorded and recorded[seat.lab_id].id in shown
    ]


def _servers(staff: Staff, found: Sequence[tuple[Seat, Server]]) -> list[Check]:
    """A login on every one of these, and what it finds there."""
    if not found:
        return []
    answers = ask_all(staff, found, _LOOK)
    return [_logins(answers), *_disks(staff, answers), *_startups(found, answers)]


def _logins(answers: Sequence[Answer]) -> Check:
    lost = [one for one in answers if one.code is None]
    detail = f"{len(answers) - len(lost)} of {len(answers)} servers let us in"
    if lost:
        detail += f"; not {_some([f'{one.alias} ({one.error})' for one in lost])}"
    again = f"labctl course up --only {','.join(one.alias for one in lost)}"
    return Check(name="logins", ok=not lost, detail=detail, next=again if lost else "")


def _disks(staff: Staff, answers: Sequence[Answer]) -> list[Check]:
    free = {one.alias: int(kib) * 1024 for one in answers if (kib := _word(one, "free_kb"))}
    if not free:
        return []
    least = max(LEAST_FREE_BYTES, staff.folder.config.per_student.disk)
    short = {name: size for name, size in free.items() if size < least}
    name, size = min(free.items(), key=lambda one: one[1])
    detail = f"the fullest, {name}, has {size / GIB:.1f} GiB free; {least / GIB:.0f} are wanted"
    ask = f"labctl course ssh {name} -- du -xh --max-depth=2 ~"
    return [Check(name="disks", ok=not short, detail=detail, next=ask if short else "")]


def _startups(found: Sequence[tuple[Seat, Server]], answers: Sequence[Answer]) -> list[Check]:
    """Whether one sshd lets in all who come to it at once."""
    doors: dict[str, list[str]] = {}
    for (_, server), answer in zip(found, answers, strict=True):
        doors.setdefault(door(server.endpoint), []).append(_word(answer, "maxstartups"))
    checks = []
    for name, told in doors.items():
        known = next((one for one in told if one), "")
        if len(told) < 2 or not known:
            continue
        begin = int(known.split(":")[0])
        ok = begin > len(told)
        checks.append(
            Check(
                name=f"sshd of {name}",
                ok=ok,
                detail=f"{len(told)} seats, and beyond {begin} logins at once some are dropped",
                next=""
                if ok
                else f"there: MaxStartups {2 * len(told)}:30:{4 * len(told)} "
                "in sshd_config, then reload sshd",
            )
        )
    return checks


def _word(answer: Answer, key: str) -> str:
    for line in answer.stdout.splitlines():
        name, _, value = line.partition(" ")
        if name.lower() == key and value:
            return value.strip()
    return ""


def _boot(staff: Staff, course: Ground) -> list[Check]:
    """Make one server as a student's is made, tell what took how long, and end it."""
    ground = own_ground(staff.folder, course, "check")
    need = agreed(course, [ground]) or ground.config.server.need
    reporter = SeatReporter(ground.config.name, staff.reporter, agreed=True)
    ground = ground.beside(ground.config, ground.lab_id, reporter=reporter)
    begun = time.monotonic()
    told: list[str] = []
    images: list[Check] = []

    def took(what: str) -> None:
        told.append(f"{what} after {time.monotonic() - begun:.0f} s")

    try:
        try:
            server = adoption.adopt(ground) or attempts.make(
                ground, need or ground.config.server.need
            )
            reachability.reach(ground, server)
            took("first login")
            server = server_up.make_ready(ground, server)
            took("ready")
            if judge_name(staff) is None:
                images.append(load_image(ground, server, "the server that was measured"))
                took("the image there" if images[0].ok else "no image")
            whole_s = time.monotonic() - begun
        finally:
            _end(ground)
    except LabError as error:
        return [*images, _failed("boot", error)]
    return [*images, _as_prewarm(staff, whole_s, ", ".join(told))]


def _end(ground: Ground) -> None:
    server = ground.state.server_of_lab(ground.lab_id)
    if server is not None:
        end_server.end(ground, [server])


def _as_prewarm(staff: Staff, took_s: float, detail: str) -> Check:
    """Whether class hours begin to make servers early enough."""
    hours = staff.folder.config.hours
    shortest = min((one.prewarm for one in hours), default=0)
    ok = not hours or took_s <= shortest
    return Check(
        name="boot",
        ok=ok,
        detail=detail,
        next="" if ok else f"prewarm: {int(took_s // 60) + 5}m under hours in course.yaml",
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
