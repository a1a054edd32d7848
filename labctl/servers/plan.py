"""The plan of a new server, as a person reads it before the question: what it is, what it costs,
what ends it and which guards hold that."""

from __future__ import annotations

from collections.abc import Sequence

from labctl.model import Need, Offer
from labctl.providers import Deadline, Provider
from labctl.servers import deadlines
from labctl.servers.cost import HOUR_S


def describe_plan(
    provider: Provider,
    need: Need,
    offer: Offer,
    others: Sequence[Offer],
    left_usd: float | None,
) -> str:
    """`others` are the offers that are tried after this one, `left_usd` is left of the budget."""
    price = offer.price_usd_per_hour
    gpus = f"{offer.gpu_count} x {offer.gpu_name}" if offer.gpu_count else "no GPU"
    lines = [f"{offer.provider} {offer_name(offer)}: {gpus}, {price:.4f} USD/h"]
    if offer.spot and offer.on_demand_usd_per_hour:
        saving = 1 - price / offer.on_demand_usd_per_hour
        lines.append(
            f"  on demand it costs {offer.on_demand_usd_per_hour:.4f}: spot saves {saving:.0%}"
        )
    lines += _ends(provider, need, offer, left_usd)
    if others:
        dearest = max(one.price_usd_per_hour for one in others)
        lines.append(f"without capacity there: {len(others)} more offers up to {dearest:.4f} USD/h")
    return "\n".join(lines)


def _ends(provider: Provider, need: Need, offer: Offer, left_usd: float | None) -> list[str]:
    """What ends it, what it costs at most by then, and the guards."""
    price = offer.price_usd_per_hour
    elsewhere = deadlines.is_guarded_elsewhere(provider)
    ttl_s = need.ttl_s if elsewhere else deadlines.ttl_s(need, price)
    ends = [
        f"after {ttl_s / HOUR_S:.1f} h" if ttl_s else "",
        f"when {left_usd:.2f} dollars are spent" if left_usd is not None else "",
        f"after {need.idle_s / 60:.0f} min without work" if need.idle_s else "",
    ]
    said = ", ".join(filter(None, ends))
    if elsewhere:
        return [f"it stops itself {said}" if said else f"{provider.name} sets when it ends"]
    lines = [f"it stops itself {said}"] if said else []
    span = deadlines.span_s(need, price, left_usd)
    if deadlines.is_default(need, price):
        default = f"{deadlines.DEFAULT_TTL_S / HOUR_S:.1f} h is the default"
        lines.append(f"  {default}: --ttl or --budget changes it, --no-deadline removes it")
    if span is None:
        lines.append(
            f"it has no deadline: {deadlines.worst_cost(price)}, until labctl down"
            if price
            else "nothing but `labctl down` ends it"
        )
    elif price:
        lines.append(
            f"it costs {span / HOUR_S * price:.2f} dollars at most, disk and traffic aside"
        )
        lines.append(f"guards: {', '.join(deadlines.planned_guards(provider))}")
        if isinstance(provider, Deadline) and (lack := provider.deadline_lacks):
            lines.append(f"no timer at {provider.name}: {lack}")
    return lines


def offer_name(offer: Offer) -> str:
    """ "g4dn.xlarge in us-east-1a spot"."""
    where = f"in {offer.zone}" if offer.zone else ""
    return " ".join(filter(None, [offer.type, where, market_name(offer)]))


def market_name(offer: Offer) -> str:
    return "spot" if offer.spot else "on demand" if offer.price_usd_per_hour else ""
