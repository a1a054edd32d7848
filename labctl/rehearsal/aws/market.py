"""The spot market: seeded, moving prices, their history, and placement scores.

A price is a function of seed, type, zone and time, so that the history never changes.
"""

from __future__ import annotations

import hashlib
import math
import time
from datetime import UTC, datetime
from xml.etree.ElementTree import Element

from labctl.rehearsal.aws.backend import Backend, is_offered
from labctl.rehearsal.aws.calls import Call, build_ec2_reply, build_element
from labctl.rehearsal.aws.prices import ON_DEMAND, find_on_demand_price
from labctl.rehearsal.aws.scenario import Scenario
from labctl.rehearsal.core.replies import HttpReply

# seconds between two price changes
STEP_S = 6 * 3600
LONGEST_S = 90 * 86_400
PAGE = 1000
PRODUCT = "Linux/UNIX"
# A spot price is never below this fraction of the on-demand price.
FLOOR = 0.08


def compute_spot_price(
    scenario: Scenario, instance_type: str, zone: str, at: float
) -> float | None:
    """Return USD per hour at a time (Unix seconds), or None if it is unknown."""
    for key in (f"{instance_type}/{zone}", instance_type):
        if key in scenario.spot.prices:
            return scenario.spot.prices[key]
    base = find_on_demand_price(instance_type, zone[:-1], scenario.on_demand)
    if base is None:
        return None
    seed_text = f"{scenario.seed}/{instance_type}/{zone}"
    level = 1 - scenario.spot.discount + 0.1 * (_seeded_fraction(seed_text) - 0.5)
    # Two waves and a jitter: several days, one day, and random noise.
    days = at / 86_400 + 7 * _seeded_fraction(f"{seed_text}/phase")
    wave = 0.6 * math.sin(days) + 0.3 * math.sin(2 * math.pi * days)
    jitter = 0.2 * (_seeded_fraction(f"{seed_text}/{int(at // STEP_S)}") - 0.5)
    fraction = level * (1 + scenario.spot.swing * (wave + jitter))
    return round(base * min(1.0, max(FLOOR, fraction)), 6)


def answer_price_history(call: Call, scenario: Scenario, backend: Backend) -> HttpReply:
    """Answer DescribeSpotPriceHistory: newest first, in pages, with one price before the start."""
    until = _parse_time(call.form.get("EndTime")) or time.time()
    since = max(_parse_time(call.form.get("StartTime")) or until, until - LONGEST_S)
    entries = [
        (at, name, zone)
        for name, zone in _list_markets(call, scenario, backend)
        for at in _list_change_times(since, until)
    ]
    entries.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
    first = int(call.form.get("NextToken") or 0)
    size = int(call.form.get("MaxResults") or PAGE)
    page = entries[first : first + size]
    items = [_price_element(scenario, *entry) for entry in page]
    token = str(first + size) if first + size < len(entries) else ""
    return build_ec2_reply(
        call.action, [build_element("spotPriceHistorySet", items), _token_element(token)]
    )


def answer_placement_scores(call: Call, scenario: Scenario, backend: Backend) -> HttpReply:
    """Answer GetSpotPlacementScores: the scenario's or seeded scores, by zone or by region."""
    names = call.read_numbered("InstanceType")
    by_zone = call.form.get("SingleAvailabilityZone", "").lower() == "true"
    items = []
    for region in call.read_numbered("RegionName") or list(backend.regions):
        zones = sorted({zone for name in names for zone in backend.list_zones(region, name)})
        each = {zone: _score(scenario, names, zone) for zone in zones}
        if by_zone:
            ids = _zone_ids(backend, region)
            items += [
                _score_element(region, score, ids.get(zone, zone)) for zone, score in each.items()
            ]
        elif each:
            items.append(_score_element(region, max(each.values()), ""))
    return build_ec2_reply(
        call.action, [build_element("spotPlacementScoreSet", items), _token_element("")]
    )


def _score(scenario: Scenario, names: list[str], zone: str) -> int:
    if zone in scenario.spot.scores:
        return scenario.spot.scores[zone]
    return 1 + int(9.99 * _seeded_fraction(f"{scenario.seed}/{sorted(names)}/{zone}/score"))


def _score_element(region: str, score: int, zone_id: str) -> Element:
    fields = [build_element("region", region), build_element("score", str(score))]
    return build_element(
        "item", [*fields, *([build_element("availabilityZoneId", zone_id)] * bool(zone_id))]
    )


def _zone_ids(backend: Backend, region: str) -> dict[str, str]:
    with backend.lock():
        zones = backend.ec2(region).describe_availability_zones()
        return {zone.name: zone.zone_id for zone in zones}


def _list_markets(call: Call, scenario: Scenario, backend: Backend) -> list[tuple[str, str]]:
    filters = call.read_filters()
    products = call.read_numbered("ProductDescription") or filters.get(
        "product-description", [PRODUCT]
    )
    if not any(product.startswith(PRODUCT) for product in products):
        return []
    requested = call.read_numbered("InstanceType") or filters.get("instance-type", [])
    names = requested or [*ON_DEMAND, *scenario.on_demand]
    zones = filters.get("availability-zone") or [
        zone for zone in [call.form.get("AvailabilityZone", "")] if zone
    ]
    return [
        (name, zone)
        for name in dict.fromkeys(names)
        if is_offered(scenario, name)
        and "spot" in backend.describe_type(name).get("SupportedUsageClasses", [])
        for zone in backend.list_zones(call.region, name)
        if not zones or zone in zones
    ]


def _list_change_times(since: float, until: float) -> list[float]:
    """Return the times at which prices changed, starting with the one in force at `since`."""
    first = int(since // STEP_S)
    return [float(step * STEP_S) for step in range(first, int(until // STEP_S) + 1)]


def _price_element(scenario: Scenario, at: float, name: str, zone: str) -> Element:
    price = compute_spot_price(scenario, name, zone, at)
    timestamp = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    return build_element(
        "item",
        [
            build_element("instanceType", name),
            build_element("productDescription", PRODUCT),
            build_element("spotPrice", f"{price:.6f}" if price is not None else "1.000000"),
            build_element("timestamp", timestamp),
            build_element("availabilityZone", zone),
        ],
    )


def _token_element(token: str) -> Element:
    return build_element("nextToken", token)


def _parse_time(text: str | None) -> float | None:
    if not text:
        return None
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _seeded_fraction(text: str) -> float:
    """Return a number from 0 to 1 that depends only on the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
