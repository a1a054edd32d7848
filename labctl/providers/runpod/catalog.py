"""The offers: each GPU model, once for each data center that has it in stock.

Without a key, they are those of gpuhunt's catalog.
"""

from __future__ import annotations

import time
from pathlib import Path

from msgspec.structs import replace

from labctl.model import GIB, Need, Offer
from labctl.providers.catalog_offers import CatalogSource, list_catalog_offers
from labctl.providers.gpu_names import name_gpu
from labctl.providers.offer_filter import select_offers
from labctl.providers.price_catalog import CatalogRow
from labctl.providers.runpod.api import NO_STOCK, CloudTier, GpuType
from labctl.providers.runpod.cloud import RunPodCloud
from labctl.providers.runpod.settings import RunPodSettings
from labctl.providers.runpod.tags import PROVIDER

# The others' runtime libraries are not those of labctl's images and meters.
MAKER = "NVIDIA"
_TIERS: dict[str, tuple[CloudTier, ...]] = {
    "secure": ("SECURE",),
    "community": ("COMMUNITY",),
    "any": ("SECURE", "COMMUNITY"),
}
# The zone of an offer that no data center has in stock.
NOWHERE = "-"


def list_offers(cloud: RunPodCloud, settings: RunPodSettings, need: Need) -> list[Offer]:
    """List the offers that fit, the cheapest first; NoOfferError if none does."""
    count = max(1, need.gpu.count)
    listed = [
        offer
        for tier in _TIERS[settings.cloud]
        for kind in cloud.list_gpu_types(tier, count)
        if kind.manufacturer == MAKER and _count_most(kind, tier) >= count
        for offer in _list_places(kind, tier, count, settings)
    ]
    return select_offers("RunPod", need, listed, lambda offer: offer.zone != NOWHERE)


def list_priced_offers(settings: RunPodSettings, need: Need, cache_dir: Path | None) -> list[Offer]:
    """List the offers that fit, with a price from gpuhunt's catalog."""
    tiers = [tier.lower() for tier in _TIERS[settings.cloud]]
    count = max(1, need.gpu.count)

    def is_wanted(offer: Offer) -> bool:
        is_in_center = not settings.data_centers or offer.zone in settings.data_centers
        return offer.region in tiers and offer.gpu_count == count and is_in_center

    return list_catalog_offers(_CATALOG, need, cache_dir, is_wanted)


def _select_row(row: CatalogRow) -> tuple[str, str] | None:
    """Place a GPU model. Rows with flags are of pods without GPUs, or of several at once."""
    if row.flags or not row.gpu_count or row.gpu_maker != MAKER.lower():
        return None
    # The catalog names a data center, or the country of other people's machines.
    if "-" in row.location:
        return "secure", row.location
    return "community", ""


_CATALOG = CatalogSource(provider=PROVIDER, title="RunPod", catalog="runpod", select=_select_row)


def _list_places(
    kind: GpuType, tier: CloudTier, count: int, settings: RunPodSettings
) -> list[Offer]:
    """Return one offer for each data center with stock, or a single one at NOWHERE."""
    price = kind.price.secure if tier == "SECURE" else kind.price.community
    base = Offer(
        provider=PROVIDER,
        type=kind.id,
        region=tier.lower(),
        zone=NOWHERE,
        # The Grace CPU of a GH200 is Arm.
        arch="arm64" if "GH200" in kind.id else "x86_64",
        gpu_name=name_gpu(kind.name, kind.memory * GIB),
        gpu_count=count,
        gpu_memory_bytes=kind.memory * GIB,
        price_usd_per_hour=round(price * count, 4),
        priced_at=time.time(),
    )
    zones = [
        center.id
        for center in kind.data_centers
        if center.availability != NO_STOCK
        and (not settings.data_centers or center.id in settings.data_centers)
    ]
    if not zones and kind.availability != NO_STOCK and not settings.data_centers:
        # Community machines are in stock without a data center: RunPod chooses the place.
        zones = [""]
    return [replace(base, zone=zone) for zone in zones] or [base]


def _count_most(kind: GpuType, tier: CloudTier) -> int:
    """Return how many GPUs the largest machine has; 0 if the model is not in this tier."""
    if tier == "SECURE":
        return kind.max_count.secure if kind.secure else 0
    return kind.max_count.community if kind.community else 0
