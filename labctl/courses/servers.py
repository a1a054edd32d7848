"""A course's servers: created together, with the result of each seat.

A seat's failure stops no other, and repeating the call retries what failed. One consent covers
a whole class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from labctl.config import Paths
from labctl.courses import metering
from labctl.courses.context import build_course_context, build_seat_contexts, find_baked_image
from labctl.courses.material import CourseMaterial, collect_material, push_material
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.records.ledger_entries import CourseLedgerDraft
from labctl.courses.records.ledger_servers import read_servers, up_line
from labctl.courses.seat_reporter import make_done_notifier, make_seat_reporter, report_stopping
from labctl.courses.seat_results import SeatFailure, SeatResult
from labctl.courses.shared_seats import SharedSeats
from labctl.errors import InterruptError, PolicyError
from labctl.events import Question, Reporter
from labctl.lifecycle import fleet
from labctl.lifecycle import up as server_up
from labctl.model import Need, Offer, Server
from labctl.runs import images
from labctl.servers import (
    adoption,
    affordable_offers,
    attempts,
    deadlines,
    guard,
    price_consent,
    reachability,
    unguarded_cost,
)
from labctl.servers.context import LabContext
from labctl.servers.disk_retention import KEPT_S
from labctl.servers.offers import filter_by_type
from labctl.state import State
from labctl.text import dollars_text, duration_text, list_text, price_text

AT_ONCE = 32
ENDED = ("ending", "terminated")
LOSS = (
    "unsaved results are lost when a server reaches its time or budget: the course has no keeper "
    "and no store, and the disk is deleted with the server"
)
LOSS_NEXT = "add `keeper:` or `store:` to course.yaml, or server.aws.instance_profile"
LOSS_TYPED = "lose results"


@dataclass(frozen=True)
class CourseOperator:
    """The person or keeper that works on a course, with their state and reporter.

    The ledger records `by` and `why` with each action. Students see `why` when their server ends.
    """

    folder: CourseFolder
    paths: Paths
    state: State
    reporter: Reporter
    by: str = ""
    why: str = ""

    def course(
        self, *, everywhere: bool = False, plain: bool = False, uses_baked_image: bool = True
    ) -> LabContext:
        """Build the course's own context; see `build_course_context`."""
        return build_course_context(
            self.folder,
            self.paths,
            self.state,
            self.reporter,
            everywhere=everywhere,
            plain=plain,
            uses_baked_image=uses_baked_image,
        )


class SeatOutcome(SeatResult, frozen=True):
    """The result for one seat: its server, or what failed."""

    server: Server | None = None
    made: bool = False


def bring_up_servers(
    staff: CourseOperator,
    seats: Sequence[Seat],
    *,
    login_only: bool = False,
    at_once: int = AT_ONCE,
    explains_costs: bool = True,
) -> list[SeatOutcome]:
    """Bring up a ready server for each seat, in their order; safe to repeat and to interrupt.

    With `login_only` a server needs to accept a login only: nothing is prepared, and no watchdog is
    armed. PolicyError if the price is not agreed to. Progress arrives as `SeatEvent`s.
    `explains_costs` is as for `lifecycle.up`.
    """
    course = staff.course()
    if isinstance(course.provider, SharedSeats):
        course.provider.upkeep.update_limits()
    listed = course.provider.servers()
    metering.record_costs(staff.folder, course, listed)
    before = {server.lab_id: server for server in listed if server.state not in ENDED}
    contexts = _prepare_seats(staff, course, seats, listed, before.keys())
    by_lab = {seat.lab_id: seat for seat in seats}
    was_baked = find_baked_image(staff.folder) is not None
    files = CourseMaterial() if login_only else collect_material(staff.folder, staff.reporter)

    def bring_up(context: LabContext) -> Server:
        try:
            if login_only:
                return _create_reachable(context, listed)
            server = server_up.up(context, listed, explains_costs=explains_costs)
            _bring_files(context, server, files, was_baked)
            return server
        finally:
            _record_start(staff, by_lab[context.lab_id], context)

    with _explain_interrupt():
        outcomes = fleet.run_for_each(
            contexts,
            bring_up,
            at_once=at_once,
            on_result=make_done_notifier(staff.reporter, by_lab),
            stopping=partial(report_stopping, staff.reporter),
        )
    _record_refusals(staff, by_lab, outcomes)
    return [
        _describe_outcome(by_lab[outcome.context.lab_id], outcome, before) for outcome in outcomes
    ]


@contextmanager
def _explain_interrupt() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptError(
            "interrupted while servers were being created",
            why="servers that were started exist, and may cost money",
            hint="labctl course up   # continues\nlabctl course down   # ends them",
        ) from None


def _prepare_seats(
    staff: CourseOperator,
    course: LabContext,
    seats: Sequence[Seat],
    listed: Sequence[Server],
    served: Collection[str],
) -> list[LabContext]:
    """Build the seats' contexts, and get consent for those whose lab is not in `served`."""
    contexts = build_seat_contexts(
        staff.folder, staff.paths, staff.state, staff.reporter, seats, course=course, listed=listed
    )
    need = require_price_consent(
        course, [context for context in contexts if context.lab_id not in served]
    )
    if need is not None:
        _require_loss_consent(staff)
    return [
        _prepare_context(context, make_seat_reporter(seat.name, staff.reporter, agreed=True), need)
        for context, seat in zip(contexts, seats, strict=True)
    ]


def _create_reachable(context: LabContext, listed: Sequence[Server]) -> Server:
    with context.state.lock(context.lab_id, "course up"):
        need = context.config.server.need
        server = adoption.adopt(context, listed) or attempts.create_server(context, need)
        server = reachability.wait_until_reachable(context, server)[0]
        if adoption.is_fresh(context, server):
            # Students may work there from now on, so their files must be saved at its end.
            detail = {"login_only": True}
            context.state.record("ready", lab_id=context.lab_id, server_id=server.id, detail=detail)
        return server


def _bring_files(context: LabContext, server: Server, files: CourseMaterial, baked: bool) -> None:
    """Load the image, the data and the handouts, so that the class need not wait for them."""
    config = context.config
    # The default image is for labs that name none: students' labs may all build their own.
    if config.has_own_image and config.image.reference:
        remote = context.open_agent(server)
        reference = config.image.reference
        if not images.has_image(remote, reference):
            images.ensure_image(context, server, remote, reference)
    push_material(context, server, files, baked=baked)


def _record_start(staff: CourseOperator, seat: Seat, context: LabContext) -> None:
    """Record a new server's start in the ledger, even if a later step failed."""
    server = context.state.get_lab_server(context.lab_id)
    if server is None or server.state in ENDED:
        return
    recorded = read_servers(staff.folder.ledger.list_entries(seat=seat.name)).get(server.id)
    if recorded is None or recorded.ended:
        staff.folder.ledger.append_all([up_line(seat.name, server, staff.by)])


def _record_refusals(
    staff: CourseOperator, by_lab: dict[str, Seat], outcomes: Iterable[fleet.LabOutcome[Server]]
) -> None:
    staff.folder.ledger.append_all(
        [
            CourseLedgerDraft(
                kind="refused",
                seat=by_lab[outcome.context.lab_id].name,
                why=outcome.error.what,
            )
            for outcome in outcomes
            if isinstance(outcome.error, PolicyError)
        ]
    )


def require_price_consent(course: LabContext, fresh: Sequence[LabContext]) -> Need | None:
    """Ask for consent to the cost of all new servers; return the need of each.

    Its price limit is the agreed price. None if no server is needed. PolicyError without consent.
    """
    if not fresh:
        return None
    need = course.config.server.need
    offers = filter_by_type(course.provider.offers(need), need)
    ceiling = need.max_price_usd_per_hour
    fitting = [offer for offer in offers if ceiling is None or offer.price_usd_per_hour <= ceiling]
    if not fitting or not fitting[0].price_usd_per_hour:
        return need  # it is free, or each seat reports why nothing fits
    offer = fitting[0]
    decision = Question(
        question=_price_question(offer, len(fresh)),
        detail=_describe_limits(fresh, offer),
        about="price",
    )
    if not course.reporter.confirm(decision):
        raise PolicyError(
            "nothing was started", why="the price was not confirmed", hint="labctl course plan"
        )
    unguarded_cost.confirm_unguarded_cost(course, len(fresh) * offer.price_usd_per_hour)
    limit = ceiling if ceiling is not None else price_consent.max_confirmed_usd_per_hour(offer)
    return msgspec.structs.replace(need, max_price_usd_per_hour=limit)


def _require_loss_consent(staff: CourseOperator) -> None:
    """Raise PolicyError if results can be lost at a server's end and that is not accepted."""
    if not guard.can_lose_results(staff.course(plain=True)):
        return
    question = f"to start them anyway, type: {LOSS_TYPED}"
    decision = Question(question=question, detail=LOSS, about="results", typed=LOSS_TYPED)
    if not staff.reporter.confirm(decision):
        raise PolicyError("nothing was started", why=LOSS, hint=LOSS_NEXT)


def _price_question(offer: Offer, count: int) -> str:
    market = "spot" if offer.spot else "on demand"
    price = offer.price_usd_per_hour
    servers = f"{count} servers" if count > 1 else "one server"
    each = f", {price_text(price)} each" if count > 1 else ""
    return f"start {servers} ({offer.type}, {market}) for {price_text(count * price)}{each}?"


def _describe_limits(fresh: Sequence[LabContext], offer: Offer) -> str:
    """Describe what ends the servers, and what they cost at most."""
    most_usd = 0.0
    for context in fresh:
        need = context.config.server.need
        left_usd = affordable_offers.budget_left_usd(context, need)
        span_s = deadlines.span_s(need, offer.price_usd_per_hour, left_usd)
        most_usd += float("inf") if span_s is None else span_s / 3600 * offer.price_usd_per_hour
    need = fresh[0].config.server.need
    ttl_s = deadlines.ttl_s(need, offer.price_usd_per_hour)
    ends = [
        f"after {duration_text(ttl_s)}" if ttl_s else "",
        "at the seat's budget" if need.budget_usd is not None else "",
        f"after {duration_text(need.idle_s)} without work" if need.idle_s else "",
    ]
    limits = list_text(list(filter(None, ends)), "or") if any(ends) else ""
    is_one = len(fresh) == 1
    each, them, together = ("it", "it", "") if is_one else ("each", "them", "together ")
    lines = [
        f"{each} stops by itself {limits}" if limits else f"only `labctl course down` ends {them}"
    ]
    if most_usd < float("inf"):
        lines.append(f"{together}{dollars_text(most_usd)} at most, without disks and traffic")
    if guard.should_keep_disk(fresh[0]):
        days = f"{KEPT_S / 86_400:.0f} days"
        lines.append(
            f"the disk of a server that stops by itself is kept for {days}, and costs money"
        )
    return "\n".join(lines)


def _prepare_context(context: LabContext, reporter: Reporter, need: Need | None) -> LabContext:
    """Return the seat's context with its own reporter and the agreed price limit."""
    config = context.config
    if need is not None:
        most = need.max_price_usd_per_hour
        own = msgspec.structs.replace(config.server.need, max_price_usd_per_hour=most)
        config = msgspec.structs.replace(
            config, server=msgspec.structs.replace(config.server, need=own)
        )
    return context.make_sibling(config, context.lab_id, reporter=reporter)


def _describe_outcome(
    seat: Seat, outcome: fleet.LabOutcome[Server], servers_before: dict[str, Server]
) -> SeatOutcome:
    server = outcome.value or outcome.context.state.get_lab_server(seat.lab_id)
    before = servers_before.get(seat.lab_id)
    subject, error = outcome.context.subject, outcome.error
    hint = "" if error and error.hint else (lambda subject: subject.up)
    return SeatOutcome(
        seat=seat.name,
        students=seat.students,
        server=server,
        made=server is not None and (before is None or before.id != server.id),
        failure=SeatFailure(subject, error, hint) if error else None,
    )
