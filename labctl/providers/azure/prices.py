"""Prices from Microsoft's Retail Prices API, which needs no account.

learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices: one request for each
region, in pages. An item is one meter: of Linux or Windows, on demand, spot or of low priority.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import msgspec

from labctl.decoding import decode_json
from labctl.errors import ConnectError
from labctl.http_client import describe_failure, open_session, read_body
from labctl.model import GIB, Offer, Value
from labctl.providers.azure.hardware import CPU_SIZES, GPU_PREFIX, SIZES
from labctl.providers.azure.tags import PROVIDER
from labctl.providers.offer_filter import DEFAULT_ARCH
from labctl.providers.price_catalog import CatalogRow, PriceCatalog, load_cached

TIMEOUT_S = 20.0
MOST_BYTES, MOST_PAGES = 16 * 1024**2, 20
# The endings of a meter's skuName, and a part of the productName of Windows.
SPOT, LOW_PRIORITY, WINDOWS = " Spot", " Low Priority", " Windows"


class RetailItem(Value, frozen=True, rename="camel"):
    arm_sku_name: str = ""
    arm_region_name: str = ""
    sku_name: str = ""
    product_name: str = ""
    unit_of_measure: str = ""
    currency_code: str = ""
    retail_price: float = 0.0


class RetailPage(Value, frozen=True):
    items: tuple[RetailItem, ...] = msgspec.field(default=(), name="Items")
    next_page: str | None = msgspec.field(default=None, name="NextPageLink")


def load_prices(url: str, regions: Iterable[str], cache_dir: Path | None) -> list[PriceCatalog]:
    """Load the prices of each region, from labctl's cache or the API.

    ConnectError if a region's are in neither.
    """
    wanted = tuple(dict.fromkeys(regions))
    with ThreadPoolExecutor(max(1, min(4, len(wanted)))) as threads:
        return list(
            threads.map(
                lambda region: load_cached(
                    f"{PROVIDER}-{region}", cache_dir, partial(_download, url, region)
                ),
                wanted,
            )
        )


def list_priced_offers(catalogs: Iterable[PriceCatalog]) -> list[Offer]:
    """List every size in every region, on demand and spot."""
    return [
        _make_offer(row, catalog)
        for catalog in catalogs
        for row in catalog.rows
        if row.type in SIZES
    ]


def _make_offer(row: CatalogRow, catalog: PriceCatalog) -> Offer:
    on_demand = (one for one in catalog.rows if one.type == row.type and not one.spot)
    return Offer(
        provider=PROVIDER,
        type=row.type,
        region=row.location,
        cpus=row.cpus,
        memory_bytes=int(row.memory_gib * GIB),
        arch=row.arch,
        gpu_name=row.gpu_name,
        gpu_count=row.gpu_count,
        gpu_memory_bytes=int(row.gpu_memory_gib * GIB),
        price_usd_per_hour=row.price_usd_per_hour,
        spot=row.spot,
        on_demand_usd_per_hour=next((one.price_usd_per_hour for one in on_demand), None),
        priced_at=catalog.published_at,
    )


def _download(url: str, region: str) -> PriceCatalog:
    names = " or ".join(f"armSkuName eq '{name}'" for name in CPU_SIZES)
    condition = (
        f"serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and "
        f"armRegionName eq '{region}' and (contains(armSkuName, '{GPU_PREFIX}') or {names})"
    )
    address: str | None = f"{url}?{urlencode({'$filter': condition})}"
    rows: list[CatalogRow] = []
    try:
        with open_session() as session:
            for _ in range(MOST_PAGES):
                if not address:
                    break
                with session.get(address, timeout=TIMEOUT_S, stream=True) as response:
                    response.raise_for_status()
                    body = read_body(response, MOST_BYTES)
                page = decode_json(body, RetailPage)
                rows += [_make_row(item) for item in page.items if _is_wanted(item)]
                address = page.next_page
    except (OSError, msgspec.DecodeError) as error:
        raise ConnectError(
            f"Azure's prices in {region} could not be downloaded",
            why=describe_failure(error, url),
            hint="check the network, then run the same command again",
        ) from error
    now = time.time()
    return PriceCatalog(published_at=now, fetched_at=now, rows=tuple(rows))


def _is_wanted(item: RetailItem) -> bool:
    return (
        item.arm_sku_name in SIZES
        and item.currency_code == "USD"
        and item.unit_of_measure == "1 Hour"
        and WINDOWS not in item.product_name
        and not item.sku_name.endswith(LOW_PRIORITY)
    )


def _make_row(item: RetailItem) -> CatalogRow:
    size = SIZES[item.arm_sku_name]
    return CatalogRow(
        type=item.arm_sku_name,
        location=item.arm_region_name,
        price_usd_per_hour=item.retail_price,
        cpus=size.cpus,
        memory_gib=size.memory_gib,
        gpu_count=size.gpus,
        gpu_name=size.gpu,
        gpu_memory_gib=size.gpu_memory_gib,
        gpu_maker="nvidia" if size.gpus else "",
        spot=item.sku_name.endswith(SPOT),
        arch=DEFAULT_ARCH,
    )
