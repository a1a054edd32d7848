"""The prices of the rehearsal, in the form of Microsoft's Retail Prices API."""

from __future__ import annotations

import re

import msgspec

from labctl.model import Value
from labctl.rehearsal.azure.hardware import SIZE_LIST, SPOT_SHARE, SizeFacts
from labctl.rehearsal.azure.scenario import AzureScenario

PAGE = 10
_REGION = re.compile(r"armRegionName eq '([a-z0-9]+)'")


class PriceItem(Value, frozen=True, rename="camel"):
    arm_sku_name: str
    arm_region_name: str
    sku_name: str
    product_name: str
    retail_price: float
    unit_of_measure: str = "1 Hour"
    currency_code: str = "USD"
    type: str = "Consumption"
    service_name: str = "Virtual Machines"


class PricePage(Value, frozen=True):
    """A page; the real one has up to 1,000 items."""

    items: tuple[PriceItem, ...] = msgspec.field(name="Items")
    next_page: str | None = msgspec.field(name="NextPageLink")


def build_page(scenario: AzureScenario, condition: str, skip: int, url: str) -> PricePage:
    """Build a page of the prices in the region that the condition names."""
    match = _REGION.search(condition)
    region = match[1] if match else ""
    items = [
        item
        for number, name in enumerate(scenario.regions)
        if name == region
        for size in SIZE_LIST
        for item in _list_items(scenario, size, region, 1 + 0.05 * number)
    ]
    end = skip + PAGE
    following = f"{url}&$skip={end}" if end < len(items) else None
    return PricePage(items=tuple(items[skip:end]), next_page=following)


def _list_items(
    scenario: AzureScenario, size: SizeFacts, region: str, factor: float
) -> list[PriceItem]:
    """List the meters of a size: each further region costs 5% more."""
    price = scenario.prices.get(size.name, size.usd_per_hour) * factor
    meter = size.name.removeprefix("Standard_").replace("_", " ")
    series = "Virtual Machines Series"
    meters = (
        (meter, series, price),
        (f"{meter} Spot", series, price * SPOT_SHARE),
        (f"{meter} Low Priority", series, price * 0.2),
        (meter, f"{series} Windows", price * 1.8),
    )
    return [
        PriceItem(
            arm_sku_name=size.name,
            arm_region_name=region,
            sku_name=sku,
            product_name=product,
            retail_price=round(amount, 6),
        )
        for sku, product, amount in meters
    ]
