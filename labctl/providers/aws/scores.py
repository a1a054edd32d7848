"""How likely spot capacity is, as AWS scores it, for the few types that would be taken first."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from labctl.errors import BusyError, ProviderError
from labctl.model import Offer
from labctl.providers.aws.catalog import SCORES_FRESH_S, VERSION, Scores, Shelf
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import told

# AWS answers only so many different questions a day.
TYPES_SCORED = 3


def with_scores(clients: Clients, shelf: Shelf, account: str, offers: list[Offer]) -> list[Offer]:
    """The same offers, the first spot ones with their score where AWS says it to this account."""
    wanted = _first_types(offers)
    if not wanted:
        return offers
    regions = sorted({region for region, _ in wanted})
    scores: dict[tuple[str, str, str], int] = {}
    for region in regions:
        types = [name for where, name in wanted if where == region]
        for name, zones in _scores(clients, shelf, account, region, types).items():
            scores.update({(region, name, zone): score for zone, score in zones.items()})
    return [
        replace(offer, placement_score=scores.get((offer.region, offer.type, offer.zone)))
        if offer.spot
        else offer
        for offer in offers
    ]


def _first_types(offers: list[Offer]) -> list[tuple[str, str]]:
    """(region, type) of the first few that are spot."""
    places = dict.fromkeys((offer.region, offer.type) for offer in offers if offer.spot)
    return list(places)[:TYPES_SCORED]


def _scores(
    clients: Clients, shelf: Shelf, account: str, region: str, types: list[str]
) -> dict[str, dict[str, int]]:
    name = f"{account}-{region}-scores.json"
    kept = shelf.read(name, Scores, SCORES_FRESH_S)
    known = dict(kept.by_type) if kept else {}
    if missing := [one for one in types if one not in known]:
        known.update(_asked(clients, region, missing))
        made_at = kept.made_at if kept else time.time()
        shelf.write(name, Scores(version=VERSION, made_at=made_at, by_type=known))
    return known


def _asked(clients: Clients, region: str, types: list[str]) -> dict[str, dict[str, int]]:
    """By type, then zone; nothing for a type where AWS does not say, for whatever reason."""
    ec2 = clients.ec2(region)

    def ask(name: str) -> dict[str, int]:
        with told():
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
            names = threads.submit(_zone_names, clients, region)
            scored = list(threads.map(ask, types))
            zones = names.result()
    except (ProviderError, BusyError):
        # A score is an extra: not permitted, asked too often today, not offered in this region.
        return {name: {} for name in types}
    return {
        name: {zones[zone_id]: score for zone_id, score in by_id.items() if zone_id in zones}
        for name, by_id in zip(types, scored, strict=True)
    }


def _zone_names(clients: Clients, region: str) -> dict[str, str]:
    """Zone ids are the same for everybody, names are each account's own."""
    with told():
        found = clients.ec2(region).describe_availability_zones()["AvailabilityZones"]
    return {zone["ZoneId"]: zone["ZoneName"] for zone in found}
