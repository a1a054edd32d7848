"""List and remove all resources with labctl's tag except servers, with their prices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from labctl.config.member_ids import list_lab_ids
from labctl.errors import BusyError, DeniedError
from labctl.lazy import lazy_imports
from labctl.model import Resource
from labctl.providers.aws import instances, placement, tags
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.deadline import PREFIX
from labctl.providers.aws.errors import get_code, get_message, is_absent, translate_errors
from labctl.providers.aws.fit import PROVIDER

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.type_defs import VolumeTypeDef

    from labctl.providers.aws.tags import OwnedInstance, Tagged

with lazy_imports(__name__):
    from botocore import exceptions as boto_errors

# EBS list prices of us-east-1 (aws.amazon.com/ebs/pricing); other regions cost up to twice that.
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
# AWS's error for the removal of an interface that a machine uses.
IN_USE = "InvalidParameterValue"
# AWS's error for the removal of a snapshot whose image still exists.
SNAPSHOT_IN_USE = "InvalidSnapshot.InUse"
ACTIVE_VOLUMES = ("creating", "available", "in-use")

Reader = Callable[[Clients, str, "LiveServers"], list[Resource]]


class LiveServers:
    """Our servers in a region that have not ended, by instance and by lab."""

    def __init__(self, instances: list[OwnedInstance], region: str) -> None:
        self.by_lab: dict[str, str] = {}
        self.by_instance: dict[str, str] = {}
        self.labs: dict[str, str] = {}
        self.described: dict[str, OwnedInstance] = {}
        for instance in instances:
            instance_tags = tags.parse_tags(instance)
            server_id = f"{instance['InstanceId']}.{region}"
            lab_id = instance_tags.get(tags.LAB_ID, "")
            self.labs[lab_id] = instance_tags.get(tags.LAB, "")
            if instance["State"]["Name"] in LIVING:
                self.by_lab.setdefault(lab_id, server_id)
                self.by_instance[instance["InstanceId"]] = server_id
                self.described[server_id] = instance


def leftovers(
    clients: Clients, regions: Iterable[str], account: Callable[[], str]
) -> list[Resource]:
    """List the resources, by region. Those of a live server have its `server_id`.

    `account` returns the account that owns kept disks; it is called only if there is one.
    """

    def list_region(region: str) -> list[Resource]:
        with ThreadPoolExecutor(len(READERS)) as threads:
            living = LiveServers(
                instances.describe(clients.get_ec2(region), tags.make_filters()), region
            )
            lists = threads.map(lambda read: read(clients, region, living), READERS)
            return [resource for some in lists for resource in some]

    with ThreadPoolExecutor(instances.MOST_REGIONS_AT_ONCE) as threads:
        resources = [resource for some in threads.map(list_region, regions) for resource in some]
    return [
        msgspec.structs.replace(one, account=account()) if one.expires_at else one
        for one in resources
    ]


def make_volume_resource(volume: VolumeTypeDef, region: str, server_id: str) -> Resource:
    kind, size = volume.get("VolumeType", "gp3"), volume["Size"]
    created_at = volume.get("CreateTime")
    return _make_resource(
        "volume",
        volume["VolumeId"],
        region,
        tags.parse_tags(volume),
        server_id,
        price_usd_per_month=round(size * USD_PER_GB_MONTH.get(kind, 0.125), 2),
        note=f"{size} GB {kind} in {volume['AvailabilityZone']}, at us-east-1's list price",
        created_at=created_at.timestamp() if created_at else None,
        zone=volume["AvailabilityZone"],
    )


def _make_resource(
    kind: str,
    native_id: str,
    region: str,
    resource_tags: dict[str, str],
    server_id: str,
    *,
    price_usd_per_month: float = 0.0,
    note: str = "",
    created_at: float | None = None,
    zone: str = "",
) -> Resource:
    expires = resource_tags.get(tags.EXPIRES, "")
    return Resource(
        provider=PROVIDER,
        kind=kind,
        id=f"{native_id}.{region}",
        price_usd_per_month=price_usd_per_month,
        note=note,
        lab=resource_tags.get(tags.LAB, ""),
        lab_id=resource_tags.get(tags.LAB_ID, ""),
        region=region,
        zone=zone,
        server_id=server_id,
        created_at=created_at,
        expires_at=float(expires) if expires.isdecimal() else None,
    )


def _list_volumes(clients: Clients, region: str, living: LiveServers) -> list[Resource]:
    filters = tags.make_filters({"Name": "status", "Values": list(ACTIVE_VOLUMES)})
    with translate_errors():
        pages = clients.get_ec2(region).get_paginator("describe_volumes").paginate(Filters=filters)
        return [
            _describe_volume(volume, region, living) for page in pages for volume in page["Volumes"]
        ]


def _describe_volume(volume: VolumeTypeDef, region: str, living: LiveServers) -> Resource:
    """Return a volume as a Resource.

    A live server's own volume is part of it, and not yet a kept disk, even if it will outlive it.
    """
    server_id = _find_server(volume, living)
    resource = make_volume_resource(volume, region, server_id)
    if server_id and tags.is_same_attempt(volume, living.described[server_id]):
        return msgspec.structs.replace(resource, expires_at=None)
    return resource


def _find_server(volume: VolumeTypeDef, living: LiveServers) -> str:
    """Return the id of the live server that a volume is attached to, or ""."""
    holders = [attachment.get("InstanceId", "") for attachment in volume.get("Attachments", ())]
    return next((living.by_instance[i] for i in holders if i in living.by_instance), "")


def _list_interfaces(clients: Clients, region: str, living: LiveServers) -> list[Resource]:
    reader = clients.get_ec2(region).get_paginator("describe_network_interfaces")
    with translate_errors():
        pages = reader.paginate(Filters=tags.make_filters())
        interfaces = [one for page in pages for one in page["NetworkInterfaces"]]
    return [
        _make_resource(
            "network-interface",
            one["NetworkInterfaceId"],
            region,
            {tag["Key"]: tag["Value"] for tag in one.get("TagSet", ())},
            living.by_instance.get(one.get("Attachment", {}).get("InstanceId", ""), ""),
        )
        for one in interfaces
    ]


def _list_groups(clients: Clients, region: str, living: LiveServers) -> list[Resource]:
    reader = clients.get_ec2(region).get_paginator("describe_security_groups")
    with translate_errors():
        pages = reader.paginate(Filters=tags.make_filters())
        groups = [group for page in pages for group in page["SecurityGroups"]]
    return [
        _make_lab_resource("security-group", group["GroupId"], region, group, living)
        for group in groups
    ]


def _list_keys(clients: Clients, region: str, living: LiveServers) -> list[Resource]:
    with translate_errors():
        keys = clients.get_ec2(region).describe_key_pairs(Filters=tags.make_filters())["KeyPairs"]
    return [_make_lab_resource("key-pair", key["KeyName"], region, key, living) for key in keys]


def _make_lab_resource(
    kind: str, native_id: str, region: str, described: Tagged, living: LiveServers
) -> Resource:
    """Return a resource that belongs to a lab, and so to one of the lab's live servers, if any."""
    lab_tags = tags.parse_tags(described)
    lab_ids = list_lab_ids(lab_tags.get(tags.LAB_ID, ""))
    server_id = next((living.by_lab[one] for one in lab_ids if one in living.by_lab), "")
    return _make_resource(kind, native_id, region, lab_tags, server_id)


def _list_placement_groups(clients: Clients, region: str, living: LiveServers) -> list[Resource]:
    """List the placement groups of labs with several servers.

    Credentials without the permission to list them cannot have created any.
    """
    try:
        with translate_errors():
            groups = clients.get_ec2(region).describe_placement_groups(Filters=tags.make_filters())
    except DeniedError:
        return []
    return [
        _make_lab_resource("placement-group", group["GroupName"], region, group, living)
        for group in groups["PlacementGroups"]
        if group.get("State") not in placement.ENDING
    ]


def _list_addresses(clients: Clients, region: str, living: LiveServers) -> list[Resource]:
    with translate_errors():
        addresses = clients.get_ec2(region).describe_addresses(Filters=tags.make_filters())[
            "Addresses"
        ]
    return [
        _make_resource(
            "address",
            one["AllocationId"],
            region,
            tags.parse_tags(one),
            living.by_instance.get(one.get("InstanceId", ""), ""),
            price_usd_per_month=round(ADDRESS_USD_PER_MONTH, 2),
            note=str(one.get("PublicIp", "")),
        )
        for one in addresses
    ]


def _list_snapshots(clients: Clients, region: str, living: LiveServers) -> list[Resource]:
    reader = clients.get_ec2(region).get_paginator("describe_snapshots")
    with translate_errors():
        pages = reader.paginate(Filters=tags.make_filters(), OwnerIds=["self"])
        snapshots = [one for page in pages for one in page["Snapshots"]]
    return [
        _make_resource(
            "snapshot",
            one["SnapshotId"],
            region,
            tags.parse_tags(one),
            "",
            price_usd_per_month=round(one["VolumeSize"] * SNAPSHOT_USD_PER_GB_MONTH, 2),
            note=f"{one['VolumeSize']} GB at most, at us-east-1's list price",
        )
        for one in snapshots
    ]


def _list_images(clients: Clients, region: str, living: LiveServers) -> list[Resource]:
    """List our machine images. They are free; only their snapshots cost money."""
    with translate_errors():
        images = clients.get_ec2(region).describe_images(
            Filters=tags.make_filters(), Owners=["self"]
        )["Images"]
    return [
        _make_resource(
            "image", one["ImageId"], region, tags.parse_tags(one), "", note=one.get("Name", "")
        )
        for one in images
    ]


def _list_schedules(clients: Clients, region: str, living: LiveServers) -> list[Resource]:
    """List schedules by name, since single schedules have no tags.

    Credentials without the permission to list them cannot have created any.
    """
    reader = clients.get_scheduler(region).get_paginator("list_schedules")
    try:
        with translate_errors():
            pages = reader.paginate(NamePrefix=PREFIX)
            schedules = [schedule for page in pages for schedule in page["Schedules"]]
    except DeniedError:
        return []
    resources = []
    for schedule in schedules:
        lab_id, _, instance_id = schedule["Name"].removeprefix(PREFIX).partition("-")
        lab_tags = {tags.LAB_ID: lab_id, tags.LAB: living.labs.get(lab_id, "")}
        server_id = living.by_instance.get(instance_id, "")
        resources.append(_make_resource("schedule", schedule["Name"], region, lab_tags, server_id))
    return resources


READERS: tuple[Reader, ...] = (
    _list_volumes,
    _list_interfaces,
    _list_groups,
    _list_keys,
    _list_placement_groups,
    _list_addresses,
    _list_images,
    _list_snapshots,
    _list_schedules,
)
# By the kind of a resource of EC2: what deletes the one with this id.
_DELETE: dict[str, Callable[[EC2Client, str], object]] = {
    "volume": lambda ec2, id: ec2.delete_volume(VolumeId=id),
    "network-interface": lambda ec2, id: ec2.delete_network_interface(NetworkInterfaceId=id),
    "security-group": lambda ec2, id: ec2.delete_security_group(GroupId=id),
    "key-pair": lambda ec2, id: ec2.delete_key_pair(KeyName=id),
    "placement-group": lambda ec2, id: ec2.delete_placement_group(GroupName=id),
    "address": lambda ec2, id: ec2.release_address(AllocationId=id),
    "image": lambda ec2, id: ec2.deregister_image(ImageId=id),
    "snapshot": lambda ec2, id: ec2.delete_snapshot(SnapshotId=id),
}


def remove(clients: Clients, resource: Resource) -> None:
    """Remove a resource. An absent one counts as success; BusyError while something uses it."""
    native_id, dot, region = resource.id.rpartition(".")
    if not dot or (resource.kind != "schedule" and resource.kind not in _DELETE):
        return
    with translate_errors():
        try:
            if resource.kind == "schedule":
                clients.get_scheduler(region).delete_schedule(Name=native_id)
            else:
                _DELETE[resource.kind](clients.get_ec2(region), native_id)
        except boto_errors.ClientError as error:
            in_use = resource.kind == "network-interface" and get_code(error) == IN_USE
            if in_use or get_code(error) == SNAPSHOT_IN_USE:
                raise BusyError(
                    f"{resource.id} is still in use", why=get_message(error), hint="labctl orphans"
                ) from error
            if not is_absent(error):
                raise
