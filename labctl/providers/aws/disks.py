"""EBS volumes that outlive their server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from labctl.errors import ProviderError
from labctl.model import Resource
from labctl.providers.aws import instances, tags
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import translate_errors
from labctl.providers.aws.leftovers import LIVING, make_volume_resource

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.type_defs import (
        InstanceBlockDeviceMappingSpecificationTypeDef,
        VolumeTypeDef,
    )

    from labctl.providers.aws.tags import OwnedInstance

SLOTS = tuple(f"/dev/sd{letter}" for letter in "fghijklmnop")
XEN = ("p2.", "p3.", "g3.", "g3s.")


def keep(clients: Clients, server_id: str, expires_at: float) -> list[Resource]:
    """Keep the server's own volumes when it is terminated, tagged with their expiry."""
    instance = instances.require_instance(clients, server_id)
    region = server_id.rpartition(".")[2]
    ec2 = clients.get_ec2(region)
    volumes = _own_volumes(ec2, instance)
    if not volumes:
        return []
    # The tag first: a disk that is kept without an expiry would be kept forever.
    _tag_expiry(ec2, volumes, f"{expires_at:.0f}")
    _set_delete_on_termination(ec2, instance, volumes, delete=False)
    account = instance["OwnerId"]
    kept = [make_volume_resource(volume, region, server_id) for volume in volumes]
    return [
        msgspec.structs.replace(one, account=account, expires_at=float(round(expires_at)))
        for one in kept
    ]


def release(clients: Clients, server_id: str) -> None:
    """Delete the server's own volumes when it is terminated; no effect on one that is ending."""
    instance = instances.find_instance(clients, server_id)
    if instance is None or instance["State"]["Name"] not in LIVING:
        return
    ec2 = clients.get_ec2(server_id.rpartition(".")[2])
    volumes = [one for one in _own_volumes(ec2, instance) if tags.parse_tags(one).get(tags.EXPIRES)]
    if volumes:
        _set_delete_on_termination(ec2, instance, volumes, delete=True)
        _tag_expiry(ec2, volumes, "")


def _own_volumes(ec2: EC2Client, instance: OwnedInstance) -> list[VolumeTypeDef]:
    """Return the volumes that were created with the instance, as AWS describes them."""
    attached = tags.make_filters(
        {"Name": "attachment.instance-id", "Values": [instance["InstanceId"]]}
    )
    with translate_errors():
        volumes = ec2.describe_volumes(Filters=attached)["Volumes"]
    return [volume for volume in volumes if tags.is_same_attempt(volume, instance)]


def _tag_expiry(ec2: EC2Client, volumes: list[VolumeTypeDef], value: str) -> None:
    with translate_errors():
        ec2.create_tags(
            Resources=[volume["VolumeId"] for volume in volumes],
            Tags=tags.as_pairs({tags.EXPIRES: value}),
        )


def _set_delete_on_termination(
    ec2: EC2Client, instance: OwnedInstance, volumes: list[VolumeTypeDef], *, delete: bool
) -> None:
    mappings: list[InstanceBlockDeviceMappingSpecificationTypeDef] = [
        {"DeviceName": attachment["Device"], "Ebs": {"DeleteOnTermination": delete}}
        for volume in volumes
        for attachment in volume["Attachments"]
    ]
    with translate_errors():
        ec2.modify_instance_attribute(
            InstanceId=instance["InstanceId"], BlockDeviceMappings=mappings
        )


def attach(clients: Clients, resource: Resource, server_id: str) -> str:
    """Attach a kept volume; return the device's path on the server, which appears in a moment."""
    instance = instances.require_instance(clients, server_id)
    volume_id, _, region = resource.id.rpartition(".")
    zone = instance["Placement"]["AvailabilityZone"]
    ec2 = clients.get_ec2(region)
    with translate_errors():
        volumes = ec2.describe_volumes(
            Filters=tags.make_filters({"Name": "volume-id", "Values": [volume_id]})
        )["Volumes"]
    if not volumes:
        raise ProviderError(f"the disk {resource.id} is gone", hint="labctl orphans")
    volume = volumes[0]
    if volume["AvailabilityZone"] != zone:
        raise ProviderError(
            f"the disk {resource.id} cannot be attached to {server_id}",
            why=f"it is in {volume['AvailabilityZone']}, the server in {zone}",
            hint=f"set server.aws.regions: [{region}], then:\nlabctl up",
        )
    attached = [one for one in volume.get("Attachments", ()) if one.get("State") != "detached"]
    if any(one["InstanceId"] == instance["InstanceId"] for one in attached):
        return _device_path(instance, volume_id, attached[0]["Device"])
    slot = _find_free_slot(instance)
    with translate_errors():
        ec2.attach_volume(InstanceId=instance["InstanceId"], VolumeId=volume_id, Device=slot)
    return _device_path(instance, volume_id, slot)


def _find_free_slot(instance: OwnedInstance) -> str:
    used = {mapping["DeviceName"] for mapping in instance.get("BlockDeviceMappings", ())}
    for slot in SLOTS:
        if slot not in used:
            return slot
    raise ProviderError("the server has no slot left for another disk")


def _device_path(instance: OwnedInstance, volume_id: str, slot: str) -> str:
    """Return a volume's path. Nitro machines order disks freely: the serial number names them."""
    if instance["InstanceType"].startswith(XEN):
        return slot.replace("/dev/sd", "/dev/xvd")
    return f"/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_{volume_id.replace('-', '')}"
