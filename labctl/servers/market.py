"""The offers of all providers side by side, with what else decides between them."""

from __future__ import annotations

from typing import Literal

from labctl.errors import LabError
from labctl.estimate.prices import compute_work_price, make_rank
from labctl.model import Need, Offer, Value
from labctl.providers import Deadline, Marketplace, OfferBatch
from labctl.servers.boot_times import read_boot_times
from labctl.servers.context import LabContext
from labctl.servers.offers import filter_by_type

# Whether a timer at the provider ends a hanging server: "setup" if it must be set up first.
TimerState = Literal["yes", "setup", "no"]


class MarketOffer(Value, frozen=True):
    """An offer, and what this machine knows of its provider.

    `is_live` as in OfferBatch: False for a provider without credentials here. `usd_per_pflop_hour`
    is None for a GPU without published figures, `boot_s` for a type that was never used here.
    """

    offer: Offer
    is_live: bool
    usd_per_pflop_hour: float | None
    timer: TimerState
    boot_s: float | None


class MarketListing(Value, frozen=True):
    """All offers, the best first, and the providers that have none here, with the reasons."""

    offers: tuple[MarketOffer, ...]
    failures: dict[str, str]
    left_out: dict[str, str]


def list_market(context: LabContext, need: Need) -> MarketListing | None:
    """Ask all providers for their offers at once. One that fails or is slow is no error.

    None if the context's provider is only one.
    """
    if not isinstance(context.provider, Marketplace):
        return None
    batches = context.provider.gather_offers(need)
    boots = read_boot_times(context.state)
    offers = [
        _make_row(offer, batch, timer, boots.get((offer.provider, offer.type)))
        for batch in batches
        if batch.offers
        for timer in [_find_timer(context, batch.provider)]
        for offer in _select_fitting(batch, need)
    ]
    return MarketListing(
        offers=tuple(sorted(offers, key=lambda row: make_rank(row.offer, need))),
        failures={batch.provider: batch.failure for batch in batches if batch.failure},
        left_out={
            batch.provider: batch.left_out or "no offer fits"
            for batch in batches
            if not (batch.failure or _select_fitting(batch, need))
        },
    )


def _select_fitting(batch: OfferBatch, need: Need) -> list[Offer]:
    ceiling = need.max_price_usd_per_hour
    fitting = filter_by_type(list(batch.offers), need)
    return [offer for offer in fitting if ceiling is None or offer.price_usd_per_hour <= ceiling]


def _make_row(
    offer: Offer, batch: OfferBatch, timer: TimerState, boot_s: float | None
) -> MarketOffer:
    return MarketOffer(
        offer=offer,
        is_live=batch.is_live,
        usd_per_pflop_hour=compute_work_price(offer),
        timer=timer,
        boot_s=boot_s,
    )


def _find_timer(context: LabContext, name: str) -> TimerState:
    """Say whether the provider ends a server at its deadline even if the machine hangs."""
    try:
        provider = context.make_provider(name, asks=False)
        if isinstance(provider, Deadline):
            return "setup" if provider.missing_deadline_setup else "yes"
    except LabError:
        return "no"
    return "no"
