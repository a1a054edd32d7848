"""Disks that outlive their server."""

from __future__ import annotations

import msgspec

from labctl.errors import ProviderError
from labctl.model import Resource
from labctl.providers.gcp import instances, labels, leftovers, permissions
from labctl.providers.gcp.clients import GcpClients
from labctl.providers.gcp.replies import AttachedDisk, GceDisk, GceInstance, last_part

BY_ID = "/dev/disk/by-id/google-"


def keep(clients: GcpClients, server_id: str, expires_at: float) -> list[Resource]:
    """Keep the server's own disks when it is deleted, labeled with their expiry."""
    instance = instances.require_instance(clients, server_id)
    account, kept = clients.project, []
    for attached, disk in _list_own_disks(clients, instance):
        # The label first: a disk that is kept without an expiry would be kept forever.
        _label_expiry(clients, disk, f"{expires_at:.0f}")
        _set_auto_delete(clients, instance, attached, delete=False)
        kept.append(leftovers.make_disk_resource(disk, server_id, account))
    expiry = float(round(expires_at))
    return [msgspec.structs.replace(one, account=account, expires_at=expiry) for one in kept]


def release(clients: GcpClients, server_id: str) -> None:
    """Delete the server's own disks when it is deleted. An absent server counts as success."""
    instance = instances.find_instance(clients, server_id)
    if instance is None:
        return
    for attached, disk in _list_own_disks(clients, instance):
        if disk.labels.get(labels.EXPIRES, "0") != "0":
            _set_auto_delete(clients, instance, attached, delete=True)
            _label_expiry(clients, disk, "0")


def attach(clients: GcpClients, resource: Resource, server_id: str) -> str:
    """Attach a kept disk; return the device's path on the server, which appears in a moment."""
    instance = instances.require_instance(clients, server_id)
    name, zone = labels.split_id(resource.id) or ("", "")
    here = last_part(instance.zone)
    if zone != here:
        raise ProviderError(
            f"the disk {resource.id} cannot be attached to {server_id}",
            why=f"it is in {zone}, the server in {here}",
            hint=f"set server.gcp.regions: [{labels.get_region(zone)}], then:\nlabctl up",
        )
    if not any(last_part(one.source) == name for one in instance.disks):
        types = clients.types
        message = clients.call(
            "instances",
            "attach_disk_unary",
            permissions.ATTACH,
            zone=zone,
            instance=instance.name,
            attached_disk_resource=types.AttachedDisk(
                source=f"projects/{clients.project}/zones/{zone}/disks/{name}",
                device_name=name,
                auto_delete=False,
            ),
        )
        instances.wait_for_zone(clients, message, zone, f"the disk {name}", permissions.ATTACH)
    return f"{BY_ID}{name}"


def _list_own_disks(
    clients: GcpClients, instance: GceInstance
) -> list[tuple[AttachedDisk, GceDisk]]:
    """List the disks that were created with the instance."""
    token = instance.labels.get(labels.TOKEN, "")
    if not token:
        return []
    found = leftovers.list_disks(clients, f"labels.{labels.TOKEN}={token}")
    zone = last_part(instance.zone)
    by_name = {disk.name: disk for disk in found if last_part(disk.zone) == zone}
    return [
        (attached, by_name[name])
        for attached in instance.disks
        if (name := last_part(attached.source)) in by_name
    ]


def _label_expiry(clients: GcpClients, disk: GceDisk, value: str) -> None:
    zone = last_part(disk.zone)
    message = clients.call(
        "disks",
        "set_labels_unary",
        permissions.LABEL_DISK,
        zone=zone,
        resource=disk.name,
        zone_set_labels_request_resource=clients.types.ZoneSetLabelsRequest(
            labels={**disk.labels, labels.EXPIRES: value},
            label_fingerprint=disk.label_fingerprint,
        ),
    )
    instances.wait_for_zone(clients, message, zone, f"the disk {disk.name}", permissions.LABEL_DISK)


def _set_auto_delete(
    clients: GcpClients, instance: GceInstance, attached: AttachedDisk, *, delete: bool
) -> None:
    zone = last_part(instance.zone)
    message = clients.call(
        "instances",
        "set_disk_auto_delete_unary",
        permissions.KEEP,
        zone=zone,
        instance=instance.name,
        auto_delete=delete,
        device_name=attached.device_name,
    )
    instances.wait_for_zone(clients, message, zone, instance.name, permissions.KEEP)
