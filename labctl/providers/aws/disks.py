"""Disks that outlive their server."""

from __future__ import annotations

from typing import Any

import msgspec

from labctl.errors import ProviderError
from labctl.model import Resource
from labctl.providers.aws import instances, tags
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import told
from labctl.providers.aws.remains import volume_resource

SLOTS = tuple(f"/dev/sd{letter}" for letter in "fghijklmnop")
XEN = ("p2.", "p3.", "g3.", "g3s.")


def keep(clients: Clients, server_id: str, expires_at: float) -> list[Resource]:
    """Its volumes stay when it is terminated, and bear the time when they may be removed."""
    instance = instances.present(clients, server_id)
    region = server_id.rpartition(".")[2]
    ec2 = clients.ec2(region)
    mappings = [one for one in instance.get("BlockDeviceMappings", ()) if "Ebs" in one]
    if not mappings:
        return []
    volumes = [one["Ebs"]["VolumeId"] for one in mappings]
    with told():
        # The tag first: a disk that stays without an expiry would stay for good.
        ec2.create_tags(Resources=volumes, Tags=tags.pairs({tags.EXPIRES: f"{expires_at:.0f}"}))
        ec2.modify_instance_attribute(
            InstanceId=instance["InstanceId"],
            BlockDeviceMappings=[
                {"DeviceName": one["DeviceName"], "Ebs": {"DeleteOnTermination": False}}
                for one in mappings
            ],
        )
        found = ec2.describe_volumes(VolumeIds=volumes)["Volumes"]
    account = str(instance.get("OwnerId", ""))
    kept = [volume_resource(volume, region, server_id) for volume in found]
    return [msgspec.structs.replace(one, account=account) for one in kept]


def attach(clients: Clients, resource: Resource, server_id: str) -> str:
    """Attach a kept volume; returns the device's path on the server, which appears in a moment."""
    instance = instances.present(clients, server_id)
    volume_id, _, region = resource.id.rpartition(".")
    zone = instance["Placement"]["AvailabilityZone"]
    ec2 = clients.ec2(region)
    with told():
        found = ec2.describe_volumes(
            Filters=tags.ours({"Name": "volume-id", "Values": [volume_id]})
        )["Volumes"]
    if not found:
        raise ProviderError(f"the disk {resource.id} is gone", hint="labctl orphans")
    volume = found[0]
    if volume["AvailabilityZone"] != zone:
        raise ProviderError(
            f"the disk {resource.id} cannot be given to {server_id}",
            why=f"it is in {volume['AvailabilityZone']}, the server in {zone}",
            hint=f"start a server there: labctl up with server.aws.regions: [{region}]",
        )
    attached = [one for one in volume.get("Attachments", ()) if one.get("State") != "detached"]
    if any(one["InstanceId"] == instance["InstanceId"] for one in attached):
        return _path(instance, volume_id, attached[0]["Device"])
    slot = _free_slot(instance)
    with told():
        ec2.attach_volume(InstanceId=instance["InstanceId"], VolumeId=volume_id, Device=slot)
    return _path(instance, volume_id, slot)


def _free_slot(instance: dict[str, Any]) -> str:
    taken = {one["DeviceName"] for one in instance.get("BlockDeviceMappings", ())}
    for slot in SLOTS:
        if slot not in taken:
            return slot
    raise ProviderError("the server has no slot left for another disk")


def _path(instance: dict[str, Any], volume_id: str, slot: str) -> str:
    """On Nitro machines disks come in any order, and only their serial number tells them apart."""
    if instance["InstanceType"].startswith(XEN):
        return slot.replace("/dev/sd", "/dev/xvd")
    return f"/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_{volume_id.replace('-', '')}"
