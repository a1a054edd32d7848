"""What RunInstances refuses, where it puts an instance, and what moto leaves out of one."""

from __future__ import annotations

import base64
from fnmatch import fnmatchcase
from typing import Any

from labctl.rehearsal import limits
from labctl.rehearsal.backend import Backend, offers
from labctl.rehearsal.calls import Call, Reply, refusal
from labctl.rehearsal.fleet import Fleet
from labctl.rehearsal.market import spot_price
from labctl.rehearsal.scenario import Capacity, Scenario

USER_DATA_BYTES = 16 * 1024
LIVE = ("pending", "running")


def placed(call: Call, scenario: Scenario, backend: Backend, fleet: Fleet) -> Reply | Call:
    """The call with a zone where it named none, or why it is refused."""
    kind = call.form.get("InstanceType", "m1.small")
    data = base64.b64decode(call.form.get("UserData", ""))
    if len(data) > USER_DATA_BYTES:
        words = "User data is limited to 16384 bytes"
        return refusal(call, "InvalidParameterValue", words)
    zones = _zones(call, scenario, backend, kind)
    if isinstance(zones, Reply):
        return zones
    market = "spot" if call.form.get("InstanceMarketOptions.MarketType") == "spot" else "on-demand"
    for refused in (
        _disk_too_small(call, backend),
        _over_quota(call, scenario, backend, fleet, kind, market == "spot"),
        _bid_too_low(call, scenario, kind, zones) if market == "spot" else None,
    ):
        if refused is not None:
            return refused
    for zone in zones:
        if _has_room(scenario, backend, fleet, kind, zone, market):
            return call if len(zones) == 1 else _in_zone(call, zone)
    return _no_capacity(call, kind, zones)


def complete(call: Call, instance: Any) -> None:
    """moto's instance as AWS makes it: tags on everything, the disks and cards that end with it."""
    nics = list(instance.nics.values())
    first = "NetworkInterface.1.DeleteOnTermination"
    for nic in nics:
        nic.delete_on_termination = call.form.get(first, "true").lower() == "true"
    for kind, tags in _tags(call).items():
        if kind == "network-interface":
            for nic in nics:
                nic.add_tags(tags)
    mappings = _mappings(call)
    for device, volume in instance.get_block_device_mapping:
        said = mappings.get(device, {})
        if "Ebs.DeleteOnTermination" not in said and device == instance.root_device_name:
            volume.delete_on_termination = True
        made = instance.ec2_backend.volumes.get(volume.volume_id)
        if made is not None and "Ebs.VolumeType" not in said:
            made.volume_type = "gp3"


def _zones(call: Call, scenario: Scenario, backend: Backend, kind: str) -> list[str] | Reply:
    """Where it may go: the zone that it names, or every one that has the type."""
    if not backend.type_of(kind):
        words = f"Invalid value '{kind}' for InstanceType."
        return refusal(call, "InvalidParameterValue", words)
    having = backend.zones_of(call.region, kind) if offers(scenario, kind) else []
    named = call.form.get("Placement.AvailabilityZone", "")
    subnet = call.form.get("SubnetId") or call.form.get("NetworkInterface.1.SubnetId")
    if subnet:
        with backend.held():
            known = backend.ec2(call.region).describe_subnets()
            found = next((one for one in known if one.id == subnet), None)
        if found is None:
            words = f"The subnet ID '{subnet}' does not exist"
            return refusal(call, "InvalidSubnetID.NotFound", words)
        named = found.availability_zone
    if having and not named:
        return having
    if named in having:
        return [named]
    words = (
        f"Your requested instance type ({kind}) is not supported in your requested Availability "
        f"Zone ({named or call.region}). Please retry your request by not specifying an "
        f"Availability Zone or choosing {', '.join(having) or 'another region'}."
    )
    return refusal(call, "Unsupported", words)


def _in_zone(call: Call, zone: str) -> Call:
    return call.with_form({**call.form, "Placement.AvailabilityZone": zone})


def _disk_too_small(call: Call, backend: Backend) -> Reply | None:
    with backend.held():
        image = backend.ec2(call.region).amis.get(call.form.get("ImageId", ""))
        least = getattr(image, "gib", 0)
        snapshot = image.ebs_snapshot.id if image else ""
    said = _mappings(call).get(getattr(image, "root_device_name", ""), {})
    size = said.get("Ebs.VolumeSize", "")
    if not size.isdigit() or int(size) >= least:
        return None
    words = (
        f"Volume of size {size}GB is smaller than snapshot '{snapshot}', expect size >= {least}GB"
    )
    return refusal(call, "InvalidBlockDeviceMapping", words)


def _over_quota(
    call: Call, scenario: Scenario, backend: Backend, fleet: Fleet, kind: str, spot: bool
) -> Reply | None:
    key = limits.bucket(kind, spot)
    limit = getattr(scenario.quotas, key)
    count = int(call.form.get("MinCount") or 1)
    used = sum(
        _cpus(backend, other)
        for other, _, market in _living(call.region, backend, fleet)
        if limits.bucket(other, market == "spot") == key
    )
    if used + count * _cpus(backend, kind) <= limit:
        return None
    return limits.exceeded(call, spot, limit)


def _bid_too_low(call: Call, scenario: Scenario, kind: str, zones: list[str]) -> Reply | None:
    import time

    bid = call.form.get("InstanceMarketOptions.SpotOptions.MaxPrice")
    asked = [price for zone in zones if (price := spot_price(scenario, kind, zone, time.time()))]
    if not bid or not asked or float(bid) >= min(asked):
        return None
    words = (
        f"Your Spot request price of {bid} is lower than the minimum required Spot request "
        f"fulfillment price of {min(asked)}."
    )
    return refusal(call, "SpotMaxPriceTooLow", words)


def _has_room(
    scenario: Scenario, backend: Backend, fleet: Fleet, kind: str, zone: str, market: str
) -> bool:
    living = _living(zone[:-1], backend, fleet)
    for rule in scenario.capacity:
        if not _rules(rule, kind, zone, market):
            continue
        if sum(_rules(rule, *other) for other in living) >= rule.left:
            return False
    return True


def _rules(rule: Capacity, kind: str, zone: str, market: str) -> bool:
    """Whether a capacity is about such machines."""
    fits = fnmatchcase(kind, rule.type) and fnmatchcase(zone, rule.zone)
    return fits and rule.market in ("*", market)


def _living(region: str, backend: Backend, fleet: Fleet) -> list[tuple[str, str, str]]:
    """(type, zone, market) of each instance that runs."""
    with backend.held():
        instances = [
            fleet.instance(record)
            for record in list(fleet.records.values())
            if record.region == region
        ]
        return [
            (one.instance_type, str(one.availability_zone), one.lifecycle or "on-demand")
            for one in instances
            if one._state.name in LIVE
        ]


def _no_capacity(call: Call, kind: str, zones: list[str]) -> Reply:
    words = (
        f"We currently do not have sufficient {kind} capacity in the Availability Zone you "
        f"requested ({', '.join(zones)}). Our system will be working on provisioning additional "
        "capacity."
    )
    return refusal(call, "InsufficientInstanceCapacity", words, 500)


def _cpus(backend: Backend, kind: str) -> int:
    return int(backend.type_of(kind).get("VCpuInfo", {}).get("DefaultVCpus", 1))


def _mappings(call: Call) -> dict[str, dict[str, str]]:
    """The block device mappings by device: their fields after the number."""
    found: dict[str, dict[str, str]] = {}
    number = 1
    while (device := call.form.get(f"BlockDeviceMapping.{number}.DeviceName")) is not None:
        start = f"BlockDeviceMapping.{number}."
        found[device] = {
            key.removeprefix(start): value
            for key, value in call.form.items()
            if key.startswith(start)
        }
        number += 1
    return found


def _tags(call: Call) -> dict[str, dict[str, str]]:
    """The tags that a call brings, by the kind of resource."""
    found: dict[str, dict[str, str]] = {}
    number = 1
    while (kind := call.form.get(f"TagSpecification.{number}.ResourceType")) is not None:
        tags, at = found.setdefault(kind, {}), 1
        while (key := call.form.get(f"TagSpecification.{number}.Tag.{at}.Key")) is not None:
            tags[key] = call.form.get(f"TagSpecification.{number}.Tag.{at}.Value", "")
            at += 1
        number += 1
    return found
