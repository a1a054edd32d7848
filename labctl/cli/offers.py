"""The command offers: the servers that a provider, or all providers, would create, with prices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from labctl.cli.exit_codes import clean
from labctl.cli.options import json_option, need_options, open_lab
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.errors import NoOfferError
from labctl.events import report_wait
from labctl.lazy import lazy_imports
from labctl.providers import MARKET
from labctl.servers.provider_traits import describe_provider
from labctl.text import (
    bytes_text,
    count_text,
    dollars_text,
    duration_text,
    optional_text,
    price_or_free_text,
    price_range_text,
    price_text,
)

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.model import Offer
    from labctl.servers.context import LabContext
    from labctl.servers.market import MarketListing, MarketOffer

with lazy_imports(__name__):
    from labctl.servers import market, provider_choice
    from labctl.servers import offers as server_offers

MAX_OFFERS_SHOWN = 20
MARKET_HEADINGS = (
    "PROVIDER", "TYPE", "GPU", "MEMORY", "ZONE", "PRICE", "MARKET", "$/PFLOP-H", "TIMER", "BOOT",
    "PRICES",
)  # fmt: skip
WORK_NOTE = "$/PFLOP-H: dollars for one hour at one PFLOP/s, by the GPUs' published dense fp16 peak"
# Left out on a narrow screen, in this order.
LESS_IMPORTANT = ("BOOT", "TIMER", "ZONE", "MEMORY", "$/PFLOP-H", "GPU")


@click.command("offers")
@need_options
@click.option("--all", "all_", is_flag=True, help=f"List more than the best {MAX_OFFERS_SHOWN}.")
@json_option
@click.pass_context
def offers_command(ctx: click.Context, /, all_: bool, json_: bool, **overrides: str) -> None:
    """List the servers that meet the requirements, the best first, with prices.

    With --provider auto, and outside any lab, it lists those of all providers side by side.

    \b
    labctl offers --gpu any --min-gpu-memory 16GB --max-price 1.50
    labctl offers --provider auto --gpu A100
    """
    context = _choose_context(open_lab(ctx, quiet=json_, overrides=overrides, needs_file=False))
    need = context.config.server.need
    with report_wait(
        context.reporter, f"looking for a server ({describe_provider(context.provider)})"
    ):
        listing = market.list_market(context, need)
        offers = [] if listing else server_offers.list_offers(context, need)
    if listing:
        _show_market(listing, all_=all_, json_=json_)
        return
    if json_:
        print_json({"offers": offers})
    elif offers:
        _print_offers(offers if all_ else offers[:MAX_OFFERS_SHOWN], len(offers))
    if not offers:
        raise NoOfferError(
            f"{context.provider.name} has no server that meets the requirements",
            hint="labctl config   # shows what the lab needs",
        )


def _choose_context(lab: Lab) -> LabContext:
    """Return the lab's context, with all providers where it gets its servers from all.

    Outside any lab, nothing has chosen a provider.
    """
    config = lab.config
    candidates = provider_choice.list_candidates(config)
    is_outside = not config.path.exists() and "server.provider" not in config.origins
    if is_outside or any(map(provider_choice.is_market, candidates)):
        return provider_choice.select_provider(lab.context, MARKET)
    return lab.context


def _show_market(listing: MarketListing, *, all_: bool, json_: bool) -> None:
    shown = listing.offers if all_ else _select_best(listing.offers)[:MAX_OFFERS_SHOWN]
    if json_:
        print_json(_as_json(listing))
    elif shown:
        _print_market(shown, len(listing.offers))
    if not json_:
        reasons = {**listing.failures, **(listing.left_out if all_ or not shown else {})}
        for name, why in reasons.items():
            print_message(clean(f"{name}: {why}"))
    if not listing.offers:
        failed = len(listing.failures)
        raise NoOfferError(
            "no provider has a server that meets the requirements, as far as labctl could ask"
            if failed
            else "no provider has a server that meets the requirements",
            why=f"{count_text(failed, 'provider')} could not be asked" if failed else "",
            hint="labctl config   # shows what the lab needs",
        )


def _select_best(rows: Sequence[MarketOffer]) -> list[MarketOffer]:
    """Select the best zone of each machine type, so that every provider has its place."""
    best: dict[tuple[str, str, bool], MarketOffer] = {}
    for row in rows:
        best.setdefault((row.offer.provider, row.offer.type, row.offer.spot), row)
    return list(best.values())


def _as_json(listing: MarketListing) -> dict[str, object]:
    """Return what --json prints: the keys of an offer, and what the market adds to them."""
    offers = [
        {**msgspec.to_builtins(row.offer), **_drop_offer(msgspec.to_builtins(row))}
        for row in listing.offers
    ]
    return {"offers": offers, "failures": listing.failures, "left_out": listing.left_out}


def _drop_offer(row: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in row.items() if key != "offer"}


def _print_market(rows: Sequence[MarketOffer], total: int) -> None:
    shown = print_table(
        [_format_row(row) for row in rows], MARKET_HEADINGS, optional=LESS_IMPORTANT
    )
    has_work_prices = any(row.usd_per_pflop_hour is not None for row in rows)
    notes = [WORK_NOTE] if has_work_prices and "$/PFLOP-H" in shown else []
    if total > len(rows):
        notes.append(f"and {total - len(rows)} more, in other zones too: --all")
    for note in notes:
        print_message(note)


def _format_row(row: MarketOffer) -> tuple[str, ...]:
    offer = row.offer
    count = f"{offer.gpu_count}x " if offer.gpu_count > 1 else ""
    return (
        offer.provider,
        offer.type,
        f"{count}{offer.gpu_name}" if offer.gpu_count else "-",
        bytes_text(offer.gpu_memory_bytes) if offer.gpu_memory_bytes else "-",
        offer.zone or offer.region or "-",
        price_or_free_text(offer.price_usd_per_hour),
        _market_text(offer),
        optional_text(row.usd_per_pflop_hour, dollars_text),
        row.timer,
        optional_text(row.boot_s, duration_text),
        _age_text(row),
    )


def _age_text(row: MarketOffer) -> str:
    """Say where a price comes from, and how old it is."""
    at = row.offer.priced_at
    age = duration_text(time.time() - at) if at else ""
    if row.is_live:
        return ", ".join(filter(None, ["live", age]))
    return ", ".join(filter(None, ["catalog", age, "no credentials"]))


def _print_offers(offers: Sequence[Offer], total: int) -> None:
    has_free = any(offer.all_gpus for offer in offers)
    rows = [
        (
            offer.type,
            _format_gpu(offer),
            *((_format_free_gpus(offer),) if has_free else ()),
            offer.zone or "-",
            price_or_free_text(offer.price_usd_per_hour),
            _week_range_text(offer),
            _list_price_text(offer),
            _market_text(offer),
        )
        for offer in offers
    ]
    free = ("FREE GPUS",) if has_free else ()
    headings = ("TYPE", "GPU", *free, "ZONE", "PRICE", "7 DAYS", "LIST", "MARKET")
    # The market names the discount too, and the type implies the GPU.
    print_table(rows, headings, optional=("LIST", "7 DAYS", "ZONE", "GPU"))
    oldest = min((offer.priced_at for offer in offers if offer.priced_at), default=0.0)
    notes = [f"prices {duration_text(time.time() - oldest)} old"] if oldest else []
    notes += [f"and {total - len(offers)} more: --all"] if total > len(offers) else []
    if notes:
        print_message("; ".join(notes))


def _format_gpu(offer: Offer) -> str:
    if not offer.gpu_count:
        return "-"
    count = f"{offer.gpu_count}x " if offer.gpu_count > 1 else ""
    memory = bytes_text(offer.gpu_memory_bytes) if offer.gpu_memory_bytes else ""
    return f"{count}{offer.gpu_name} {memory}".rstrip()


def _format_free_gpus(offer: Offer) -> str:
    return f"{offer.free_gpus} of {offer.all_gpus}" if offer.all_gpus else "-"


def _list_price_text(offer: Offer) -> str:
    return optional_text(offer.on_demand_usd_per_hour or None, price_text)


def _week_range_text(offer: Offer) -> str:
    low, high = offer.week_low_usd_per_hour, offer.week_high_usd_per_hour
    return price_range_text(low, high) if low is not None and high is not None else "-"


def _market_text(offer: Offer) -> str:
    """Write "on demand", or "spot" with its discount from the list price."""
    if not offer.spot:
        return "on demand" if offer.price_usd_per_hour else "-"
    list_price = offer.on_demand_usd_per_hour
    return f"spot -{1 - offer.price_usd_per_hour / list_price:.0%}" if list_price else "spot"
