"""The price of work: what a unit of a GPU's peak performance costs at an offer."""

from __future__ import annotations

from labctl.estimate.cards import find_peak_speed
from labctl.model import Need, Offer

# TFLOPS in a PFLOPS, and GB/s in a TB/s.
THOUSAND = 1000.0


def compute_work_price(offer: Offer, work: str = "fp16") -> float | None:
    """Compute the dollars of one hour at one PFLOP/s, or at 1 TB/s for "bandwidth".

    That is by the GPUs' published peak, dense: `labctl/estimate/cards.py` names the sources. None
    for a GPU that is not listed there.
    """
    speed = find_peak_speed(offer.gpu_name, offer.gpu_memory_bytes, work)
    if not speed or not offer.gpu_count:
        return None
    return offer.price_usd_per_hour / (speed * offer.gpu_count) * THOUSAND


def make_rank(offer: Offer, need: Need) -> tuple[bool, float, float, bool, str, str, str]:
    """Return the key that sorts offers of several providers, the best first.

    By price per unit of `need.work`, or by price per hour without it; unknown speeds come last.
    """
    price = offer.price_usd_per_hour
    work_price = compute_work_price(offer, need.work) if need.work else price
    measure = price if work_price is None else work_price
    place = (offer.provider, offer.type, offer.zone)
    return work_price is None, measure, price, not offer.spot, *place
