"""AWS's machines in gpuhunt's catalog, for offers without credentials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from labctl.model import Need, Offer
from labctl.providers.aws.fit import OLD_GPUS, PROVIDER
from labctl.providers.aws.settings import AwsSettings
from labctl.providers.catalog_offers import CatalogSource, list_catalog_offers
from labctl.providers.price_catalog import CatalogRow

# The catalog has hundreds of types without a GPU; these are the usual ones.
CPU_FAMILIES = ("t3.", "m7i.", "c7i.")


def list_priced_offers(
    settings: AwsSettings, regions: Sequence[str], need: Need, cache_dir: Path | None
) -> list[Offer]:
    """List the offers that fit in these regions."""

    def is_wanted(offer: Offer) -> bool:
        can_drive = bool(settings.ami) or offer.gpu_name not in OLD_GPUS
        return offer.region in regions and can_drive

    return list_catalog_offers(_CATALOG, need, cache_dir, is_wanted)


def _select(row: CatalogRow) -> tuple[str, str] | None:
    is_offered = row.gpu_maker == "nvidia" if row.gpu_count else row.type.startswith(CPU_FAMILIES)
    return (row.location, "") if is_offered else None


_CATALOG = CatalogSource(provider=PROVIDER, title="AWS", catalog="aws", select=_select)
