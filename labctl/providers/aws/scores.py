"""AWS's spot placement scores (how likely spot capacity is) for the first few types."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from labctl.errors import BusyError, ProviderError
from labctl.model import Offer
from labctl.providers.aws.catalog import SCORES_FRESH_S, VERSION, CatalogCache, Scores
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import translate_errors

# AWS limits the number of different score requests per day.
TYPES_SCORED = 3


def add_scores(
    clients: Clients, cache: CatalogCache, account: str, offers: list[Offer]
) -> list[Offer]:
    """Add scores to the first spot offers, if AWS gives them to this account."""
    first_types = _list_first_types(offers)
    if not first_types:
        return offers
    regions = sorted({region for region, _ in first_types})
    scores: dict[tuple[str, str, str], int] = {}
    for region in regions:
        types = [name for where, name in first_types if where == region]
        for name, zones in _get_scores(clients, cache, account, region, types).items():
            scores.update({(region, name, zone): score for zone, score in zones.items()})
    return [
        replace(offer, placement_score=scores.get((offer.region, offer.type, offer.zone)))
        if offer.spot
        else offer
        for offer in offers
    ]


def _list_first_types(offers: list[Offer]) -> list[tuple[str, str]]:
    """List (region, type) of the first few spot offers."""
    types = dict.fromkeys((offer.region, offer.type) for offer in offers if offer.spot)
    return list(types)[:TYPES_SCORED]


def _get_scores(
    clients: Clients, cache: CatalogCache, account: str, region: str, types: list[str]
) -> dict[str, dict[str, int]]:
    name = f"{account}-{region}-scores.json"
    cached = cache.read(name, Scores, SCORES_FRESH_S)
    by_type = dict(cached.by_type) if cached else {}
    if missing := [one for one in types if one not in by_type]:
        by_type.update(_fetch_scores(clients, region, missing))
        made_at = cached.made_at if cached else time.time()
        cache.write(name, Scores(version=VERSION, made_at=made_at, by_type=by_type))
    return by_type


def _fetch_scores(clients: Clients, region: str, types: list[str]) -> dict[str, dict[str, int]]:
    """Fetch scores by type and zone; empty for a type if AWS gives none, for whatever reason."""
    ec2 = clients.get_ec2(region)

    def fetch(name: str) -> dict[str, int]:
        with translate_errors():
            answer = ec2.get_spot_placement_scores(
                InstanceTypes=[name],
                TargetCapacity=1,
                SingleAvailabilityZone=True,
                RegionNames=[region],
            )
        return {
            entry["AvailabilityZoneId"]: entry["Score"]
            for entry in answer["SpotPlacementScores"]
            if "AvailabilityZoneId" in entry
        }

    try:
        with ThreadPoolExecutor(len(types) + 1) as threads:
            names = threads.submit(_fetch_zone_names, clients, region)
            scored = list(threads.map(fetch, types))
            zones = names.result()
    except (ProviderError, BusyError):
        # Scores are optional: not permitted, daily limit reached, or not available in this region.
        return {name: {} for name in types}
    return {
        name: {zones[zone_id]: score for zone_id, score in by_id.items() if zone_id in zones}
        for name, by_id in zip(types, scored, strict=True)
    }


def _fetch_zone_names(clients: Clients, region: str) -> dict[str, str]:
    """Map zone ids, which are the same for all accounts, to this account's zone names."""
    with translate_errors():
        zones = clients.get_ec2(region).describe_availability_zones()["AvailabilityZones"]
    return {zone["ZoneId"]: zone["ZoneName"] for zone in zones}
