"""The documents of AWS's price list."""

from __future__ import annotations

import json
from typing import Any

from labctl.providers.aws.market import parse_list_price


def make_document(*dimensions: dict[str, Any]) -> str:
    """Return a document with the keys of a real one, most of which labctl does not read."""
    prices = {str(number): dimension for number, dimension in enumerate(dimensions)}
    return json.dumps(
        {
            "product": {
                "productFamily": "Compute Instance",
                "attributes": {"instanceType": "g5.xlarge", "vcpu": "4"},
                "sku": "X",
            },
            "serviceCode": "AmazonEC2",
            "terms": {
                "OnDemand": {"X.Y": {"priceDimensions": prices, "sku": "X", "termAttributes": {}}},
                "Reserved": {"X.Z": {"priceDimensions": {}, "termAttributes": {"a": "b"}}},
            },
            "version": "20251001",
            "publicationDate": "2025-10-01T00:00:00Z",
        }
    )


def test_the_first_price_by_the_hour_counts() -> None:
    free = {"unit": "Hrs", "pricePerUnit": {"USD": "0.0000000000"}, "appliesTo": []}
    storage = {"unit": "GB-Mo", "pricePerUnit": {"USD": "0.08"}, "appliesTo": []}
    hourly = {"unit": "Hrs", "pricePerUnit": {"USD": "1.0060000000"}, "appliesTo": []}
    assert parse_list_price(make_document(free, storage, hourly)) == ("g5.xlarge", 1.006)


def test_a_document_without_a_price_in_dollars_gives_none() -> None:
    yuan = {"unit": "Hrs", "pricePerUnit": {"CNY": "5.0"}, "appliesTo": []}
    assert parse_list_price(make_document(yuan)) == ("", 0.0)
    assert parse_list_price('{"product": {}, "terms": {}}') == ("", 0.0)
    assert parse_list_price("{}") == ("", 0.0)
