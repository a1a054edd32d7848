"""Create a lab's server at the first provider that has one: of `fallback`, or of the market.

Another provider is tried only once the attempt at the former has ended and left nothing: a request
whose outcome is unknown ends the search.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from labctl.errors import (
    CapacityError,
    CredentialsError,
    DeniedError,
    LabError,
    NoOfferError,
    QuotaError,
    UnguardedCostError,
)
from labctl.errors.replies import describe_error
from labctl.events import Note
from labctl.model import Need, Offer, Server
from labctl.providers import Marketplace
from labctl.servers import adoption, affordable_offers, attempts, price_consent
from labctl.servers.context import LabContext
from labctl.servers.plan import describe_offer
from labctl.servers.provider_choice import (
    is_market,
    list_candidates,
    note_choice,
    select_provider,
)
from labctl.text import list_text, price_or_free_text

# Refusals of one provider that another one need not share: no offer, capacity, quota, credentials,
# and costs that nothing there would end.
PASSED_ON = (CapacityError, CredentialsError, NoOfferError, QuotaError, UnguardedCostError)
# Refusals that hold for all offers of a provider.
WHOLE_PROVIDER = (CredentialsError, DeniedError, NoOfferError, QuotaError)


def create_server(context: LabContext, need: Need, image: str = "") -> Server:
    """Create the server at the first of the lab's candidates that has one.

    The server's `provider` says which; `select_provider` makes the context for it. Errors are those
    of the only provider, or a CapacityError that has the reason of each.
    """
    names = list_candidates(context.config)
    if len(names) == 1 and not is_market(names[0]):
        note_choice(context)
        return attempts.create_server(context, need, image)
    if server := _repeat_open_attempts(context, names) or _find_elsewhere(context, names):
        return server
    refusals: list[str] = []
    for position, name in enumerate(names):
        member = select_provider(context, name)
        try:
            if isinstance(member.provider, Marketplace):
                return _create_from_market(member, need, image)
            note_choice(member)
            return attempts.create_server(member, need, image)
        except PASSED_ON as error:
            if len(names) == 1 or _has_open_attempt(member, name):
                raise
            refusals.append(f"{name}: {describe_error(error)}")
            if position + 1 < len(names):
                text = f"{refusals[-1]}; trying {names[position + 1]}"
                context.reporter.emit(Note(text=text))
    raise CapacityError(
        f"none of {list_text(names, 'or')} has a server for {context.name} now",
        why="\n".join(refusals),
        hint=f"{context.subject.offers} --provider auto   # lists the offers of all providers",
        subject=context.subject,
    )


def _repeat_open_attempts(context: LabContext, names: tuple[str, ...]) -> Server | None:
    """Repeat the interrupted request of an earlier `up`, at the provider that it went to."""
    for attempt in context.state.list_open_attempts(context.lab_id):
        is_candidate = attempt.provider in names or any(map(is_market, names))
        if is_candidate and attempt.request.moving == context.moving:
            member = select_provider(context, attempt.provider)
            if server := attempts.repeat_open_attempt(member):
                return server
    return None


def _find_elsewhere(context: LabContext, names: tuple[str, ...]) -> Server | None:
    """Find the lab's server at another candidate, if this machine has lost its records of the lab.

    A market has been searched already, since it lists the servers of all its members.
    """
    if context.moving or context.state.list_events(lab_id=context.lab_id, kind="created", limit=1):
        return None
    for name in names:
        member = select_provider(context, name)
        if member is context:
            continue
        with suppress(LabError):  # without credentials, the lab cannot have been there
            if server := adoption.adopt(member):
                note_choice(member)
                return server
    return None


def _create_from_market(context: LabContext, need: Need, image: str) -> Server:
    """Create a server from the cheapest offer of all providers that has capacity."""
    offers = _limit(affordable_offers.list_affordable_offers(context, need))
    _note_cheapest(context, offers)
    refusals: list[str] = []
    refused: set[str] = set()
    for offer in price_consent.confirm_prices(context, need, offers, skipped=refused):
        member = select_provider(context, offer.provider)
        note_choice(member)
        try:
            return attempts.attempt_offer(member, need, offer, image)
        except (CapacityError, *WHOLE_PROVIDER) as error:
            attempts.remove_unused_resources(member)
            if _has_open_attempt(member, offer.provider):
                raise
            if isinstance(error, WHOLE_PROVIDER):
                refused.add(offer.provider)
            refusals.append(f"{offer.provider}: {error.what}")
            context.reporter.emit(Note(text=refusals[-1]))
        except attempts.REFUSALS:
            attempts.remove_unused_resources(member)
            raise
    raise CapacityError(
        f"no provider has a machine left for {context.name}",
        why="\n".join(refusals),
        hint=f"{context.subject.offers} --provider auto   # or try again in a few minutes",
        subject=context.subject,
    )


def _limit(offers: list[Offer]) -> list[Offer]:
    """Return the first offers of each provider, in their order."""
    counts: Counter[str] = Counter()
    limited = []
    for offer in offers:
        counts[offer.provider] += 1
        if counts[offer.provider] <= attempts.MOST_OFFERS:
            limited.append(offer)
    return limited


def _note_cheapest(context: LabContext, offers: list[Offer]) -> None:
    """Say which offer comes first, and of how many."""
    first, providers = offers[0], sorted({offer.provider for offer in offers})
    price = price_or_free_text(first.price_usd_per_hour)
    which = f"the cheapest of {len(offers)} offers" if len(offers) > 1 else "the only offer"
    text = f"{first.provider} {describe_offer(first)}, {price}: {which} that fit"
    if len(offers) == 1:
        text += "s"
    context.reporter.emit(Note(text=f"{text} ({list_text(providers)})"))


def _has_open_attempt(context: LabContext, provider: str) -> bool:
    """Whether a request at the provider has an unknown outcome, so that a server may exist."""
    return any(
        attempt.provider == provider and attempt.request.moving == context.moving
        for attempt in context.state.list_open_attempts(context.lab_id)
    )
