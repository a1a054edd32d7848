"""Fetch AWS's machine types and prices, all regions in parallel, and cache them for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal, cast

import msgspec

from labctl.decoding import decode_json
from labctl.model import Value
from labctl.providers.aws.catalog import (
    PRICES_FRESH_S,
    TYPES_FRESH_S,
    VERSION,
    Catalog,
    CatalogCache,
    Hardware,
    Market,
    Prices,
    SpotPrice,
)
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import translate_errors

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.literals import InstanceTypeType
    from mypy_boto3_ec2.type_defs import FilterTypeDef, InstanceTypeInfoTypeDef, SpotPriceTypeDef
    from mypy_boto3_pricing.type_defs import FilterTypeDef as ProductFilterTypeDef

WEEK = timedelta(days=7)
MIB = 1024**2
PRICING_REGION = "us-east-1"
TYPES_PER_CALL = 8
MOST_FILTERED = 200
THREADS = 12

Group = Literal["gpu", "cpu"]
# Types without GPU: small, current, at least 8 GiB, and none that charges for bursts (as t3 does).
CPU_TYPES = (
    *("m7i-flex.large", "m7i-flex.xlarge", "m7i-flex.2xlarge"),
    *("c7i-flex.xlarge", "c7i-flex.2xlarge", "c7i-flex.4xlarge"),
    *("m7g.large", "m7g.xlarge", "c7g.xlarge", "c7g.2xlarge"),
)
PATTERNS: dict[Group, tuple[str, ...]] = {"gpu": ("g*", "p*"), "cpu": CPU_TYPES}


class PricedProduct(Value, frozen=True):
    """What a document of the price list is about: the attributes of an instance type."""

    attributes: dict[str, str] = msgspec.field(default_factory=dict)


class UnitPrice(Value, frozen=True, rename="camel"):
    """A price by currency for one unit, such as "Hrs"."""

    unit: str = ""
    price_per_unit: dict[str, str] = msgspec.field(default_factory=dict)


class PriceTerm(Value, frozen=True, rename="camel"):
    """An offer with its prices by AWS's codes."""

    price_dimensions: dict[str, UnitPrice] = msgspec.field(default_factory=dict)


class PriceTerms(Value, frozen=True):
    """Offers by AWS's codes; the list has reservations too."""

    on_demand: dict[str, PriceTerm] = msgspec.field(name="OnDemand", default_factory=dict)


class PriceDocument(Value, frozen=True):
    """One document of AWS's price list."""

    product: PricedProduct = PricedProduct()
    terms: PriceTerms = PriceTerms()


def load_markets(
    clients: Clients, cache: CatalogCache, account: str, regions: Iterable[str], group: Group
) -> list[Market]:
    """Return one Market per region, from the cache if it is fresh, else from AWS."""
    by_region = {region: _read_cached(cache, account, region, group) for region in regions}
    missing = [region for region, market in by_region.items() if market is None]
    if missing:
        # Two pools, so that a task that waits for other calls never takes the thread of one.
        with ThreadPoolExecutor(len(missing)) as each, ThreadPoolExecutor(THREADS) as threads:
            fetched = each.map(
                lambda region: _fetch(clients, cache, account, region, group, threads), missing
            )
            by_region.update(zip(missing, fetched, strict=True))
    return [market for market in by_region.values() if market]


def _file_name(account: str, region: str, group: Group, what: str) -> str:
    return f"{account}-{region}-{group}-{what}.json"


def _read_cached(cache: CatalogCache, account: str, region: str, group: Group) -> Market | None:
    catalog = cache.read(_file_name(account, region, group, "types"), Catalog, TYPES_FRESH_S)
    prices = cache.read(_file_name(account, region, group, "prices"), Prices, PRICES_FRESH_S)
    return Market(region=region, catalog=catalog, prices=prices) if catalog and prices else None


def _fetch(
    clients: Clients,
    cache: CatalogCache,
    account: str,
    region: str,
    group: Group,
    threads: ThreadPoolExecutor,
) -> Market:
    catalog_name = _file_name(account, region, group, "types")
    catalog = cache.read(catalog_name, Catalog, TYPES_FRESH_S)
    on_demand = threads.submit(fetch_on_demand_prices, clients, region, group)
    if catalog is None:
        catalog = fetch_catalog(clients, region, group)
        cache.write(catalog_name, catalog)
    spot = fetch_spot_prices(
        clients, region, [one.type for one in catalog.hardware if one.spot], threads
    )
    prices = Prices(version=VERSION, made_at=time.time(), spot=spot, on_demand=on_demand.result())
    cache.write(_file_name(account, region, group, "prices"), prices)
    return Market(region=region, catalog=catalog, prices=prices)


def fetch_catalog(clients: Clients, region: str, group: Group) -> Catalog:
    ec2 = clients.get_ec2(region)
    only: list[FilterTypeDef] = [{"Name": "instance-type", "Values": list(PATTERNS[group])}]
    with translate_errors():
        listed = [
            parse_hardware(entry)
            for page in ec2.get_paginator("describe_instance_types").paginate(Filters=only)
            for entry in page["InstanceTypes"]
            if group == "cpu" or entry.get("GpuInfo")
        ]
    zones = _fetch_zones(ec2, [one.type for one in listed])
    ordered = tuple(sorted(listed, key=lambda one: one.type))
    return Catalog(version=VERSION, made_at=time.time(), hardware=ordered, zones=zones)


def _fetch_zones(ec2: EC2Client, types: list[str]) -> dict[str, tuple[str, ...]]:
    """Fetch the zones of each type. This filter accepts only full names, at most 200."""
    zones: dict[str, list[str]] = {}
    for at in range(0, len(types), MOST_FILTERED):
        filters: list[FilterTypeDef] = [
            {"Name": "instance-type", "Values": types[at : at + MOST_FILTERED]}
        ]
        with translate_errors():
            pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
                LocationType="availability-zone", Filters=filters
            )
            for page in pages:
                for entry in page["InstanceTypeOfferings"]:
                    zones.setdefault(entry["InstanceType"], []).append(entry["Location"])
    return {name: tuple(sorted(where)) for name, where in zones.items()}


def parse_hardware(entry: InstanceTypeInfoTypeDef) -> Hardware:
    """Parse one entry of DescribeInstanceTypes."""
    gpus = entry.get("GpuInfo", {}).get("Gpus", [])
    gpu = gpus[0] if gpus else {}
    usage = entry.get("SupportedUsageClasses", [])
    return Hardware(
        type=entry["InstanceType"],
        cpus=entry["VCpuInfo"]["DefaultVCpus"],
        memory_bytes=entry["MemoryInfo"]["SizeInMiB"] * MIB,
        arch=next((a for a in entry["ProcessorInfo"]["SupportedArchitectures"] if a != "i386"), ""),
        gpu_name=gpu.get("Name", ""),
        gpu_maker=gpu.get("Manufacturer", ""),
        gpu_count=sum(one.get("Count", 0) for one in gpus),
        gpu_memory_bytes=gpu.get("MemoryInfo", {}).get("SizeInMiB", 0) * MIB,
        part=gpu.get("GpuPartitionSize", 1.0),
        spot="spot" in usage,
        on_demand="on-demand" in usage,
        cluster="cluster" in entry.get("PlacementGroupInfo", {}).get("SupportedStrategies", []),
        efa=entry.get("NetworkInfo", {}).get("EfaSupported", False),
    )


def fetch_spot_prices(
    clients: Clients, region: str, types: list[str], threads: ThreadPoolExecutor
) -> dict[str, dict[str, SpotPrice]]:
    """Fetch the spot prices of the last week, by type and zone."""
    ec2 = clients.get_ec2(region)
    since = datetime.now(UTC) - WEEK

    def fetch_history(some: list[str]) -> list[SpotPriceTypeDef]:
        with translate_errors():
            pages = ec2.get_paginator("describe_spot_price_history").paginate(
                InstanceTypes=cast("list[InstanceTypeType]", some),
                ProductDescriptions=["Linux/UNIX"],
                StartTime=since,
            )
            return [entry for page in pages for entry in page["SpotPriceHistory"]]

    parts = [types[at : at + TYPES_PER_CALL] for at in range(0, len(types), TYPES_PER_CALL)]
    history: dict[tuple[str, str], list[tuple[datetime, float]]] = {}
    for entries in threads.map(fetch_history, parts):
        for entry in entries:
            key = (entry["InstanceType"], entry["AvailabilityZone"])
            history.setdefault(key, []).append((entry["Timestamp"], float(entry["SpotPrice"])))
    prices: dict[str, dict[str, SpotPrice]] = {}
    for (name, zone), points in sorted(history.items()):
        amounts = [amount for _, amount in points]
        price = SpotPrice(now=max(points)[1], low=min(amounts), high=max(amounts))
        prices.setdefault(name, {})[zone] = price
    return prices


def fetch_on_demand_prices(clients: Clients, region: str, group: Group) -> dict[str, float]:
    """Fetch list prices by type: Linux, shared hardware, no other software installed."""
    pricing = clients.get_pricing(PRICING_REGION)
    base = {
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    queries = [base | {"instanceFamily": "GPU instance"}]
    if group == "cpu":
        queries = [base | {"instanceType": name} for name in CPU_TYPES]

    def fetch_products(fields: dict[str, str]) -> list[str]:
        filters: list[ProductFilterTypeDef] = [
            {"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in fields.items()
        ]
        with translate_errors():
            pages = pricing.get_paginator("get_products").paginate(
                ServiceCode="AmazonEC2", Filters=filters
            )
            return [product for page in pages for product in page["PriceList"]]

    return _fetch_parallel(queries, fetch_products)


def _fetch_parallel(
    queries: list[dict[str, str]], fetch_products: Callable[[dict[str, str]], list[str]]
) -> dict[str, float]:
    with ThreadPoolExecutor(len(queries)) as threads:
        listed = [
            parse_list_price(text) for some in threads.map(fetch_products, queries) for text in some
        ]
    return {name: price for name, price in listed if name and price}


def parse_list_price(product: str) -> tuple[str, float]:
    """Parse one product of the price list: (type, USD per hour); ("", 0.0) without a price."""
    document = decode_json(product, PriceDocument)
    name = document.product.attributes.get("instanceType", "")
    for term in document.terms.on_demand.values():
        for dimension in term.price_dimensions.values():
            price = float(dimension.price_per_unit.get("USD", 0))
            if dimension.unit == "Hrs" and price > 0:
                return name, price
    return "", 0.0
