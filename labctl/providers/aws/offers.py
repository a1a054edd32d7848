"""Offers for a need: from the cache in an instant, else asked of AWS."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labctl.errors import NoOfferError
from labctl.model import Need, Offer
from labctl.providers.aws import fit
from labctl.providers.aws.catalog import Shelf
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.market import Group, markets
from labctl.providers.aws.scores import with_scores

if TYPE_CHECKING:
    from labctl.providers.aws.settings import AwsSettings


def offers(
    clients: Clients,
    settings: AwsSettings,
    need: Need,
    regions: Sequence[str],
    directory: Path | None,
    account: str,
) -> list[Offer]:
    """The best first. `directory` is the cache, which `account` marks as this account's.

    NoOfferError says what each condition ruled out.
    """
    shelf = Shelf(directory)
    surplus = fit.Surplus(any_driver=bool(settings.ami), zone=_zone(clients, settings, regions))
    first: Group = "cpu" if need.gpu.kind == "none" else "gpu"
    known = markets(clients, shelf, account, regions, first)
    try:
        found = fit.offers(need, known, surplus)
    except NoOfferError:
        if need.gpu.kind != "auto":
            raise
        known += markets(clients, shelf, account, regions, "cpu")
        found = fit.offers(need, known, surplus)
    return with_scores(clients, shelf, account, found)


def _zone(clients: Clients, settings: AwsSettings, regions: Sequence[str]) -> str:
    """The zone of the given subnet; "" where none is given."""
    if not settings.subnet:
        return ""
    from labctl.providers.aws.network import place

    return place(clients.ec2(regions[0]), settings, "").zone
