"""The user's consent to the price of a new server, and how long that consent holds."""

from __future__ import annotations

from collections.abc import Container, Iterator

from labctl.errors import PolicyError, UnguardedCostError
from labctl.events import Note, Question
from labctl.model import Need, Offer
from labctl.providers import ConnectsGangs, Marketplace
from labctl.servers import guard, provider_choice, unguarded_cost
from labctl.servers.affordable_offers import budget_left_usd
from labctl.servers.context import LabContext
from labctl.servers.disk_retention import KEPT_S
from labctl.servers.plan import describe_offer, describe_plan
from labctl.text import list_text, price_or_free_text, price_text

# An offer that costs more than this multiple of the confirmed price needs a new confirmation.
DEARER = 1.25
KEEPS_DISK = (
    f"if the server ends by itself, its disk is kept for {KEPT_S / 86_400:.0f} days with the "
    "results that you have not pulled; the next labctl up restores them"
)
LOSS = (
    "when its deadline or budget ends the server, its disk is deleted too: results that you have "
    "not pulled are lost"
)


def confirm_prices(
    context: LabContext,
    need: Need,
    offers: list[Offer],
    *,
    count: int = 1,
    skipped: Container[str] = (),
) -> Iterator[Offer]:
    """Yield each offer once the user has confirmed its price; a free offer needs no answer.

    `count` is the number of servers that would be created from it. Each provider is confirmed by
    itself, and those that are in `skipped` by then are left out, as are those whose costs nothing
    would end and nobody agrees to, if others follow. A move is confirmed in any case.
    """
    ceilings: dict[str, float] = {}
    unguarded: set[str] = set()
    for number, offer in enumerate(offers):
        price, free = offer.price_usd_per_hour, -1.0 if context.moving else 0.0
        if offer.provider in skipped or offer.provider in unguarded:
            continue
        if price > ceilings.get(offer.provider, free):
            later = [one for one in offers[number + 1 :] if one.provider not in skipped]
            member = context
            if isinstance(context.provider, Marketplace):
                member = provider_choice.select_provider(context, offer.provider)
            try:
                _confirm_price(member, need, offer, later, count)
            except UnguardedCostError as error:
                unguarded.add(offer.provider)
                if all(one.provider in unguarded for one in later):
                    raise
                context.reporter.emit(Note(text=f"{error.what}; trying the next offer"))
                continue
            ceiling = need.max_price_usd_per_hour or price * DEARER
            if not unguarded_cost.has_billing_guard(member.provider):
                # The user has typed the cost of this price: a maximum is no consent to more.
                ceiling = min(ceiling, price * DEARER)
            ceilings[offer.provider] = ceiling
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
    elsewhere = list(
        dict.fromkeys(one.provider for one in others if one.provider != offer.provider)
    )
    question = f"start {describe_offer(offer)} for {price_text(price)}?"
    if context.config.server.candidates or elsewhere:
        question = f"start {offer.provider} {describe_offer(offer)} for {price_text(price)}?"
    if context.moving:
        question = _ask_for_move(context, offer)
    if count > 1:
        total = price_text(count * price)
        question = f"start {count} servers, each {describe_offer(offer)}, for {total} in total?"
    left = budget_left_usd(context, need)
    alike = [one for one in others if one.provider == offer.provider]
    plan = describe_plan(context.provider, need, offer, alike, left)
    if elsewhere:
        names = list_text(elsewhere, "or")
        plan += f"\nif it has no capacity, labctl asks again before it tries {names}"
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
    if price:
        unguarded_cost.confirm_unguarded_cost(context, count * price)


def _ask_for_move(context: LabContext, offer: Offer) -> str:
    """Return the question about a server that will replace the lab's, with both prices."""
    price = price_or_free_text(offer.price_usd_per_hour)
    target = f"{offer.provider} {describe_offer(offer)} ({price})"
    server = context.state.get_lab_server(context.lab_id)
    if server is None:
        return f"move to {target}?"
    old_price = price_or_free_text(server.offer.price_usd_per_hour)
    source = f"{server.provider} {describe_offer(server.offer)} ({old_price})"
    return f"move {context.name} from {source} to {target}?"
