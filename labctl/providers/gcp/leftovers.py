"""List and remove all resources with labctl's label or name except servers, with their prices."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from labctl.config.member_ids import list_lab_ids
from labctl.errors import DeniedError, LabError
from labctl.model import Resource
from labctl.providers.gcp import instances, labels, network, permissions
from labctl.providers.gcp.clients import GcpClients, is_absent
from labctl.providers.gcp.replies import (
    FirewallRule,
    GceAddress,
    GceDisk,
    GceInstance,
    last_part,
    parse_timestamp,
)

# List prices of us-central1 in USD per GiB and month: cloud.google.com/compute/disks-image-pricing.
# Other regions cost up to half as much again. Of Hyperdisk this is the capacity alone.
USD_PER_GIB_MONTH = {
    "pd-standard": 0.04,
    "pd-balanced": 0.10,
    "pd-ssd": 0.17,
    "hyperdisk-balanced": 0.08,
}
# A reserved external address that no machine uses (cloud.google.com/vpc/network-pricing).
UNUSED_ADDRESS_USD_PER_MONTH = 0.01 * 730
DISK, RULE, ADDRESS = "disk", "firewall-rule", "address"


class LiveInstances:
    """Our servers that exist, by name and by lab."""

    def __init__(self, found: list[GceInstance]) -> None:
        self.by_name: dict[tuple[str, str], GceInstance] = {}
        self.by_lab: dict[str, str] = {}
        for instance in found:
            zone = last_part(instance.zone)
            self.by_name[instance.name, zone] = instance
            record = labels.parse_record(instance)
            lab_id = record.lab_id if record else instance.labels.get(labels.LAB_ID, "")
            self.by_lab.setdefault(lab_id, labels.make_server_id(instance.name, zone))

    def find_user(self, users: tuple[str, ...]) -> GceInstance | None:
        """Return the server that is among the users of a resource."""
        names = [(last_part(url), url.split("/zones/")[-1].partition("/")[0]) for url in users]
        return next((self.by_name[name] for name in names if name in self.by_name), None)


def list_leftovers(clients: GcpClients) -> list[Resource]:
    """List the resources. Those of a live server have its `server_id`."""
    with ThreadPoolExecutor(4) as threads:
        found = threads.submit(instances.list_instances, clients)
        disks = threads.submit(list_disks, clients)
        rules = threads.submit(network.list_rules, clients)
        addresses = threads.submit(_list_addresses, clients)
        living, account = LiveInstances(found.result()), clients.project
        return [
            *(_describe_disk(disk, living, account) for disk in disks.result()),
            *_describe_rules(rules.result(), living),
            *(_describe_address(address, living) for address in addresses.result()),
        ]


def list_disks(clients: GcpClients, condition: str = labels.FILTER) -> list[GceDisk]:
    """List our disks in every zone."""
    return clients.list_everywhere(
        GceDisk, "disks", "disks", permissions.LIST_DISKS, filter=condition
    )


def make_disk_resource(disk: GceDisk, server_id: str, account: str) -> Resource:
    zone, kind, size = last_part(disk.zone), last_part(disk.type), int(disk.size_gb)
    expires = disk.labels.get(labels.EXPIRES, "")
    price = size * USD_PER_GIB_MONTH.get(kind, USD_PER_GIB_MONTH["pd-ssd"])
    return Resource(
        provider=labels.PROVIDER,
        kind=DISK,
        id=labels.make_server_id(disk.name, zone),
        price_usd_per_month=round(price, 2),
        note=f"{size} GiB {kind} in {zone}, at us-central1's list price",
        lab=disk.labels.get(labels.LAB, ""),
        lab_id=disk.labels.get(labels.LAB_ID, ""),
        region=labels.get_region(zone),
        zone=zone,
        server_id=server_id,
        created_at=parse_timestamp(disk.creation_timestamp) or None,
        expires_at=float(expires) if expires.isdecimal() and int(expires) else None,
        account=account if expires.isdecimal() and int(expires) else "",
    )


def remove(clients: GcpClients, resource: Resource) -> None:
    """Remove a resource. An absent one counts as success; BusyError while something uses it."""
    parts = labels.split_id(resource.id)
    if parts is None or resource.kind not in _DELETE:
        return
    try:
        _DELETE[resource.kind](clients, *parts)
    except LabError as error:
        if not is_absent(error):
            raise


def _describe_disk(disk: GceDisk, living: LiveInstances, account: str) -> Resource:
    """Return a disk as a Resource.

    A live server's own disk is part of it, and not yet a kept disk, even if it will outlive it.
    """
    user = living.find_user(disk.users)
    if user is None:
        return make_disk_resource(disk, "", account)
    server_id = labels.make_server_id(user.name, last_part(user.zone))
    resource = make_disk_resource(disk, server_id, account)
    if disk.labels.get(labels.TOKEN) == user.labels.get(labels.TOKEN):
        return msgspec.structs.replace(resource, expires_at=None, account="")
    return resource


def _describe_rules(rules: list[FirewallRule], living: LiveInstances) -> list[Resource]:
    resources = []
    for rule in rules:
        record = labels.parse_firewall_record(rule.description)
        if record is None:
            continue
        lab_ids = list_lab_ids(record.lab_id)
        resources.append(
            Resource(
                provider=labels.PROVIDER,
                kind=RULE,
                id=labels.make_server_id(rule.name, labels.GLOBAL),
                lab=record.lab,
                lab_id=record.lab_id,
                region=labels.GLOBAL,
                server_id=next((living.by_lab[i] for i in lab_ids if i in living.by_lab), ""),
                created_at=parse_timestamp(rule.creation_timestamp) or None,
            )
        )
    return resources


def _list_addresses(clients: GcpClients) -> list[GceAddress]:
    """List reserved addresses with our label.

    labctl reserves none; those without the permission to list them have none either.
    """
    try:
        return clients.list_everywhere(
            GceAddress, "addresses", "addresses", permissions.LIST_ADDRESSES, filter=labels.FILTER
        )
    except DeniedError:
        return []


def _describe_address(address: GceAddress, living: LiveInstances) -> Resource:
    user, region = living.find_user(address.users), last_part(address.region) or labels.GLOBAL
    server_id = labels.make_server_id(user.name, last_part(user.zone)) if user else ""
    return Resource(
        provider=labels.PROVIDER,
        kind=ADDRESS,
        id=labels.make_server_id(address.name, region),
        price_usd_per_month=0.0 if address.users else round(UNUSED_ADDRESS_USD_PER_MONTH, 2),
        note=address.address,
        lab=address.labels.get(labels.LAB, ""),
        lab_id=address.labels.get(labels.LAB_ID, ""),
        region=region,
        server_id=server_id,
        created_at=parse_timestamp(address.creation_timestamp) or None,
    )


def _delete_disk(clients: GcpClients, name: str, zone: str) -> None:
    clients.call("disks", "delete_unary", permissions.DELETE_DISK, zone=zone, disk=name)


def _delete_rule(clients: GcpClients, name: str, place: str) -> None:
    network.delete_rule(clients, name)


def _delete_address(clients: GcpClients, name: str, region: str) -> None:
    clients.call(
        "addresses", "delete_unary", permissions.DELETE_ADDRESS, region=region, address=name
    )


# By the kind of a resource: what deletes the one with this name in this place.
_DELETE: dict[str, Callable[[GcpClients, str, str], None]] = {
    DISK: _delete_disk,
    RULE: _delete_rule,
    ADDRESS: _delete_address,
}
