"""Offers for a need, from the cache or from AWS."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labctl.errors import NoOfferError
from labctl.lazy import lazy_imports
from labctl.model import Need, Offer
from labctl.providers.aws import fit
from labctl.providers.aws.catalog import CatalogCache
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.market import Group, load_markets
from labctl.providers.aws.scores import add_scores

if TYPE_CHECKING:
    from labctl.providers.aws.settings import AwsSettings

with lazy_imports(__name__):
    from labctl.providers.aws import network


def offers(
    clients: Clients,
    settings: AwsSettings,
    need: Need,
    regions: Sequence[str],
    directory: Path | None,
    account: str,
) -> list[Offer]:
    """List the offers, best first. `directory` is the cache, `account` its key for this account.

    NoOfferError says what each condition ruled out.
    """
    cache = CatalogCache(directory)
    zone = _find_zone(clients, settings, regions)
    surplus = fit.AwsConditions(any_driver=bool(settings.ami), zone=zone)
    first: Group = "cpu" if need.gpu.kind == "none" else "gpu"
    searched = load_markets(clients, cache, account, regions, first)
    try:
        fitting = fit.offers(need, searched, surplus)
    except NoOfferError:
        if need.gpu.kind != "auto":
            raise
        searched += load_markets(clients, cache, account, regions, "cpu")
        fitting = fit.offers(need, searched, surplus)
    return add_scores(clients, cache, account, fitting)


def _find_zone(clients: Clients, settings: AwsSettings, regions: Sequence[str]) -> str:
    """Return the zone of the configured subnet; "" without one."""
    if not settings.subnet:
        return ""
    return network.find_subnet(clients.get_ec2(regions[0]), settings, "").zone
