"""Everything besides servers that bears our tag, with its price; and taking it away."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from labctl.errors import BusyError, DeniedError
from labctl.model import Resource
from labctl.providers.aws import instances, tags
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.deadline import PREFIX
from labctl.providers.aws.errors import code_of, is_absent, message_of, told
from labctl.providers.aws.fit import PROVIDER

# EBS list prices of us-east-1 (aws.amazon.com/ebs/pricing); others cost up to twice that.
USD_PER_GB_MONTH = {
    "gp3": 0.08,
    "gp2": 0.10,
    "io1": 0.125,
    "io2": 0.125,
    "st1": 0.045,
    "sc1": 0.015,
    "standard": 0.05,
}
SNAPSHOT_USD_PER_GB_MONTH = 0.05
# A public IPv4 address costs half a cent an hour, used or not (aws.amazon.com/vpc/pricing).
ADDRESS_USD_PER_MONTH = 0.005 * 730
LIVING = frozenset({"pending", "running", "stopping", "stopped"})
# AWS's answer to the removal of an interface that a machine has.
IN_USE = "InvalidParameterValue"
# Its image is still there.
SNAPSHOT_IN_USE = "InvalidSnapshot.InUse"
ACTIVE_VOLUMES = ("creating", "available", "in-use")

Reader = Callable[[Clients, str, "Living"], list[Resource]]


class Living:
    """The servers of ours in a region that have not ended, by instance and by lab."""

    def __init__(self, found: list[dict[str, Any]], region: str) -> None:
        self.by_lab: dict[str, str] = {}
        self.by_instance: dict[str, str] = {}
        self.labs: dict[str, str] = {}
        self.described: dict[str, dict[str, Any]] = {}
        for instance in found:
            bears = tags.tags_of(instance)
            server_id = f"{instance['InstanceId']}.{region}"
            lab_id = bears.get(tags.LAB_ID, "")
            self.labs[lab_id] = bears.get(tags.LAB, "")
            if instance["State"]["Name"] in LIVING:
                self.by_lab.setdefault(lab_id, server_id)
                self.by_instance[instance["InstanceId"]] = server_id
                self.described[server_id] = instance


def leftovers(
    clients: Clients, regions: Iterable[str], account: Callable[[], str]
) -> list[Resource]:
    """By region. What belongs to a server that lives names it as `server_id`.

    `account` says who owns a kept disk; it is called only where there is one.
    """

    def in_region(region: str) -> list[Resource]:
        with ThreadPoolExecutor(len(READERS)) as threads:
            living = Living(instances.described(clients.ec2(region), tags.ours()), region)
            lists = threads.map(lambda read: read(clients, region, living), READERS)
            return [resource for some in lists for resource in some]

    with ThreadPoolExecutor(instances.MOST_REGIONS_AT_ONCE) as threads:
        found = [resource for some in threads.map(in_region, regions) for resource in some]
    return [
        msgspec.structs.replace(one, account=account()) if one.expires_at else one for one in found
    ]


def volume_resource(volume: dict[str, Any], region: str, server_id: str) -> Resource:
    kind, size = volume.get("VolumeType", "gp3"), volume["Size"]
    made = volume.get("CreateTime")
    return _resource(
        "volume",
        volume["VolumeId"],
        region,
        tags.tags_of(volume),
        server_id,
        price_usd_per_month=round(size * USD_PER_GB_MONTH.get(kind, 0.125), 2),
        note=f"{size} GB {kind} in {volume['AvailabilityZone']}, at us-east-1's list price",
        created_at=made.timestamp() if made else None,
        zone=volume["AvailabilityZone"],
    )


def _resource(
    kind: str,
    native_id: str,
    region: str,
    bears: dict[str, str],
    server_id: str,
    *,
    price_usd_per_month: float = 0.0,
    note: str = "",
    created_at: float | None = None,
    zone: str = "",
) -> Resource:
    expires = bears.get(tags.EXPIRES, "")
    return Resource(
        provider=PROVIDER,
        kind=kind,
        id=f"{native_id}.{region}",
        price_usd_per_month=price_usd_per_month,
        note=note,
        lab=bears.get(tags.LAB, ""),
        lab_id=bears.get(tags.LAB_ID, ""),
        region=region,
        zone=zone,
        server_id=server_id,
        created_at=created_at,
        expires_at=float(expires) if expires.isdecimal() else None,
    )


def _pages(ec2: Any, call: str, key: str, **arguments: Any) -> list[dict[str, Any]]:
    with told():
        pages = ec2.get_paginator(call).paginate(**arguments)
        return [entry for page in pages for entry in page[key]]


def _volumes(clients: Clients, region: str, living: Living) -> list[Resource]:
    only = tags.ours({"Name": "status", "Values": list(ACTIVE_VOLUMES)})
    found = _pages(clients.ec2(region), "describe_volumes", "Volumes", Filters=only)
    return [_volume(one, region, living) for one in found]


def _volume(volume: dict[str, Any], region: str, living: Living) -> Resource:
    """A server's own volume that is to outlive it is a part of it until then, and no kept disk."""
    server_id = _attached(volume, living)
    resource = volume_resource(volume, region, server_id)
    if server_id and tags.are_of_one_attempt(volume, living.described[server_id]):
        return msgspec.structs.replace(resource, expires_at=None)
    return resource


def _attached(volume: dict[str, Any], living: Living) -> str:
    holders = [one.get("InstanceId", "") for one in volume.get("Attachments", ())]
    return next((living.by_instance[one] for one in holders if one in living.by_instance), "")


def _interfaces(clients: Clients, region: str, living: Living) -> list[Resource]:
    found = _pages(
        clients.ec2(region), "describe_network_interfaces", "NetworkInterfaces", Filters=tags.ours()
    )
    return [
        _resource(
            "network-interface",
            one["NetworkInterfaceId"],
            region,
            {tag["Key"]: tag["Value"] for tag in one.get("TagSet", ())},
            living.by_instance.get(one.get("Attachment", {}).get("InstanceId", ""), ""),
        )
        for one in found
    ]


def _groups(clients: Clients, region: str, living: Living) -> list[Resource]:
    found = _pages(
        clients.ec2(region), "describe_security_groups", "SecurityGroups", Filters=tags.ours()
    )
    return [_of_lab("security-group", one["GroupId"], region, one, living) for one in found]


def _keys(clients: Clients, region: str, living: Living) -> list[Resource]:
    with told():
        found = clients.ec2(region).describe_key_pairs(Filters=tags.ours())["KeyPairs"]
    return [_of_lab("key-pair", one["KeyName"], region, one, living) for one in found]


def _of_lab(
    kind: str, native_id: str, region: str, described: dict[str, Any], living: Living
) -> Resource:
    bears = tags.tags_of(described)
    return _resource(
        kind, native_id, region, bears, living.by_lab.get(bears.get(tags.LAB_ID, ""), "")
    )


def _addresses(clients: Clients, region: str, living: Living) -> list[Resource]:
    with told():
        found = clients.ec2(region).describe_addresses(Filters=tags.ours())["Addresses"]
    return [
        _resource(
            "address",
            one["AllocationId"],
            region,
            tags.tags_of(one),
            living.by_instance.get(one.get("InstanceId", ""), ""),
            price_usd_per_month=round(ADDRESS_USD_PER_MONTH, 2),
            note=str(one.get("PublicIp", "")),
        )
        for one in found
    ]


def _snapshots(clients: Clients, region: str, living: Living) -> list[Resource]:
    found = _pages(
        clients.ec2(region),
        "describe_snapshots",
        "Snapshots",
        Filters=tags.ours(),
        OwnerIds=["self"],
    )
    return [
        _resource(
            "snapshot",
            one["SnapshotId"],
            region,
            tags.tags_of(one),
            "",
            price_usd_per_month=round(one["VolumeSize"] * SNAPSHOT_USD_PER_GB_MONTH, 2),
            note=f"{one['VolumeSize']} GB at most, at us-east-1's list price",
        )
        for one in found
    ]


def _images(clients: Clients, region: str, living: Living) -> list[Resource]:
    """Machine images of ours; what they cost is their snapshots."""
    with told():
        found = clients.ec2(region).describe_images(Filters=tags.ours(), Owners=["self"])["Images"]
    return [
        _resource("image", one["ImageId"], region, tags.tags_of(one), "", note=one.get("Name", ""))
        for one in found
    ]


def _schedules(clients: Clients, region: str, living: Living) -> list[Resource]:
    """By name: single schedules bear no tags. Who may not list them cannot have made any."""
    scheduler = clients.client("scheduler", region)
    try:
        found = _pages(scheduler, "list_schedules", "Schedules", NamePrefix=PREFIX)
    except DeniedError:
        return []
    listed = []
    for one in found:
        lab_id, _, instance_id = one["Name"].removeprefix(PREFIX).partition("-")
        bears = {tags.LAB_ID: lab_id, tags.LAB: living.labs.get(lab_id, "")}
        server_id = living.by_instance.get(instance_id, "")
        listed.append(_resource("schedule", one["Name"], region, bears, server_id))
    return listed


READERS: tuple[Reader, ...] = (
    _volumes,
    _interfaces,
    _groups,
    _keys,
    _addresses,
    _images,
    _snapshots,
    _schedules,
)
_DELETE = {
    "volume": ("delete_volume", "VolumeId"),
    "network-interface": ("delete_network_interface", "NetworkInterfaceId"),
    "security-group": ("delete_security_group", "GroupId"),
    "key-pair": ("delete_key_pair", "KeyName"),
    "address": ("release_address", "AllocationId"),
    "image": ("deregister_image", "ImageId"),
    "snapshot": ("delete_snapshot", "SnapshotId"),
    "schedule": ("delete_schedule", "Name"),
}


def remove(clients: Clients, resource: Resource) -> None:
    """An absent one counts as success; BusyError while something still uses it."""
    from botocore.exceptions import ClientError

    native_id, dot, region = resource.id.rpartition(".")
    if not dot or resource.kind not in _DELETE:
        return
    call, argument = _DELETE[resource.kind]
    service = "scheduler" if resource.kind == "schedule" else "ec2"
    with told():
        try:
            getattr(clients.client(service, region), call)(**{argument: native_id})
        except ClientError as error:
            in_use = resource.kind == "network-interface" and code_of(error) == IN_USE
            if in_use or code_of(error) == SNAPSHOT_IN_USE:
                raise BusyError(
                    f"{resource.id} is still in use", why=message_of(error), hint="labctl orphans"
                ) from error
            if not is_absent(error):
                raise
