"""The spot market: prices that move in a seeded way, their history, placement scores.

A price is a function of seed, type, zone and hour, so that history never changes afterwards.
"""

from __future__ import annotations

import hashlib
import math
import time
from datetime import UTC, datetime
from typing import Any

from labctl.rehearsal.backend import Backend, offers
from labctl.rehearsal.calls import Call, Reply, ec2_reply, element
from labctl.rehearsal.prices import ON_DEMAND, on_demand
from labctl.rehearsal.scenario import Scenario

# How long a price holds.
STEP_S = 6 * 3600
LONGEST_S = 90 * 86_400
PAGE = 1000
PRODUCT = "Linux/UNIX"
# A spot price is never below this part of the on-demand price.
FLOOR = 0.08


def spot_price(scenario: Scenario, instance_type: str, zone: str, at: float) -> float | None:
    """USD per hour at a time (Unix seconds), or None where none is known."""
    for key in (f"{instance_type}/{zone}", instance_type):
        if key in scenario.spot.prices:
            return scenario.spot.prices[key]
    base = on_demand(instance_type, zone[:-1], scenario.on_demand)
    if base is None:
        return None
    about = f"{scenario.seed}/{instance_type}/{zone}"
    level = 1 - scenario.spot.discount + 0.1 * (_chance(about) - 0.5)
    # Two waves and a jitter: days, a day, and what nobody explains.
    days = at / 86_400 + 7 * _chance(f"{about}/phase")
    wave = 0.6 * math.sin(days) + 0.3 * math.sin(2 * math.pi * days)
    jitter = 0.2 * (_chance(f"{about}/{int(at // STEP_S)}") - 0.5)
    part = level * (1 + scenario.spot.swing * (wave + jitter))
    return round(base * min(1.0, max(FLOOR, part)), 6)


def history(call: Call, scenario: Scenario, backend: Backend) -> Reply:
    """DescribeSpotPriceHistory, newest first, in pages; one price from before the start, as AWS."""
    until = _time(call.form.get("EndTime")) or time.time()
    since = max(_time(call.form.get("StartTime")) or until, until - LONGEST_S)
    entries = [
        (at, name, zone)
        for name, zone in _places(call, scenario, backend)
        for at in _changes(since, until)
    ]
    entries.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
    first = int(call.form.get("NextToken") or 0)
    size = int(call.form.get("MaxResults") or PAGE)
    page = entries[first : first + size]
    items = [_item(scenario, *entry) for entry in page]
    token = str(first + size) if first + size < len(entries) else ""
    return ec2_reply(call.action, [element("spotPriceHistorySet", items), _token(token)])


def scores(call: Call, scenario: Scenario, backend: Backend) -> Reply:
    """GetSpotPlacementScores: the scenario's, else seeded ones, by zone or by region."""
    names = call.many("InstanceType")
    by_zone = call.form.get("SingleAvailabilityZone", "").lower() == "true"
    items = []
    for region in call.many("RegionName") or list(backend.regions):
        zones = sorted({zone for name in names for zone in backend.zones_of(region, name)})
        each = {zone: _score(scenario, names, zone) for zone in zones}
        if by_zone:
            ids = _zone_ids(backend, region)
            items += [_scored(region, score, ids.get(zone, zone)) for zone, score in each.items()]
        elif each:
            items.append(_scored(region, max(each.values()), ""))
    return ec2_reply(call.action, [element("spotPlacementScoreSet", items), _token("")])


def _score(scenario: Scenario, names: list[str], zone: str) -> int:
    if zone in scenario.spot.scores:
        return scenario.spot.scores[zone]
    return 1 + int(9.99 * _chance(f"{scenario.seed}/{sorted(names)}/{zone}/score"))


def _scored(region: str, score: int, zone_id: str) -> Any:
    fields = [element("region", region), element("score", str(score))]
    return element("item", [*fields, *([element("availabilityZoneId", zone_id)] * bool(zone_id))])


def _zone_ids(backend: Backend, region: str) -> dict[str, str]:
    with backend.held():
        zones = backend.ec2(region).describe_availability_zones()
        return {zone.name: zone.zone_id for zone in zones}


def _places(call: Call, scenario: Scenario, backend: Backend) -> list[tuple[str, str]]:
    filters = call.filters()
    products = call.many("ProductDescription") or filters.get("product-description", [PRODUCT])
    if not any(product.startswith(PRODUCT) for product in products):
        return []
    wanted = call.many("InstanceType") or filters.get("instance-type", [])
    names = wanted or [*ON_DEMAND, *scenario.on_demand]
    zones = filters.get("availability-zone") or [
        zone for zone in [call.form.get("AvailabilityZone", "")] if zone
    ]
    return [
        (name, zone)
        for name in dict.fromkeys(names)
        if offers(scenario, name)
        and "spot" in backend.type_of(name).get("SupportedUsageClasses", [])
        for zone in backend.zones_of(call.region, name)
        if not zones or zone in zones
    ]


def _changes(since: float, until: float) -> list[float]:
    """The times at which a price began to hold, from the one in force at `since`."""
    first = int(since // STEP_S)
    return [float(step * STEP_S) for step in range(first, int(until // STEP_S) + 1)]


def _item(scenario: Scenario, at: float, name: str, zone: str) -> Any:
    price = spot_price(scenario, name, zone, at)
    told = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    return element(
        "item",
        [
            element("instanceType", name),
            element("productDescription", PRODUCT),
            element("spotPrice", f"{price:.6f}" if price is not None else "1.000000"),
            element("timestamp", told),
            element("availabilityZone", zone),
        ],
    )


def _token(token: str) -> Any:
    return element("nextToken", token)


def _time(text: str | None) -> float | None:
    if not text:
        return None
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _chance(text: str) -> float:
    """A number from 0 to 1 that is the same for the same text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
