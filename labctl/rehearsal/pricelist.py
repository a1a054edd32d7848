"""The Pricing API's GetProducts for EC2: on-demand Linux machines, in its JSON format."""

from __future__ import annotations

import json
import re
from typing import Any

from labctl.rehearsal.backend import Backend, is_offered
from labctl.rehearsal.calls import Call, HttpReply, build_json_reply
from labctl.rehearsal.prices import ON_DEMAND, find_on_demand_price
from labctl.rehearsal.scenario import Scenario

PAGE = 100


def answer_products(call: Call, scenario: Scenario, backend: Backend) -> HttpReply:
    """Return the products that match every TERM_MATCH filter, in pages of at most 100."""
    if call.json.get("ServiceCode") != "AmazonEC2":
        return build_json_reply({"FormatVersion": "aws_v1", "PriceList": []})
    filters = {entry["Field"]: str(entry["Value"]) for entry in call.json.get("Filters", [])}
    regions = [filters["regionCode"]] if "regionCode" in filters else list(backend.regions)
    matches = [
        product
        for region in regions
        for name in dict.fromkeys([*ON_DEMAND, *scenario.on_demand])
        if (product := _product(name, region, scenario, backend))
        and _matches_filters(product, filters)
    ]
    first = int(call.json.get("NextToken") or 0)
    size = min(PAGE, int(call.json.get("MaxResults") or PAGE))
    body: dict[str, Any] = {
        "FormatVersion": "aws_v1",
        "PriceList": [json.dumps(product) for product in matches[first : first + size]],
    }
    if first + size < len(matches):
        body["NextToken"] = str(first + size)
    return build_json_reply(body)


def _matches_filters(product: dict[str, Any], filters: dict[str, str]) -> bool:
    attributes = product["product"]["attributes"]
    return all(attributes.get(field) == value for field, value in filters.items())


def _product(name: str, region: str, scenario: Scenario, backend: Backend) -> dict[str, Any]:
    description = backend.describe_type(name)
    price = find_on_demand_price(name, region, scenario.on_demand)
    if not description or price is None or not is_offered(scenario, name):
        return {}
    if not backend.list_zones(region, name):
        return {}
    sku = re.sub(r"[^A-Z0-9]", "", f"{name}{region}".upper()).ljust(16, "X")[:16]
    return {
        "product": {
            "productFamily": "Compute Instance",
            "sku": sku,
            "attributes": _attributes(name, region, description),
        },
        "serviceCode": "AmazonEC2",
        "terms": {"OnDemand": {f"{sku}.JRTCKXETXF": _term(sku, name, price)}},
        "version": "rehearsal",
        "publicationDate": "2025-10-01T00:00:00Z",
    }


def _attributes(name: str, region: str, description: dict[str, Any]) -> dict[str, str]:
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


def _term(sku: str, name: str, price: float) -> dict[str, Any]:
    rate = f"{sku}.JRTCKXETXF.6YS6EN2CT7"
    return {
        "sku": sku,
        "offerTermCode": "JRTCKXETXF",
        "effectiveDate": "2025-10-01T00:00:00Z",
        "termAttributes": {},
        "priceDimensions": {
            rate: {
                "rateCode": rate,
                "unit": "Hrs",
                "beginRange": "0",
                "endRange": "Inf",
                "appliesTo": [],
                "description": f"${price:.10f} per On Demand Linux {name} Instance Hour",
                "pricePerUnit": {"USD": f"{price:.10f}"},
            }
        },
    }
