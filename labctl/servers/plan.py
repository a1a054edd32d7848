"""The plan of a new server, shown before the user confirms it.

It says what the server is, what it costs, what stops it, and which guards enforce that.
"""

from __future__ import annotations

from collections.abc import Sequence

from labctl.model import Need, Offer
from labctl.providers import Deadline, Provider
from labctl.servers import deadlines
from labctl.servers.cost import HOUR_S
from labctl.text import dollars_text, duration_text, price_text


def describe_plan(
    provider: Provider,
    need: Need,
    offer: Offer,
    others: Sequence[Offer],
    left_usd: float | None,
) -> str:
    """Describe a new server in some lines.

    `others` are the offers that are tried after this one; `left_usd` is the rest of the budget,
    None without one.
    """
    price = offer.price_usd_per_hour
    gpus = f"{offer.gpu_count} x {offer.gpu_name}" if offer.gpu_count else "no GPU"
    lines = [f"{offer.provider} {describe_offer(offer)}: {gpus}, {price_text(price)}"]
    if offer.spot and offer.on_demand_usd_per_hour:
        saving = 1 - price / offer.on_demand_usd_per_hour
        list_price = price_text(offer.on_demand_usd_per_hour)
        lines.append(f"  on demand it costs {list_price}: spot saves {saving:.0%}")
    lines += _describe_limits(provider, need, offer, left_usd)
    if others:
        highest = price_text(max(other.price_usd_per_hour for other in others))
        next_offers = "offer" if len(others) == 1 else f"{len(others)} offers in turn"
        lines.append(f"if it has no capacity, labctl tries the next {next_offers}, up to {highest}")
    return "\n".join(lines)


def _describe_limits(
    provider: Provider, need: Need, offer: Offer, left_usd: float | None
) -> list[str]:
    """Say what stops the server, what it costs at most by then, and which guards it has."""
    price = offer.price_usd_per_hour
    elsewhere = deadlines.is_guarded_elsewhere(provider)
    ttl_s = need.ttl_s if elsewhere else deadlines.ttl_s(need, price)
    limits = [
        f"after {duration_text(ttl_s)}" if ttl_s else "",
        f"when {dollars_text(left_usd)} is spent" if left_usd is not None else "",
        f"after {duration_text(need.idle_s)} without work" if need.idle_s else "",
    ]
    text = ", ".join(filter(None, limits))
    if elsewhere:
        decides = f"the {provider.name} decides when it stops"
        return [f"it stops automatically {text}" if text else decides]
    is_billed = price > 0 and not deadlines.can_end_billing(provider)
    ending = "it powers itself off" if is_billed else "it stops automatically"
    lines = [f"{ending} {text}"] if text else []
    span = deadlines.span_s(need, price, left_usd)
    if deadlines.is_default(need, price):
        default = f"{duration_text(deadlines.DEFAULT_TTL_S)} is the default"
        lines.append(f"  {default}: --ttl or --budget changes it, --no-deadline removes it")
    if span is None and price:
        lines.append(f"it has no deadline: {deadlines.worst_cost(price)}, until labctl down")
    elif span is None:
        lines += [] if text else ["it runs until labctl down"]
    elif price:
        most = dollars_text(span / HOUR_S * price)
        until = f"{provider.name} bills it until labctl down: {most} by then"
        costs = until if is_billed else f"it costs at most {most}"
        lines.append(f"{costs}, plus disk and traffic")
        lines.append(f"guards: {', '.join(deadlines.list_planned_guards(provider))}")
        if isinstance(provider, Deadline) and (lack := provider.missing_deadline_setup):
            lines.append(f"no timer at {provider.name}: {lack}")
    return lines


def describe_offer(offer: Offer) -> str:
    """Return "g4dn.xlarge in us-east-1a spot"."""
    place = offer.zone or offer.region
    where = f"in {place}" if place else ""
    return " ".join(filter(None, [offer.type, where, describe_market(offer)]))


def describe_market(offer: Offer) -> str:
    """Return "spot", "on demand", or "" for an offer without a price."""
    return "spot" if offer.spot else "on demand" if offer.price_usd_per_hour else ""
