"""The Pricing API's GetProducts for EC2: on-demand Linux machines, in its JSON format."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from labctl.model import Value
from labctl.rehearsal.aws.backend import Backend, is_offered
from labctl.rehearsal.aws.calls import Call, build_json_reply
from labctl.rehearsal.aws.prices import ON_DEMAND, find_on_demand_price
from labctl.rehearsal.aws.scenario import Scenario
from labctl.rehearsal.core.replies import HttpReply

if TYPE_CHECKING:
    from mypy_boto3_ec2.type_defs import InstanceTypeInfoTypeDef

PAGE = 100
# AWS's codes of on-demand prices, and of prices by the hour.
ON_DEMAND_CODE = "JRTCKXETXF"
HOURLY_CODE = "6YS6EN2CT7"


class ProductFilter(Value, frozen=True, rename="pascal"):
    """A condition on one attribute of a product."""

    field: str = ""
    value: str = ""


class ProductsCall(Value, frozen=True, rename="pascal"):
    """The body of GetProducts."""

    service_code: str = ""
    filters: tuple[ProductFilter, ...] = ()
    next_token: str = ""
    max_results: int = PAGE


class ProductsReply(Value, frozen=True, rename="pascal", omit_defaults=True):
    """The reply of GetProducts: each product is a document of its own, as text."""

    price_list: tuple[str, ...]
    format_version: str
    next_token: str = ""


class ProductDescription(Value, frozen=True, rename="camel"):
    sku: str
    attributes: dict[str, str]
    product_family: str = "Compute Instance"


class PriceDimension(Value, frozen=True, rename="camel"):
    """A price in a currency for each unit."""

    rate_code: str
    description: str
    price_per_unit: dict[str, str]
    unit: str = "Hrs"
    begin_range: str = "0"
    end_range: str = "Inf"
    applies_to: tuple[str, ...] = ()


class OfferTerm(Value, frozen=True, rename="camel"):
    """The conditions of an offer, with its prices by their codes."""

    sku: str
    price_dimensions: dict[str, PriceDimension]
    offer_term_code: str = ON_DEMAND_CODE
    effective_date: str = "2025-10-01T00:00:00Z"
    term_attributes: dict[str, str] = msgspec.field(default_factory=dict)


class ListedProduct(Value, frozen=True, rename="camel"):
    """A document of the price list: `terms` has the kinds of offers, each with terms by code."""

    product: ProductDescription
    terms: dict[str, dict[str, OfferTerm]]
    service_code: str = "AmazonEC2"
    version: str = "rehearsal"
    publication_date: str = "2025-10-01T00:00:00Z"


def answer_products(call: Call, scenario: Scenario, backend: Backend) -> HttpReply:
    """Return the products that match every TERM_MATCH filter, in pages of at most 100."""
    body = call.parse_json(ProductsCall)
    if body.service_code != "AmazonEC2":
        return build_json_reply(ProductsReply(price_list=(), format_version="aws_v1"))
    filters = {each.field: each.value for each in body.filters}
    regions = [filters["regionCode"]] if "regionCode" in filters else list(backend.regions)
    matches = [
        product
        for region in regions
        for name in dict.fromkeys([*ON_DEMAND, *scenario.on_demand])
        if (product := _find_product(name, region, scenario, backend)) is not None
        and _has_attributes(product, filters)
    ]
    first = int(body.next_token or 0)
    size = min(PAGE, body.max_results)
    page = matches[first : first + size]
    return build_json_reply(
        ProductsReply(
            price_list=tuple(msgspec.json.encode(product).decode() for product in page),
            format_version="aws_v1",
            next_token=str(first + size) if first + size < len(matches) else "",
        )
    )


def _has_attributes(product: ListedProduct, filters: dict[str, str]) -> bool:
    attributes = product.product.attributes
    return all(attributes.get(field) == value for field, value in filters.items())


def _find_product(
    name: str, region: str, scenario: Scenario, backend: Backend
) -> ListedProduct | None:
    """Return the product of an instance type; None if the region does not offer it."""
    description = backend.describe_type(name)
    price = find_on_demand_price(name, region, scenario.on_demand)
    if not description or price is None or not is_offered(scenario, name):
        return None
    if not backend.list_zones(region, name):
        return None
    sku = re.sub(r"[^A-Z0-9]", "", f"{name}{region}".upper()).ljust(16, "X")[:16]
    return ListedProduct(
        product=ProductDescription(sku=sku, attributes=_attributes(name, region, description)),
        terms={"OnDemand": {f"{sku}.{ON_DEMAND_CODE}": _build_term(sku, name, price)}},
    )


def _attributes(name: str, region: str, description: InstanceTypeInfoTypeDef) -> dict[str, str]:
    gpus = description.get("GpuInfo", {}).get("Gpus", [])
    family = "GPU instance" if gpus else "General purpose"
    return {
        "servicecode": "AmazonEC2",
        "instanceType": name,
        "instanceFamily": family,
        "regionCode": region,
        "locationType": "AWS Region",
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "licenseModel": "No License required",
        "marketoption": "OnDemand",
        "operation": "RunInstances",
        "currentGeneration": "Yes",
        "vcpu": str(description["VCpuInfo"]["DefaultVCpus"]),
        "memory": f"{description['MemoryInfo']['SizeInMiB'] / 1024:g} GiB",
        **({"gpu": str(sum(gpu.get("Count", 1) for gpu in gpus))} if gpus else {}),
    }


def _build_term(sku: str, name: str, price: float) -> OfferTerm:
    rate = f"{sku}.{ON_DEMAND_CODE}.{HOURLY_CODE}"
    dimension = PriceDimension(
        rate_code=rate,
        description=f"${price:.10f} per On Demand Linux {name} Instance Hour",
        price_per_unit={"USD": f"{price:.10f}"},
    )
    return OfferTerm(sku=sku, price_dimensions={rate: dimension})
