"""The quotas of an account, from providers that report them (`QuotaSource`)."""

from __future__ import annotations

from labctl.model import Offer
from labctl.providers import Provider, QuotaRoom, QuotaSource


def has_quotas(provider: Provider) -> bool:
    """Whether the provider limits the servers of an account, and reports the limit."""
    return isinstance(provider, QuotaSource)


def read_room(provider: Provider, offer: Offer) -> QuotaRoom | None:
    """Read how many servers of this offer the quota allows; None if the provider has no quotas."""
    return provider.compute_room(offer) if isinstance(provider, QuotaSource) else None
