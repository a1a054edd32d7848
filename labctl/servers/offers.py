"""The offers of a provider that fit a lab's need, whatever the provider knows of it."""

from __future__ import annotations

from labctl.config.reader import find_nearest
from labctl.errors import NoOfferError
from labctl.model import Need, Offer
from labctl.servers.context import LabContext


def list_offers(context: LabContext, need: Need) -> list[Offer]:
    """List the provider's offers for the need, the best first.

    NoOfferError if some fit, but none is of the machine type that the need names.
    """
    offers = context.provider.offers(need)
    fitting = filter_by_type(offers, need)
    if offers and not fitting:
        types = sorted({offer.type for offer in offers})
        near = find_nearest(need.type, types)
        raise NoOfferError(
            f"{context.provider.name} has no {need.type} for {context.name}",
            why=f"did you mean {near}?" if near else f"what fits: {', '.join(types[:8])}",
            hint=lambda subject: subject.offers,
            subject=context.subject,
        )
    return fitting


def filter_by_type(offers: list[Offer], need: Need) -> list[Offer]:
    """Return the offers of the machine type that the need names; all if it names none."""
    return [offer for offer in offers if need.type in ("", offer.type)]
