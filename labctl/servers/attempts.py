"""Making a server: the intent is on disk before each call, and a lost reply is asked for again.

An attempt is one token with one exact request. It is closed only by an answer: a server, or a plain
no. One that is open is repeated by the next `up` (the provider replays a token it has seen) and
waited for by `down`.
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
from labctl.events import Decision, Note, Step
from labctl.model import Boot, CreateRequest, Need, Offer, Server
from labctl.providers import FirstBoot
from labctl.retry import retry_on
from labctl.servers import accounts, deadlines, end_server, guard, kept_disks
from labctl.servers.context import Ground
from labctl.servers.cost import note_life, spent_usd
from labctl.servers.held_disks import KEPT_S
from labctl.servers.host_keys import make_key
from labctl.servers.plan import describe_plan, market_name, offer_name
from labctl.state import Attempt

# An attempt this young is repeated as it is; an older one's price was agreed to too long ago.
REPLAY_S = 600.0
PATIENCE_S = 120.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
MOST_OFFERS = 24
# An offer that costs so much more than the agreed one is asked about again.
DEARER = 1.25
# Kind of the ledger's line about a zone that took a server back.
LEFT = "zone-left"
AVOID_S = 3600.0
# Answers after which no server can have been made.
NO = (
    CapacityError,
    CredentialsError,
    DeniedError,
    NoOfferError,
    PolicyError,
    QuotaError,
    UsageError,
)
KEEPS_DISK = (
    f"if it ends by itself, its disk stays for {KEPT_S / 86_400:.0f} days with results that you "
    "have not pulled; the next labctl up brings them back"
)
LOSS = "at its time or budget its disk is deleted too: results that you have not pulled are lost"
# Of these, those that say nothing about an earlier call of the same attempt.
UNHEARD = (CredentialsError, DeniedError)


def make(ground: Ground, need: Need) -> Server:
    """A new server: the first of the offers that has a machine, each asked for once.

    PolicyError where the price is not agreed to or the budget is smaller than one hour.
    """
    if replayed := _replayed(ground):
        return replayed
    offers = _affordable(ground, need)
    refused: dict[str, list[str]] = {}
    for offer in _agreed(ground, need, kept_disks.nearest(ground, offers)[:MOST_OFFERS]):
        try:
            return _attempt(ground, need, offer)
        except CapacityError as error:
            kind = f"{offer.type} {market_name(offer)}".strip()
            refused.setdefault(kind, []).append(offer.zone)
            ground.reporter.emit(Note(text=error.what))
        except NO:
            _leave_nothing(ground)
            raise
    _leave_nothing(ground)
    raise CapacityError(
        f"{ground.provider.name} has no machine left for {ground.config.name}",
        why="\n".join(
            f"no {kind} in {', '.join(zones)}" if any(zones) else f"no {kind}"
            for kind, zones in refused.items()
        ),
        hint="labctl offers   # other types and regions; or try again in some minutes",
    )


def _replayed(ground: Ground) -> Server | None:
    """The server of an attempt whose answer nobody heard, by the same request again."""
    for attempt in ground.state.open_attempts(ground.lab_id):
        if attempt.provider != ground.provider.name:
            continue
        if time.time() - attempt.created_at > REPLAY_S:
            ground.state.end_attempt(attempt.token, "abandoned")
            continue
        ground.reporter.emit(Note(text="asking again for the server of an interrupted `up`"))
        try:
            return _asked(ground, attempt.offer, attempt.request, repeated=True)
        except UNHEARD:
            raise
        except NO:
            continue
    return None


def _leave_nothing(ground: Ground) -> None:
    """No server was made: what was made for it serves nobody. `down` takes away what stays."""
    if ground.state.open_attempts(ground.lab_id):
        return
    with contextlib.suppress(LabError):
        end_server.swept(ground)


def unheard(ground: Ground, *, every_lab: bool = False) -> list[Attempt]:
    """Attempts that may still show up as servers here: no answer was heard, and they are young."""
    horizon = time.time() - ground.provider.settle_s
    attempts = ground.state.open_attempts(None if every_lab else ground.lab_id)
    return [
        one
        for one in attempts
        if one.provider == ground.provider.name
        and one.created_at >= horizon
        and not accounts.is_elsewhere(ground, one.account)
    ]


def _affordable(ground: Ground, need: Need) -> list[Offer]:
    offers = ground.provider.offers(need)
    ceiling = need.max_price_usd_per_hour
    fitting = [o for o in offers if ceiling is None or o.price_usd_per_hour <= ceiling]
    if not fitting:
        raise _no_offer(ground, need, offers)
    left = budget_left_usd(ground, need)
    cheapest = min(o.price_usd_per_hour for o in fitting)
    if left is not None and left < cheapest:
        raise BudgetError(
            f"the budget of {ground.config.name} is used up"
            if left <= 0
            else f"the budget of {ground.config.name} is smaller than one hour",
            why=f"{left:.2f} dollars are left, the cheapest offer costs {cheapest:.2f} an hour",
            hint="labctl cost; then raise `budget:` in lab.yaml, or labctl up --budget 5",
        )
    affordable = [o for o in fitting if left is None or o.price_usd_per_hour <= left]
    avoided = _avoided(ground)
    return sorted(affordable, key=lambda offer: offer.zone in avoided)


def _avoided(ground: Ground) -> set[str]:
    """Zones that have just lost a server of ours."""
    since = time.time() - AVOID_S
    lines = ground.state.events(lab_id=ground.lab_id, kind=LEFT, limit=8)
    return {line.detail["zone"] for line in lines if line.at > since}


def budget_left_usd(ground: Ground, need: Need, but: str = "") -> float | None:
    """What this lab may still spend, USD; None without a budget.

    `but` is a server's id whose own cost is not counted: its watchdog does. What is not on record
    counts as nothing.
    """
    if need.budget_usd is None:
        return None
    return need.budget_usd - spent_usd(ground.state, ground.lab_id, time.time(), but=but)


def _no_offer(ground: Ground, need: Need, offers: list[Offer]) -> NoOfferError:
    if offers:
        cheapest = min(o.price_usd_per_hour for o in offers)
        why = f"the cheapest costs {cheapest:.2f} dollars an hour, above max_price"
    elif need.gpu.required:
        why = f"it has no GPU for `gpu: {need.gpu.kind}`"
    else:
        why = "it gives nothing that fits lab.yaml's server section"
    return NoOfferError(
        f"{ground.provider.name} has no server for {ground.config.name}",
        why=why,
        hint="labctl config shows what is asked for",
    )


def _agreed(ground: Ground, need: Need, offers: list[Offer]) -> Iterator[Offer]:
    """The offers, each once its price is agreed to; nothing is asked where nothing costs."""
    ceiling = 0.0
    for number, offer in enumerate(offers):
        price = offer.price_usd_per_hour
        if price > ceiling:
            _agree(ground, need, offer, offers[number + 1 :])
            ceiling = need.max_price_usd_per_hour or price * DEARER
        yield offer


def agreed_usd_per_hour(offer: Offer) -> float | None:
    """What a server in the place of this one may cost unasked: about the same, or its price on
    demand; None where nothing costs."""
    price = offer.price_usd_per_hour
    return max(price * DEARER, offer.on_demand_usd_per_hour or 0.0) if price else None


def _agree(ground: Ground, need: Need, offer: Offer, others: list[Offer]) -> None:
    question = f"start {offer_name(offer)} for {offer.price_usd_per_hour:.2f} dollars an hour?"
    left = budget_left_usd(ground, need)
    plan = describe_plan(ground.provider, need, offer, others, left)
    if guard.can_lose_results(ground):
        plan += f"\n{LOSS}; `store:` in lab.yaml saves them"
    if guard.will_keep_disk(ground):
        plan += f"\n{KEEPS_DISK}"
    if not ground.reporter.ask(Decision(question=question, detail=plan, about="price")):
        raise PolicyError(
            "nothing was started", why="the price was not agreed to", hint="labctl offers"
        )
    agree_to_no_guard(ground, offer.price_usd_per_hour)


def agree_to_no_guard(ground: Ground, price_usd_per_hour: float) -> None:
    """PolicyError where no guard of this provider ends billing, and nobody types that they know."""
    provider = ground.provider
    if deadlines.is_guarded_elsewhere(provider) or deadlines.can_end_billing(provider):
        return
    worst, typed = deadlines.worst_cost(price_usd_per_hour), deadlines.month_usd(price_usd_per_hour)
    text = f"no guard ends what this costs at {provider.name}: {worst}, until labctl down"
    question = f"to start it all the same, type {typed}"
    if not ground.reporter.ask(
        Decision(question=question, detail=text, about="billing", typed=typed)
    ):
        raise PolicyError(
            "nothing was started", why=text, hint="labctl up   # in a terminal, to type the cost"
        )


def _attempt(ground: Ground, need: Need, offer: Offer) -> Server:
    request = _request(ground, need, offer)
    account = ground.provider.get_account()
    accounts.note_profile(ground, account)
    ground.state.begin_attempt(request.token, request, offer, account.id)
    ground.state.record("attempt", lab_id=ground.lab_id, detail={"token": request.token})
    step = Step(name=f"making a server ({ground.provider.name} {offer_name(offer)})")
    ground.reporter.emit(step)
    server = _asked(ground, offer, request)
    ground.reporter.emit(msgspec.structs.replace(step, done=True, detail=server.id))
    return server


def _asked(
    ground: Ground, offer: Offer, request: CreateRequest, *, repeated: bool = False
) -> Server:
    """The answer to one attempt, through throttling and lost replies; then it is closed.

    `repeated`: it was asked before, and nobody heard the answer.
    """
    server = ground.as_ours(_create(ground, offer, request, unsure=repeated), None)
    ground.state.save_server(server)
    ground.state.end_attempt(request.token, "created")
    note_life(ground.state, server, "created")
    return server


def _create(ground: Ground, offer: Offer, request: CreateRequest, *, unsure: bool) -> Server:
    """`unsure`: an earlier call may have made the server, so that not every no closes it."""

    def create() -> Server:
        nonlocal unsure
        if policy.statistics["attempt_number"] > 1:
            ground.state.renew_attempt(request.token)
        try:
            return ground.provider.create(offer, request)
        except NO as error:
            if not (unsure and isinstance(error, UNHEARD)):
                ground.state.end_attempt(request.token, f"refused: {error.what}")
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


def _request(ground: Ground, need: Need, offer: Offer) -> CreateRequest:
    identity = ground.identity
    tags = {"labctl.lab-id": ground.lab_id}
    left = budget_left_usd(ground, need)
    if left is not None:
        tags["labctl:budget"] = f"{left:.4f}"
    request = CreateRequest(
        lab=ground.config.name,
        lab_id=ground.lab_id,
        token=secrets.token_hex(8),
        public_key=make_key(identity),
        identity=str(identity),
        need=need,
        tags=tags,
        group=ground.group,
    )
    if not isinstance(ground.provider, FirstBoot):
        return request
    private, host_key = _host_key(identity.parent)
    boot = Boot(
        lab=request.lab,
        public_key=request.public_key,
        host_key=host_key,
        host_private_key=private,
        ttl_s=deadlines.boot_span_s(need, offer.price_usd_per_hour, left),
    )
    script = ground.provider.first_boot(boot)
    return msgspec.structs.replace(request, host_key=host_key, first_boot=script)


def _host_key(folder: Path) -> tuple[str, str]:
    """A key pair for first contact only: (private, public). It lives in the attempt's record."""
    path = folder / f"first-contact-{secrets.token_hex(4)}"
    try:
        public = make_key(path).rpartition(" ")[0]
        return path.read_text(), public
    finally:
        path.unlink(missing_ok=True)
        path.with_name(path.name + ".pub").unlink(missing_ok=True)
