"""The class-day check: what would go wrong at ten o'clock, with the exact next step for each.

Nothing is changed and nothing costs, but for `boot`, which makes one server, measures it, and ends
it again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from labctl.actions import attempts, images, provision, removal
from labctl.actions.courses.ground import own_ground
from labctl.actions.courses.keys import DEFAULT_FILE, Keys
from labctl.actions.courses.seated import SeatReporter
from labctl.actions.courses.servers import ENDED, Staff, agreed
from labctl.actions.courses.together import ask_all
from labctl.actions.everywhere import Answer, door
from labctl.actions.ground import Ground
from labctl.courses.folder import Seat
from labctl.errors import LabError, NoOfferError
from labctl.model import GIB, Check, Offer, Server
from labctl.providers import Quotas

LEAST_FREE_BYTES = 5 * GIB
NAMED = 5
_LOOK = (
    'df -Pk "$HOME" | awk \'NR==2 {print "free_kb", $4}\'; '
    "PATH=$PATH:/usr/sbin; sudo -n sshd -T 2>/dev/null | grep -i '^maxstartups'; true"
)


def check(staff: Staff, seats: Sequence[Seat], *, boot: bool = False) -> list[Check]:
    """Everything that a class needs, one Check each; with `boot` a boot is measured too."""
    course = staff.course()
    try:
        listed = course.provider.servers()
    except LabError as error:
        return [_failed("provider", error)]
    found = [_for_students(staff, one) for one in _of_provider(course)]
    found += _of_class(course, seats, listed)
    found += _keys(staff, seats)
    found += _servers(staff, seats, listed)
    found += _image(staff)
    if boot:
        found.append(_boot(staff, staff.course(plain=True)))
    return found


def _failed(name: str, error: LabError) -> Check:
    said = ": ".join(filter(None, [error.what, error.why.replace("\n", "; ")]))
    return Check(name=name, ok=False, detail=said, next=error.hint)


def _of_provider(course: Ground) -> list[Check]:
    """What `labctl doctor` asks of the provider, quotas aside: they are the class's here."""
    checks = course.provider.check(course.config.server.need)
    quotas = isinstance(course.provider, Quotas)
    return [one for one in checks if not (quotas and one.name.startswith("quota"))]


def _for_students(staff: Staff, one: Check) -> Check:
    """What is a mere advantage elsewhere: the keeper hands out no server that costs something and
    that nothing at its provider would end."""
    config = staff.folder.config
    owned = config.keeper is not None and config.shared is None
    if not (owned and one.ok and one.next and one.name.startswith("deadline")):
        return one
    detail = f"{one.detail}; without it the keeper gives students no server"
    return msgspec.structs.replace(one, ok=False, detail=detail)


def _of_class(course: Ground, seats: Sequence[Seat], listed: Sequence[Server]) -> list[Check]:
    """Offers, prices and quotas for all that have no server yet."""
    there = {one.lab_id for one in listed if one.state not in ENDED}
    missing = [seat for seat in seats if seat.lab_id not in there]
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
    return [_price(course, fitting[0], len(missing)), *_room(course, fitting[0], len(missing))]


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


def _room(course: Ground, offer: Offer, count: int) -> list[Check]:
    provider = course.provider
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


def _keys(staff: Staff, seats: Sequence[Seat]) -> list[Check]:
    """Who has joined: whose key the keeper on this machine lets in."""
    if staff.folder.config.keeper is None:
        return []
    everybody = [student for seat in seats for student in seat.students]
    joined = {one.student for one in staff.folder.ledger.entries(kind="joined")}
    joined |= set(Keys(staff.folder, Path(DEFAULT_FILE)).students())
    missing = [one for one in everybody if one not in joined]
    detail = f"{len(everybody) - len(missing)} of {len(everybody)} students have joined"
    if missing:
        detail += f"; not yet: {_some(missing)}"
    return [
        Check(
            name="students' keys",
            ok=not missing,
            detail=detail,
            next="labctl course invite --all   # then hand out the files" if missing else "",
        )
    ]


def _servers(staff: Staff, seats: Sequence[Seat], listed: Sequence[Server]) -> list[Check]:
    """A login on every server that is on record here, and what it finds there."""
    recorded = {one.lab_id: one for one in staff.state.servers() if one.state not in ENDED}
    shown = {one.id for one in listed}
    found = [
        (seat, recorded[seat.lab_id])
        for seat in seats
        if seat.lab_id in recorded and recorded[seat.lab_id].id in shown
    ]
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


def _image(staff: Staff) -> list[Check]:
    """Whether 60 servers will pull the same image at ten o'clock."""
    image = staff.folder.config.lab.image
    if image.build:
        said = "each server builds it: a class waits for its first run"
        mend = "push it to a registry and name it in course.yaml, then labctl course bake"
        return [Check(name="image", ok=False, detail=said, next=mend)]
    if (
        image.reference
        and "@sha256:" not in image.reference
        and image.reference.endswith(":latest")
    ):
        said = f"{image.reference} may be another one tomorrow"
        return [Check(name="image", ok=False, detail=said, next="name a version in course.yaml")]
    return [Check(name="image", ok=True, detail=image.reference or "labctl's own default")]


def _boot(staff: Staff, course: Ground) -> Check:
    """Make one server as a student's is made, tell what took how long, and end it."""
    ground = own_ground(staff.folder, course, "check")
    need = agreed(course, [ground]) or ground.config.server.need
    reporter = SeatReporter(ground.config.name, staff.reporter, agreed=True)
    ground = ground.beside(ground.config, ground.lab_id, reporter=reporter)
    begun = time.monotonic()
    told: list[str] = []

    def took(what: str) -> None:
        told.append(f"{what} after {time.monotonic() - begun:.0f} s")

    try:
        try:
            server = provision.adopt(ground) or attempts.make(
                ground, need or ground.config.server.need
            )
            provision.reach(ground, server)
            took("first login")
            server = provision.make_ready(ground, server)
            took("ready")
            if ground.config.image.reference:
                _pulled(ground, server)
                took("the image there")
        finally:
            _end(ground)
    except LabError as error:
        return _failed("boot", error)
    whole_s = time.monotonic() - begun
    return _as_prewarm(staff, whole_s, ", ".join(told))


def _pulled(ground: Ground, server: Server) -> None:
    wanted = ground.config.image.reference
    images.ensure(ground, server, ground.remote(server), wanted)


def _end(ground: Ground) -> None:
    server = ground.state.server_of_lab(ground.lab_id)
    if server is not None:
        removal.end(ground, [server])


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
