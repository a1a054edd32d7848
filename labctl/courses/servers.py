"""A course's servers: made together, ended together, what failed told seat by seat.

One seat's failure stops no other, and the same call again mends what failed. Nothing here asks
more than once: a whole class is one question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from labctl.config import Paths
from labctl.courses import metering
from labctl.courses.context import baked, course_ground, seat_grounds
from labctl.courses.material import Material, bring, material
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.ledger import Draft
from labctl.courses.seat_reporter import Done, SeatReporter, stopping
from labctl.errors import InterruptError, LabError, PolicyError
from labctl.events import Decision, Reporter
from labctl.lifecycle import fleet
from labctl.lifecycle import up as server_up
from labctl.model import Need, Offer, Server, Value
from labctl.runs import images
from labctl.servers import adoption, attempts, deadlines, guard, reachability
from labctl.servers.context import Ground
from labctl.servers.held_disks import KEPT_S
from labctl.state import State

AT_ONCE = 32
ENDED = ("ending", "terminated")
LOSS = (
    "unsaved results are lost when a server reaches its time or budget: the course has no keeper "
    "and no store, and the disk is deleted with the server"
)
LOSS_NEXT = "add `keeper:` or `store:` to course.yaml, or server.aws.instance_profile"
LOSS_TYPED = "lose results"


@dataclass(frozen=True)
class Staff:
    """Who works on a course, and with what. `by` and `why` stand in the ledger beside what they do.

    Students read `why` when their server has ended.
    """

    folder: CourseFolder
    paths: Paths
    state: State
    reporter: Reporter
    by: str = ""
    why: str = ""

    def course(self, *, everywhere: bool = False, plain: bool = False) -> Ground:
        """The course's own ground; see `course_ground`."""
        return course_ground(
            self.folder,
            self.paths,
            self.state,
            self.reporter,
            everywhere=everywhere,
            plain=plain,
        )


class SeatOutcome(Value, frozen=True):
    """What came of one seat: its server, or what failed, why, and the next command."""

    seat: str
    students: tuple[str, ...]
    server: Server | None = None
    made: bool = False
    error: str = ""
    why: str = ""
    hint: str = ""


def up(
    staff: Staff,
    seats: Sequence[Seat],
    *,
    login_only: bool = False,
    at_once: int = AT_ONCE,
) -> list[SeatOutcome]:
    """A ready server for each seat, in their order; safe to repeat and to interrupt.

    With `login_only` nothing is prepared there and no watchdog is armed: its first login is enough.
    PolicyError where the price is not agreed to. Every seat's news is a `SeatEvent`.
    """
    course = staff.course()
    listed = course.provider.servers()
    metering.accrue(staff.folder, course, listed)
    grounds = seat_grounds(
        staff.folder, staff.paths, staff.state, staff.reporter, seats, course=course, listed=listed
    )
    there = {one.lab_id: one for one in listed if one.state not in ENDED}
    need = agreed(course, [one for one in grounds if one.lab_id not in there])
    if need is not None:
        _agree_to_lose_results(staff)
    told = [
        _with(ground, SeatReporter(seat.name, staff.reporter, agreed=True), need)
        for ground, seat in zip(grounds, seats, strict=True)
    ]
    by_lab = {seat.lab_id: seat for seat in seats}
    was_baked = baked(staff.folder) is not None
    given = Material() if login_only else material(staff.folder, staff.reporter)

    def one(ground: Ground) -> Server:
        try:
            if login_only:
                return _reached(ground, listed)
            server = server_up.up(ground, listed)
            _bring(ground, server, given, was_baked)
            return server
        finally:
            _note(staff, by_lab[ground.lab_id], ground)

    try:
        outcomes = fleet.each(
            told,
            one,
            at_once=at_once,
            tell=_teller(staff.reporter, by_lab),
            stopping=partial(stopping, staff.reporter),
        )
    except KeyboardInterrupt:
        raise InterruptError(
            "interrupted while servers were being made",
            why="those that were begun exist, and may cost",
            hint="labctl course up goes on, labctl course down ends them",
        ) from None
    _refused(staff, by_lab, outcomes)
    return [_outcome(by_lab[one.ground.lab_id], one, there) for one in outcomes]


def _reached(ground: Ground, listed: Sequence[Server]) -> Server:
    with ground.state.exclusive(ground.lab_id, "course up"):
        need = ground.config.server.need
        server = adoption.adopt(ground, listed) or attempts.make(ground, need)
        server = reachability.reach(ground, server)[0]
        if adoption.is_fresh(ground, server):
            # Somebody may work there from now on: what they leave is to be saved at its end.
            detail = {"login_only": True}
            ground.state.record("ready", lab_id=ground.lab_id, server_id=server.id, detail=detail)
        return server


def _bring(ground: Ground, server: Server, given: Material, baked: bool) -> None:
    """What a class must not wait for at ten o'clock: the image, the data, the handouts."""
    config = ground.config
    if config.image.reference:
        remote = ground.remote(server)
        wanted = config.image.reference
        if not remote.call("image", {"references": [wanted]})["ids"][wanted]:
            images.ensure(ground, server, remote, wanted)
    bring(ground, server, given, baked=baked)


def _note(staff: Staff, seat: Seat, ground: Ground) -> None:
    """Write a new server's beginning into the ledger, whatever became of the rest."""
    server = ground.state.server_of_lab(ground.lab_id)
    if server is None or server.state in ENDED:
        return
    known = metering.known(staff.folder.ledger.entries(seat=seat.name)).get(server.id)
    if known is None or known.ended:
        staff.folder.ledger.append_all([metering.up_line(seat.name, server, staff.by)])


def _refused(
    staff: Staff, by_lab: dict[str, Seat], outcomes: Iterable[fleet.Outcome[Server]]
) -> None:
    staff.folder.ledger.append_all(
        [
            Draft(kind="refused", seat=by_lab[one.ground.lab_id].name, why=one.error.what)
            for one in outcomes
            if isinstance(one.error, PolicyError)
        ]
    )


def agreed(course: Ground, fresh: Sequence[Ground]) -> Need | None:
    """The need of every new server, once a person has agreed to what all of them cost.

    None where none is to be made. What costs more than the agreed price does not exist for it.
    """
    if not fresh:
        return None
    need = course.config.server.need
    offers = course.provider.offers(need)
    ceiling = need.max_price_usd_per_hour
    fitting = [o for o in offers if ceiling is None or o.price_usd_per_hour <= ceiling]
    if not fitting or not fitting[0].price_usd_per_hour:
        return need  # nothing costs, or each seat tells why there is nothing
    offer = fitting[0]
    asked = Decision(
        question=_question(offer, len(fresh)), detail=_plan(fresh, offer), about="price"
    )
    if not course.reporter.ask(asked):
        raise PolicyError(
            "nothing was started", why="the price was not agreed to", hint="labctl course plan"
        )
    attempts.agree_to_no_guard(course, len(fresh) * offer.price_usd_per_hour)
    most = ceiling if ceiling is not None else attempts.agreed_usd_per_hour(offer)
    return msgspec.structs.replace(need, max_price_usd_per_hour=most)


def _agree_to_lose_results(staff: Staff) -> None:
    """PolicyError where nobody saves results at a server's end, and nobody types that they know."""
    if not guard.can_lose_results(staff.course(plain=True)):
        return
    question = f"to start them all the same, type {LOSS_TYPED}"
    asked = Decision(question=question, detail=LOSS, about="results", typed=LOSS_TYPED)
    if not staff.reporter.ask(asked):
        raise PolicyError("nothing was started", why=LOSS, hint=LOSS_NEXT)


def _question(offer: Offer, count: int) -> str:
    market = "spot" if offer.spot else "on demand"
    price = offer.price_usd_per_hour
    servers = f"{count} servers" if count > 1 else "one server"
    each = f", {price:.2f} each" if count > 1 else ""
    return (
        f"start {servers} ({offer.type}, {market}) for {count * price:.2f} dollars an hour{each}?"
    )


def _plan(fresh: Sequence[Ground], offer: Offer) -> str:
    """What ends them, and what all of them cost at most."""
    most = 0.0
    for ground in fresh:
        need = ground.config.server.need
        left = attempts.budget_left_usd(ground, need)
        span_s = deadlines.span_s(need, offer.price_usd_per_hour, left)
        most += float("inf") if span_s is None else span_s / 3600 * offer.price_usd_per_hour
    need = fresh[0].config.server.need
    ttl_s = deadlines.ttl_s(need, offer.price_usd_per_hour)
    ends = [
        f"after {ttl_s / 3600:g} h" if ttl_s else "",
        "at the seat's budget" if need.budget_usd is not None else "",
        f"after {need.idle_s / 60:g} min without work" if need.idle_s else "",
    ]
    said = ", ".join(filter(None, ends))
    lines = [f"each stops itself {said}" if said else "nothing but `labctl course down` ends them"]
    if most < float("inf"):
        lines.append(f"all of them cost {most:.2f} dollars at most, disks and traffic aside")
    if guard.will_keep_disk(fresh[0]):
        days = f"{KEPT_S / 86_400:.0f} days"
        lines.append(f"the disk of one that ends by itself stays for {days}, and costs money")
    return "\n".join(lines)


def _with(ground: Ground, reporter: Reporter, need: Need | None) -> Ground:
    """The seat's ground with its own reporter, and no offer dearer than what was agreed to."""
    config = ground.config
    if need is not None:
        most = need.max_price_usd_per_hour
        own = msgspec.structs.replace(config.server.need, max_price_usd_per_hour=most)
        config = msgspec.structs.replace(
            config, server=msgspec.structs.replace(config.server, need=own)
        )
    return ground.beside(config, ground.lab_id, reporter=reporter)


def _teller(reporter: Reporter, by_lab: dict[str, Seat]) -> Callable[[fleet.Outcome[Server]], None]:
    def tell(one: fleet.Outcome[Server]) -> None:
        error = one.error.what if one.error else ""
        reporter.emit(Done(seat=by_lab[one.ground.lab_id].name, error=error))

    return tell


def _outcome(seat: Seat, one: fleet.Outcome[Server], there: dict[str, Server]) -> SeatOutcome:
    server = one.value or one.ground.state.server_of_lab(seat.lab_id)
    before = there.get(seat.lab_id)
    error = one.error
    return SeatOutcome(
        seat=seat.name,
        students=seat.students,
        server=server,
        made=server is not None and (before is None or before.id != server.id),
        error=of_course(error.what, seat) if error else "",
        why=of_course(error.why, seat) if error else "",
        hint=_hint(seat, error) if error else "",
    )


def _hint(seat: Seat, error: LabError) -> str:
    """The command of a course in place of the one for a lab of one's own."""
    again = f"labctl course up --only {seat.name}"
    if isinstance(error, PolicyError) and error.is_over_budget:
        return f"labctl course budget {seat.name} +5   # then {again}"
    own = ("labctl up", "labctl offers", "labctl cost")
    return again if not error.hint or error.hint.startswith(own) else of_course(error.hint, seat)


def of_course(text: str, seat: Seat) -> str:
    """What was said of a lab of one's own, said of a seat: its name, its file, its commands."""
    said = text.replace(seat.lab, seat.name).replace("lab.yaml", "course.yaml")
    said = said.replace("labctl down --discard", f"labctl course down --only {seat.name} --discard")
    said = said.replace("labctl down --forget", "labctl course down --forget")
    said = said.replace("labctl ssh --", f"labctl course ssh {seat.name} --")
    return re.sub(r"labctl down$", f"labctl course down --only {seat.name}", said)
