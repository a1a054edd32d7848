"""Create a server. The request is stored before each call; if its reply is lost, it is repeated.

An attempt is one token with one exact request. It is closed by a reply (a server, or a definite
refusal), or by finding the lab's server (adoption.py). The next `up` repeats an open attempt (the
provider returns the server that it created for the token), or abandons it after 10 minutes. `down`
waits for one, and closes it if no server appears.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from labctl.errors import (
    BudgetError,
    BuildError,
    BusyError,
    CapacityError,
    CredentialsError,
    DeniedError,
    LabError,
    NoOfferError,
    PolicyError,
    QuotaError,
    ThrottledError,
    UsageError,
)
from labctl.events import Note, Question, Step, report_wait
from labctl.model import Boot, CreateServerRequest, Need, Offer, Server
from labctl.providers import ConnectsGangs, FirstBoot, Guarded
from labctl.retry import retry_on
from labctl.servers import accounts, adoption, deadlines, end_server, guard, kept_disks
from labctl.servers.context import LabContext
from labctl.servers.cost import record_start, spent_usd
from labctl.servers.disk_retention import KEPT_S
from labctl.servers.host_keys import ensure_key_pair
from labctl.servers.job_queue import has_job_queue
from labctl.servers.plan import describe_market, describe_offer, describe_plan
from labctl.text import dollars_text, price_text

# An open attempt is repeated for this long; then its price was confirmed too long ago.
REPLAY_S = 600.0
PATIENCE_S = 120.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
MOST_OFFERS = 24
# An offer that costs more than this multiple of the confirmed price needs a new confirmation.
DEARER = 1.25
# Kind of the ledger's line about a zone that reclaimed a server.
LEFT = "zone-left"
AVOID_S = 3600.0
# Errors after which the provider cannot have created a server.
REFUSALS = (
    BuildError,
    CapacityError,
    CredentialsError,
    DeniedError,
    NoOfferError,
    PolicyError,
    QuotaError,
    UsageError,
)
KEEPS_DISK = (
    f"if the server ends by itself, its disk is kept for {KEPT_S / 86_400:.0f} days with the "
    "results that you have not pulled; the next labctl up restores them"
)
LOSS = (
    "when its deadline or budget ends the server, its disk is deleted too: results that you have "
    "not pulled are lost"
)
# Refusals that say nothing about an earlier call of the same attempt.
INCONCLUSIVE = (CredentialsError, DeniedError)


def create_server(context: LabContext, need: Need, image: str = "") -> Server:
    """Create a server from the first offer that has capacity. Each offer is tried once.

    `image` is the one that its first run will use, if that is known.
    PolicyError if the price is not confirmed, or the budget does not pay for one hour.
    """
    if server := repeat_open_attempt(context):
        return server
    offers = list_affordable_offers(context, need)
    zones_by_kind: dict[str, list[str]] = {}
    for offer in confirm_prices(
        context, need, kept_disks.sort_by_kept_disks(context, offers)[:MOST_OFFERS]
    ):
        try:
            return attempt_offer(context, need, offer, image)
        except CapacityError as error:
            kind = f"{offer.type} {describe_market(offer)}".strip()
            zones_by_kind.setdefault(kind, []).append(offer.zone)
            context.reporter.emit(Note(text=error.what))
        except REFUSALS:
            remove_unused_resources(context)
            raise
    remove_unused_resources(context)
    provider = context.provider.name
    raise CapacityError(
        lambda subject: f"{provider} has no machine left for {context.name_for(subject)}",
        why="\n".join(
            f"no {kind} in {', '.join(zones)}" if any(zones) else f"no {kind}"
            for kind, zones in zones_by_kind.items()
        ),
        hint=lambda subject: (
            f"{subject.offers}   # other types and regions; or try again in some minutes"
            if subject.kind == "lab"
            else subject.offers
        ),
        subject=context.subject,
    )


def repeat_open_attempt(context: LabContext) -> Server | None:
    """Repeat the exact request of an attempt whose reply was lost; return its server, if any."""
    for attempt in context.state.list_open_attempts(context.lab_id):
        if attempt.provider != context.provider.name:
            continue
        if time.time() - attempt.created_at > REPLAY_S:
            context.state.end_attempt(attempt.token, "abandoned")
            continue
        text = f"repeating the request of an interrupted `{context.subject.up}`"
        context.reporter.emit(Note(text=text))
        try:
            return _complete_attempt(context, attempt.offer, attempt.request, repeated=True)
        except INCONCLUSIVE:
            raise
        except REFUSALS:
            continue
    return None


def remove_unused_resources(context: LabContext) -> None:
    """Remove what was created for a server that does not exist. `down` removes what remains."""
    if context.state.list_open_attempts(context.lab_id):
        return
    with contextlib.suppress(LabError):
        end_server.sweep(context)


def list_affordable_offers(context: LabContext, need: Need) -> list[Offer]:
    """List the offers within price and budget, those in recently reclaimed zones last."""
    with report_wait(context.reporter, f"looking for a server ({context.provider.name})"):
        offers = context.provider.offers(need)
    ceiling = need.max_price_usd_per_hour
    fitting = [o for o in offers if ceiling is None or o.price_usd_per_hour <= ceiling]
    if not fitting:
        raise _make_no_offer_error(context, need, offers)
    left = budget_left_usd(context, need)
    cheapest = min(o.price_usd_per_hour for o in fitting)
    if left is not None and left < cheapest:
        raise BudgetError(
            lambda subject: (
                f"the budget of {context.name_for(subject)} is used up"
                if left <= 0
                else f"{context.name_for(subject)} has {dollars_text(left)} left; "
                f"one hour costs {dollars_text(cheapest)}"
            ),
            why=f"the cheapest offer costs {price_text(cheapest)}"
            if left <= 0
            else "the rest of the budget does not pay for one hour of the cheapest offer",
            hint=lambda subject: subject.raise_budget,
            subject=context.subject,
        )
    affordable = [o for o in fitting if left is None or o.price_usd_per_hour <= left]
    avoided_zones = _list_avoided_zones(context)
    return sorted(affordable, key=lambda offer: offer.zone in avoided_zones)


def _list_avoided_zones(context: LabContext) -> set[str]:
    """List the zones that reclaimed a server of the lab within the last AVOID_S."""
    since = time.time() - AVOID_S
    lines = context.state.list_events(lab_id=context.lab_id, kind=LEFT, limit=8)
    return {line.detail["zone"] for line in lines if line.at > since}


def budget_left_usd(context: LabContext, need: Need, but: str = "") -> float | None:
    """Compute what this lab may still spend, in USD; None without a budget.

    `but` is the id of a server whose own cost is left out: its watchdog counts that. Costs that
    are not on record count as 0.
    """
    if need.budget_usd is None:
        return None
    return need.budget_usd - spent_usd(context.state, context.lab_id, time.time(), but=but)


def _make_no_offer_error(context: LabContext, need: Need, offers: list[Offer]) -> NoOfferError:
    if offers:
        cheapest = min(o.price_usd_per_hour for o in offers)
        why = f"the cheapest costs {price_text(cheapest)}, above max_price"
    elif need.gpu.is_required:
        why = f"it has no GPU for `gpu: {need.gpu.kind}`"
    else:
        why = f"no offer matches the server section of {context.subject.config_file}"
    provider = context.provider.name
    return NoOfferError(
        lambda subject: f"{provider} has no server for {context.name_for(subject)}",
        why=why,
        hint="labctl config   # shows what the lab needs",
        subject=context.subject,
    )


def confirm_prices(
    context: LabContext, need: Need, offers: list[Offer], *, count: int = 1
) -> Iterator[Offer]:
    """Yield each offer once the user has confirmed its price; a free offer needs no answer.

    `count` is the number of servers that would be created from it.
    """
    ceiling = 0.0
    for number, offer in enumerate(offers):
        price = offer.price_usd_per_hour
        if price > ceiling:
            _confirm_price(context, need, offer, offers[number + 1 :], count)
            ceiling = need.max_price_usd_per_hour or price * DEARER
        yield offer


def max_confirmed_usd_per_hour(offer: Offer) -> float | None:
    """Return the most that a replacement of this server may cost without a new confirmation.

    That is about its own price, or its on-demand price if that is higher; None for a free server.
    """
    price = offer.price_usd_per_hour
    return max(price * DEARER, offer.on_demand_usd_per_hour or 0.0) if price else None


def _confirm_price(
    context: LabContext, need: Need, offer: Offer, others: list[Offer], count: int
) -> None:
    price = offer.price_usd_per_hour
    question = f"start {describe_offer(offer)} for {price_text(price)}?"
    if count > 1:
        total = price_text(count * price)
        question = f"start {count} servers, each {describe_offer(offer)}, for {total} in total?"
    left = budget_left_usd(context, need)
    plan = describe_plan(context.provider, need, offer, others, left)
    if count > 1:
        plan = f"each of the {count} servers:\n{plan}"
        if isinstance(context.provider, ConnectsGangs):
            plan += f"\n{context.provider.describe_gang(offer)}"
    if guard.can_lose_results(context):
        plan += f"\n{LOSS}; `store:` in {context.subject.config_file} saves them"
    if guard.should_keep_disk(context):
        plan += f"\n{KEEPS_DISK}"
    if not context.reporter.confirm(Question(question=question, detail=plan, about="price")):
        raise PolicyError(
            "nothing was started", why="the price was not confirmed", hint=context.subject.offers
        )
    confirm_unguarded_cost(context, count * price)


def confirm_unguarded_cost(context: LabContext, price_usd_per_hour: float) -> None:
    """Have the user type the monthly cost if none of the provider's guards ends billing.

    PolicyError if the user does not.
    """
    provider = context.provider
    if deadlines.is_guarded_elsewhere(provider) or deadlines.can_end_billing(provider):
        return
    worst, typed = deadlines.worst_cost(price_usd_per_hour), deadlines.month_usd(price_usd_per_hour)
    down = context.subject.down
    text = f"no guard at {provider.name} stops these costs: {worst}, until {down}"
    question = f"to start it anyway, type {typed}"
    if not context.reporter.confirm(
        Question(question=question, detail=text, about="billing", typed=typed)
    ):
        raise PolicyError(
            "nothing was started",
            why=text,
            hint=f"{context.subject.up}   # in a terminal, to type the cost",
        )


def attempt_offer(context: LabContext, need: Need, offer: Offer, image: str) -> Server:
    """Create a server from one offer whose price is confirmed."""
    request = _build_request(context, need, offer, image)
    account = context.provider.get_account()
    accounts.note_profile(context, account)
    context.state.begin_attempt(request.token, request, offer, account.id)
    context.state.record("attempt", lab_id=context.lab_id, detail={"token": request.token})
    return _complete_attempt(context, offer, request)


def _complete_attempt(
    context: LabContext, offer: Offer, request: CreateServerRequest, *, repeated: bool = False
) -> Server:
    """Create the server of one attempt, through throttling and lost replies, and close it.

    `repeated`: the request was sent before, and its reply was lost.
    """
    action = _describe_creation(context)
    step = Step(name=f"{action}: {context.provider.name} {describe_offer(offer)}")
    context.reporter.emit(step)
    server = context.assign_alias(_create(context, offer, request, unsure=repeated), None)
    context.reporter.emit(msgspec.structs.replace(step, done=True, detail=server.id))
    context.state.save_server(server)
    context.state.end_attempt(request.token, "created")
    record_start(context.state, server, "created")
    return server


def _describe_creation(context: LabContext) -> str:
    """Say in a few words where the server comes from; a course may have created it before."""
    if adoption.is_leased(context):
        return "leasing a machine"
    if has_job_queue(context):
        return "using a login node"
    return "getting a server" if isinstance(context.provider, Guarded) else "creating a server"


def _create(
    context: LabContext, offer: Offer, request: CreateServerRequest, *, unsure: bool
) -> Server:
    """Call the provider until it replies.

    `unsure`: an earlier call may have created the server, so an INCONCLUSIVE refusal does not
    close the attempt.
    """

    def create() -> Server:
        nonlocal unsure
        if policy.statistics["attempt_number"] > 1:
            context.state.renew_attempt(request.token)
        try:
            return context.provider.create(offer, request)
        except REFUSALS as error:
            if not (unsure and isinstance(error, INCONCLUSIVE)):
                context.state.end_attempt(request.token, f"refused: {error.what}")
            raise
        except BusyError:
            unsure = True
            raise

    policy = retry_on(
        (ThrottledError, BusyError),
        pause_s=FIRST_PAUSE_S,
        longest_pause_s=LONGEST_PAUSE_S,
        deadline_s=PATIENCE_S,
    )
    return policy(create)


def _build_request(
    context: LabContext, need: Need, offer: Offer, image: str
) -> CreateServerRequest:
    identity = context.identity
    tags = {"labctl.lab-id": context.lab_id}
    left = budget_left_usd(context, need)
    if left is not None:
        tags["labctl:budget"] = f"{left:.4f}"
    request = CreateServerRequest(
        lab=context.config.name,
        lab_id=context.lab_id,
        token=secrets.token_hex(8),
        public_key=ensure_key_pair(identity),
        identity=str(identity),
        need=need,
        tags=tags,
        group=context.group,
        group_name=context.group_name,
        image=image,
        gang=context.group if context.rank is not None else "",
    )
    if not isinstance(context.provider, FirstBoot):
        return request
    private, host_key = _make_host_key(identity.parent)
    boot = Boot(
        lab=request.lab,
        public_key=request.public_key,
        host_key=host_key,
        host_private_key=private,
        ttl_s=deadlines.boot_span_s(need, offer.price_usd_per_hour, left),
    )
    script = context.provider.build_first_boot(boot)
    return msgspec.structs.replace(request, host_key=host_key, first_boot=script)


def _make_host_key(folder: Path) -> tuple[str, str]:
    """Create a key pair for first contact: (private, public). Only the attempt's record has it."""
    path = folder / f"first-contact-{secrets.token_hex(4)}"
    try:
        public = ensure_key_pair(path).rpartition(" ")[0]
        return path.read_text(), public
    finally:
        path.unlink(missing_ok=True)
        path.with_name(path.name + ".pub").unlink(missing_ok=True)
