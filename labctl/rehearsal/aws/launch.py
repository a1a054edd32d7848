"""Launching instances: refusals, placement, and attributes that moto does not set."""

from __future__ import annotations

import base64
import time
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from labctl.rehearsal.aws import limits
from labctl.rehearsal.aws.backend import Backend, is_offered
from labctl.rehearsal.aws.calls import Call, build_refusal, parse_tags
from labctl.rehearsal.aws.fleet import Fleet
from labctl.rehearsal.aws.market import compute_spot_price
from labctl.rehearsal.aws.placement_groups import PlacementGroups
from labctl.rehearsal.aws.scenario import Capacity, Scenario
from labctl.rehearsal.core.replies import HttpReply

if TYPE_CHECKING:
    from moto.ec2.models.instances import Instance

USER_DATA_BYTES = 16 * 1024
LIVE = ("pending", "running")


def place_or_refuse(
    call: Call, scenario: Scenario, backend: Backend, fleet: Fleet, groups: PlacementGroups
) -> HttpReply | Call:
    """Return the call with a zone, if it named none, or a refusal."""
    kind = call.form.get("InstanceType", "m1.small")
    data = base64.b64decode(call.form.get("UserData", ""))
    if len(data) > USER_DATA_BYTES:
        words = "User data is limited to 16384 bytes"
        return build_refusal(call, "InvalidParameterValue", words)
    zones = _find_zones(call, scenario, backend, kind)
    if isinstance(zones, HttpReply):
        return zones
    market = "spot" if call.form.get("InstanceMarketOptions.MarketType") == "spot" else "on-demand"
    for refused in (
        _check_disk_size(call, backend),
        _check_interface(call, backend, kind),
        groups.check_launch(call, zones[0]),
        _check_quota(call, scenario, backend, fleet, kind, market == "spot"),
        _check_bid(call, scenario, kind, zones) if market == "spot" else None,
    ):
        if refused is not None:
            return refused
    for zone in zones:
        if _has_room(scenario, backend, fleet, kind, zone, market):
            return call if len(zones) == 1 else _set_zone(call, zone)
    return _refuse_capacity(call, kind, zones)


def complete_instance(call: Call, instance: Instance) -> None:
    """Complete moto's instance as AWS does.

    All resources get their tags, and disks and interfaces end with it where AWS's do.
    """
    instance.placement.group_name = call.form.get("Placement.GroupName", "")
    nics = list(instance.nics.values())
    first = "NetworkInterface.1.DeleteOnTermination"
    for nic in nics:
        nic.interface_type = call.form.get("NetworkInterface.1.InterfaceType", "interface")
        nic.delete_on_termination = call.form.get(first, "true").lower() == "true"
    for kind, tags in parse_tags(call).items():
        if kind == "network-interface":
            for nic in nics:
                nic.add_tags(tags)
    mappings = _parse_mappings(call)
    for device, volume in instance.get_block_device_mapping:
        mapping = mappings.get(device, {})
        if "Ebs.DeleteOnTermination" not in mapping and device == instance.root_device_name:
            volume.delete_on_termination = True
        volume_object = instance.ec2_backend.volumes.get(volume.volume_id)
        if volume_object is not None and "Ebs.VolumeType" not in mapping:
            volume_object.volume_type = "gp3"


def _find_zones(
    call: Call, scenario: Scenario, backend: Backend, kind: str
) -> list[str] | HttpReply:
    """Return the possible zones: the one in the call, or every one that offers the type."""
    if not backend.describe_type(kind):
        words = f"Invalid value '{kind}' for InstanceType."
        return build_refusal(call, "InvalidParameterValue", words)
    zones_with_type = backend.list_zones(call.region, kind) if is_offered(scenario, kind) else []
    requested = call.form.get("Placement.AvailabilityZone", "")
    subnet = call.form.get("SubnetId") or call.form.get("NetworkInterface.1.SubnetId")
    if subnet:
        with backend.lock():
            subnets = backend.ec2(call.region).describe_subnets()
            match = next((candidate for candidate in subnets if candidate.id == subnet), None)
        if match is None:
            words = f"The subnet ID '{subnet}' does not exist"
            return build_refusal(call, "InvalidSubnetID.NotFound", words)
        requested = match.availability_zone
    if zones_with_type and not requested:
        return zones_with_type
    if requested in zones_with_type:
        return [requested]
    words = (
        f"Your requested instance type ({kind}) is not supported in your requested Availability "
        f"Zone ({requested or call.region}). Please retry your request by not specifying an "
        f"Availability Zone or choosing {', '.join(zones_with_type) or 'another region'}."
    )
    return build_refusal(call, "Unsupported", words)


def _set_zone(call: Call, zone: str) -> Call:
    return call.with_form({**call.form, "Placement.AvailabilityZone": zone})


def _check_disk_size(call: Call, backend: Backend) -> HttpReply | None:
    with backend.lock():
        image = backend.ec2(call.region).amis.get(call.form.get("ImageId", ""))
        min_gib = getattr(image, "gib", 0)
        snapshot = image.ebs_snapshot.id if image else ""
    mapping = _parse_mappings(call).get(getattr(image, "root_device_name", ""), {})
    size = mapping.get("Ebs.VolumeSize", "")
    if not size.isdigit() or int(size) >= min_gib:
        return None
    words = (
        f"Volume of size {size}GB is smaller than snapshot '{snapshot}', expect size >= {min_gib}GB"
    )
    return build_refusal(call, "InvalidBlockDeviceMapping", words)


def _check_interface(call: Call, backend: Backend, kind: str) -> HttpReply | None:
    """Refuse an Elastic Fabric Adapter of a type that has none; AWS does not document its code."""
    network = backend.describe_type(kind).get("NetworkInfo", {})
    interface = call.form.get("NetworkInterface.1.InterfaceType", "interface")
    if not interface.startswith("efa") or network.get("EfaSupported"):
        return None
    words = f"Elastic Fabric Adapters are not supported by the '{kind}' instance type."
    return build_refusal(call, "UnsupportedOperation", words)


def _check_quota(
    call: Call, scenario: Scenario, backend: Backend, fleet: Fleet, kind: str, spot: bool
) -> HttpReply | None:
    key = limits.quota_key(kind, spot)
    limit = getattr(scenario.quotas, key)
    count = int(call.form.get("MinCount") or 1)
    used = sum(
        _count_cpus(backend, other)
        for other, _, market in _list_live(call.region, backend, fleet)
        if limits.quota_key(other, market == "spot") == key
    )
    if used + count * _count_cpus(backend, kind) <= limit:
        return None
    return limits.refuse_exceeded(call, spot, limit)


def _check_bid(call: Call, scenario: Scenario, kind: str, zones: list[str]) -> HttpReply | None:
    bid = call.form.get("InstanceMarketOptions.SpotOptions.MaxPrice")
    prices = [
        price for zone in zones if (price := compute_spot_price(scenario, kind, zone, time.time()))
    ]
    if not bid or not prices or float(bid) >= min(prices):
        return None
    words = (
        f"Your Spot request price of {bid} is lower than the minimum required Spot request "
        f"fulfillment price of {min(prices)}."
    )
    return build_refusal(call, "SpotMaxPriceTooLow", words)


def _has_room(
    scenario: Scenario, backend: Backend, fleet: Fleet, kind: str, zone: str, market: str
) -> bool:
    live = _list_live(zone[:-1], backend, fleet)
    for rule in scenario.capacity:
        if not _is_applicable(rule, kind, zone, market):
            continue
        if sum(_is_applicable(rule, *other) for other in live) >= rule.left:
            return False
    return True


def _is_applicable(rule: Capacity, kind: str, zone: str, market: str) -> bool:
    """Return whether a capacity rule applies to such machines."""
    fits = fnmatchcase(kind, rule.type) and fnmatchcase(zone, rule.zone)
    return fits and rule.market in ("*", market)


def _list_live(region: str, backend: Backend, fleet: Fleet) -> list[tuple[str, str, str]]:
    """Return (type, zone, market) of each live instance."""
    with backend.lock():
        instances = [
            fleet.instance(record)
            for record in list(fleet.records.values())
            if record.region == region
        ]
        return [
            (
                instance.instance_type,
                str(instance.availability_zone),
                instance.lifecycle or "on-demand",
            )
            for instance in instances
            if instance._state.name in LIVE
        ]


def _refuse_capacity(call: Call, kind: str, zones: list[str]) -> HttpReply:
    words = (
        f"We currently do not have sufficient {kind} capacity in the Availability Zone you "
        f"requested ({', '.join(zones)}). Our system will be working on provisioning additional "
        "capacity."
    )
    return build_refusal(call, "InsufficientInstanceCapacity", words, 500)


def _count_cpus(backend: Backend, kind: str) -> int:
    return backend.describe_type(kind).get("VCpuInfo", {}).get("DefaultVCpus", 1)


def _parse_mappings(call: Call) -> dict[str, dict[str, str]]:
    """Return the block device mappings by device: their fields after the number."""
    mappings: dict[str, dict[str, str]] = {}
    number = 1
    while (device := call.form.get(f"BlockDeviceMapping.{number}.DeviceName")) is not None:
        prefix = f"BlockDeviceMapping.{number}."
        mappings[device] = {
            key.removeprefix(prefix): value
            for key, value in call.form.items()
            if key.startswith(prefix)
        }
        number += 1
    return mappings
