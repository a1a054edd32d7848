"""The offers: what hosts rent out now, on demand and to the highest bid."""

from __future__ import annotations

import math
import re
import time

from msgspec import UNSET

from labctl.errors import NoOfferError
from labctl.model import Need, Offer
from labctl.providers.gpu_names import name_gpu
from labctl.providers.offer_filter import select_offers
from labctl.providers.vast.api import Ask, Condition, Market, SearchRequest, VastInstance
from labctl.providers.vast.cloud import VastCloud
from labctl.providers.vast.settings import VastSettings

PROVIDER = "vast"
MIB = 1024 * 1024
# As many as all machines that run VMs, so that expensive GPUs are among the cheapest of these.
MOST_OFFERS = 1000
ZONE = "ask-"
# Vast.ai takes bids in hundredths of a cent.
BID_DIGITS, BID_STEP_USD = 4, 0.0001


def list_offers(cloud: VastCloud, settings: VastSettings, need: Need) -> list[Offer]:
    """List the offers that fit, the cheapest first; NoOfferError if none does."""
    markets: list[Market] = [] if need.spot == "only" else ["ondemand"]
    markets += [] if need.spot == "never" else ["bid"]
    listed = [
        parse_ask(ask, market, settings)
        for market in markets
        for search in build_searches(settings, need, market)
        for ask in cloud.search(search)
    ]
    try:
        return select_offers("Vast.ai", need, listed)
    except NoOfferError as error:
        error.why = f"{error.why}\n{_describe_conditions(settings, need)}"
        raise


def find_ask(
    cloud: VastCloud, settings: VastSettings, need: Need, offer: Offer
) -> tuple[Ask, Offer] | None:
    """Look an offer up again: what it costs now; None if it is gone."""
    market: Market = "bid" if offer.spot else "ondemand"
    ask_id = get_ask_id(offer)
    for search in build_searches(settings, need, market, ask_id):
        for ask in cloud.search(search):
            if str(ask.id) == ask_id:
                return ask, parse_ask(ask, market, settings)
    return None


def get_ask_id(offer: Offer) -> str:
    return offer.zone.removeprefix(ZONE)


def build_searches(
    settings: VastSettings, need: Need, market: Market, ask_id: str = ""
) -> list[SearchRequest]:
    """Build the searches for what the settings allow; what the need asks for is filtered later.

    A search shows machines that are verified, or those that are not.
    """
    kinds = (True,) if settings.verified else (True, False)
    return [_build_search(settings, need, market, ask_id, verified) for verified in kinds]


def _build_search(
    settings: VastSettings, need: Need, market: Market, ask_id: str, verified: bool
) -> SearchRequest:
    yes = Condition(eq=True)
    return SearchRequest(
        type=market,
        limit=1 if ask_id else MOST_OFFERS,
        order=(("dph_total", "asc"), ("id", "asc")),
        allocated_storage=settings.disk_gb,
        disk_space=Condition(gte=settings.disk_gb),
        rentable=yes,
        vms_enabled=yes,
        gpu_arch=Condition(eq="nvidia"),
        num_gpus=Condition(gte=1),
        # sshd is reached through a port of the host.
        direct_port_count=Condition(gte=1),
        reliability=Condition(gte=settings.reliability),
        id=Condition(eq=int(ask_id)) if ask_id else UNSET,
        verified=Condition(eq=verified),
        datacenter=yes if settings.datacenter else UNSET,
        geolocation=Condition(in_=settings.countries) if settings.countries else UNSET,
        duration=Condition(gte=need.ttl_s) if need.ttl_s else UNSET,
    )


def _describe_conditions(settings: VastSettings, need: Need) -> str:
    """Say what the search itself asked for: Vast.ai does not count what that rules out."""
    conditions = [
        "VMs",
        f"a free disk of {settings.disk_gb} GB",
        f"a reliability of at least {settings.reliability:g}",
        *(["verified"] if settings.verified else []),
        *(["in a data center"] if settings.datacenter else []),
        *([f"in {', '.join(settings.countries)}"] if settings.countries else []),
        *(["available for the whole ttl"] if need.ttl_s else []),
    ]
    return f"labctl asked only for machines with: {'; '.join(conditions)} (server.vast)"


def parse_ask(ask: Ask, market: Market, settings: VastSettings) -> Offer:
    """Turn an offer of Vast.ai into labctl's. Its price includes the disk, not the traffic."""
    price = ask.dph_total
    if market == "bid":
        # Shown is the price at the least bid; an instance pays what it bids.
        price += compute_bid(ask, settings) - (ask.min_bid or 0.0)
    return Offer(
        provider=PROVIDER,
        type=_make_type(ask.num_gpus, ask.gpu_name),
        region=_parse_country(ask.geolocation),
        zone=f"{ZONE}{ask.id}",
        cpus=int(ask.cpu_cores_effective or 0),
        memory_bytes=int(ask.cpu_ram * min(1.0, ask.gpu_frac)) * MIB,
        arch=_parse_arch(ask.cpu_arch),
        gpu_name=name_gpu(ask.gpu_name, int(ask.gpu_ram) * MIB),
        gpu_count=ask.num_gpus,
        gpu_memory_bytes=int(ask.gpu_ram) * MIB,
        price_usd_per_hour=round(price, BID_DIGITS),
        spot=market == "bid",
        priced_at=time.time(),
    )


def parse_rented(instance: VastInstance) -> Offer:
    """Return what an instance consists of, as an offer; its zone is its machine."""
    gpu_name, memory_bytes = instance.gpu_name or "", int(instance.gpu_ram or 0) * MIB
    share = min(1.0, instance.gpu_frac or 1.0)
    return Offer(
        provider=PROVIDER,
        type=_make_type(instance.num_gpus, gpu_name),
        region=_parse_country(instance.geolocation),
        zone=f"machine-{instance.machine_id}",
        cpus=int(instance.cpu_cores_effective or 0),
        memory_bytes=int((instance.cpu_ram or 0) * share) * MIB,
        arch=_parse_arch(instance.cpu_arch),
        gpu_name=name_gpu(gpu_name, memory_bytes),
        gpu_count=instance.num_gpus,
        gpu_memory_bytes=memory_bytes,
        price_usd_per_hour=round(instance.dph_total or 0.0, BID_DIGITS),
        spot=instance.is_bid,
    )


def compute_bid(ask: Ask, settings: VastSettings) -> float:
    """Return the bid for an offer, in USD per hour."""
    bid = (ask.min_bid or 0.0) * (1 + settings.bid_over_minimum / 100)
    return round(math.ceil(round(bid / BID_STEP_USD, 6)) * BID_STEP_USD, BID_DIGITS)


def _make_type(count: int, gpu_name: str) -> str:
    return f"{count}x_{gpu_name.replace(' ', '_')}"


def _parse_country(geolocation: str | None) -> str:
    """Return the two letters at the end of "California, US"; "" if there are none."""
    last = (geolocation or "").rpartition(",")[2].strip()
    return last if re.fullmatch(r"[A-Z]{2}", last) else ""


def _parse_arch(cpu_arch: str | None) -> str:
    return "arm64" if cpu_arch in ("arm64", "aarch64") else "x86_64"
