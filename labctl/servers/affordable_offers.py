"""The offers that a lab can pay for: within its price limit and the rest of its budget."""

from __future__ import annotations

import time

from labctl.errors import BudgetError, NoOfferError
from labctl.events import report_wait
from labctl.model import Need, Offer
from labctl.servers.context import LabContext
from labctl.servers.cost import spent_usd
from labctl.servers.offers import list_offers
from labctl.servers.provider_traits import describe_provider
from labctl.text import dollars_text, price_text

# Kind of the ledger's line about a zone that reclaimed a server.
LEFT = "zone-left"
AVOID_S = 3600.0


def list_affordable_offers(context: LabContext, need: Need) -> list[Offer]:
    """List the offers within price and budget, those in recently reclaimed zones last."""
    with report_wait(
        context.reporter, f"looking for a server ({describe_provider(context.provider)})"
    ):
        offers = list_offers(context, need)
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
