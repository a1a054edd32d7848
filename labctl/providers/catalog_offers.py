"""Offers of a cloud without its credentials, at the list prices of gpuhunt's catalog."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from labctl.model import GIB, Need, Offer, Value
from labctl.providers.gpu_names import name_gpu
from labctl.providers.offer_filter import select_offers
from labctl.providers.price_catalog import CatalogRow, find_address, load_catalog


class CatalogSource(Value, frozen=True):
    """Where gpuhunt has the prices of a provider, and which of them labctl can use.

    `title` is the cloud's name for users, `catalog` its name at gpuhunt. `select` takes a row and
    returns the offer's region and zone, None for a machine that labctl does not offer.
    `memory_unit_bytes`: what gpuhunt counts the cloud's main memory in.
    """

    provider: str
    title: str
    catalog: str
    select: Callable[[CatalogRow], tuple[str, str] | None]
    memory_unit_bytes: int = GIB


def list_catalog_offers(
    source: CatalogSource,
    need: Need,
    cache_dir: Path | None,
    is_wanted: Callable[[Offer], bool] = lambda offer: True,
) -> list[Offer]:
    """List the offers that fit at list prices. Nobody knows whether there is capacity.

    `is_wanted` applies the user's own settings. ConnectError if the catalog is not to be had.
    """
    catalog = load_catalog(
        source.catalog, cache_dir, find_address(), lambda row: source.select(row) is not None
    )
    on_demand = {
        (row.type, row.location, row.gpu_count): row.price_usd_per_hour
        for row in catalog.rows
        if not row.spot
    }
    offers = [
        _make_offer(
            source,
            row,
            catalog.published_at,
            on_demand.get((row.type, row.location, row.gpu_count)),
        )
        for row in catalog.rows
    ]
    return select_offers(source.title, need, [offer for offer in offers if is_wanted(offer)])


def _make_offer(
    source: CatalogSource, row: CatalogRow, published_at: float, on_demand: float | None
) -> Offer:
    region, zone = source.select(row) or ("", "")
    memory_bytes = int(row.gpu_memory_gib * GIB) if row.gpu_count else 0
    return Offer(
        provider=source.provider,
        type=row.type,
        region=region,
        zone=zone,
        cpus=row.cpus,
        memory_bytes=int(row.memory_gib * source.memory_unit_bytes),
        arch=row.arch,
        gpu_name=name_gpu(row.gpu_name, memory_bytes) if row.gpu_count else "",
        gpu_count=row.gpu_count,
        gpu_memory_bytes=memory_bytes,
        price_usd_per_hour=row.price_usd_per_hour,
        spot=row.spot,
        on_demand_usd_per_hour=on_demand,
        priced_at=published_at,
    )
