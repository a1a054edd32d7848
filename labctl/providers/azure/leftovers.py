"""List and remove all resources with labctl's tags except servers, with their prices."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from labctl.config.member_ids import list_lab_ids
from labctl.errors import BusyError, LabError
from labctl.model import Resource
from labctl.providers.azure import machines, network, permissions, tags
from labctl.providers.azure.arm import Arm, ArmReply
from labctl.providers.azure.errors import is_absent
from labctl.providers.azure.replies import (
    AddressReply,
    DiskReply,
    NamedReply,
    VmReply,
    parse_arm_time,
)

DISKS = "Microsoft.Compute/disks"
DISKS_VERSION = "2024-03-02"
# List prices of East US in USD a month, by the GiB up to which a disk has them
# (azure.microsoft.com/pricing/details/managed-disks, Standard SSD with LRS, without transactions).
SSD_USD_PER_MONTH = {
    32: 2.40,
    64: 4.80,
    128: 9.60,
    256: 19.20,
    512: 38.40,
    1024: 76.80,
    2048: 153.60,
    4096: 307.20,
}
# A standard public address, in use or not (azure.microsoft.com/pricing/details/ip-addresses).
ADDRESS_USD_PER_MONTH = 0.005 * 730
DELETE_PAUSE_S = 0.5


class PartKind(NamedTuple):
    """A kind of resource: Azure's name for it, the version of its API, and what deleting needs."""

    type: str
    version: str
    read: str

    @property
    def delete(self) -> str:
        return f"{self.type}/delete"


DISK, ADDRESS, NIC = "disk", "public-ip", "network-interface"
NET, NSG = "virtual-network", "security-group"
KINDS = {
    DISK: PartKind(DISKS, DISKS_VERSION, permissions.READ_DISK),
    NIC: PartKind(machines.NICS, network.VERSION, permissions.READ_NIC),
    ADDRESS: PartKind(machines.ADDRESSES, network.VERSION, permissions.READ_IP),
    NET: PartKind(network.NETWORKS, network.VERSION, permissions.READ_NET),
    NSG: PartKind(network.NSGS, network.VERSION, permissions.READ_NSG),
}


class LivingMachines:
    """Our machines that exist, by name and by lab."""

    def __init__(self, found: list[VmReply]) -> None:
        self.names = {vm.name for vm in found}
        self.by_lab: dict[tuple[str, str], str] = {}
        for vm in found:
            self.by_lab.setdefault((vm.tags.get(tags.LAB_ID, ""), vm.location), vm.name)

    def find_owner(self, name: str, ending: str) -> str:
        """Return the machine that a resource with this name belongs to; "" if it is gone."""
        owner = name.removesuffix(ending)
        return owner if owner in self.names else ""

    def find_member(self, lab_id: str, region: str) -> str:
        """Return a machine of a lab, or of the labs of a course, in one region."""
        keys = ((one, region) for one in list_lab_ids(lab_id))
        return next((self.by_lab[key] for key in keys if key in self.by_lab), "")


def list_leftovers(arm: Arm) -> list[Resource]:
    """List the resources. Those of a live server have its `server_id`."""
    with ThreadPoolExecutor(6) as threads:
        found = threads.submit(machines.list_machines, arm)
        disks = threads.submit(_list_kind, arm, DISK, DiskReply)
        addresses = threads.submit(_list_kind, arm, ADDRESS, AddressReply)
        others = {
            name: threads.submit(_list_kind, arm, name, NamedReply) for name in (NIC, NET, NSG)
        }
        living = LivingMachines(found.result())
        return [
            *(_describe_disk(disk, living) for disk in disks.result() if _is_ours(disk)),
            *(_describe_address(one, living) for one in addresses.result() if _is_ours(one)),
            *(
                _describe_other(kind, one, living)
                for kind, result in others.items()
                for one in result.result()
                if _is_ours(one)
            ),
        ]


def remove(arm: Arm, resource: Resource) -> None:
    """Remove a resource. An absent one counts as success; BusyError while something uses it."""
    kind = KINDS.get(resource.kind)
    if kind is not None and resource.id.startswith(tags.PREFIX):
        delete_part(arm, kind.type, resource.id, machines.OPERATION_S)


def delete_part(arm: Arm, kind: str, name: str, wait_s: float) -> None:
    """Delete a resource and wait until it is gone. An absent one counts as success."""
    found = next(one for one in KINDS.values() if one.type == kind)
    path = arm.resource_path(kind, name)
    try:
        begun = arm.begin("DELETE", path, found.version, found.delete)
    except LabError as error:
        if is_absent(error):
            return
        raise
    end_s = time.monotonic() + wait_s
    arm.wait(begun, found.delete, wait_s)
    while arm.find(NamedReply, path, found.version, found.read) is not None:
        if time.monotonic() >= end_s:
            raise BusyError(
                f"Azure still lists {name}",
                why="its deletion is in progress",
                hint="run the same command again in a minute",
            )
        time.sleep(DELETE_PAUSE_S)


def _list_kind(arm: Arm, name: str, reply: type[ArmReply]) -> list[ArmReply]:
    kind = KINDS[name]
    return arm.list_all(reply, arm.resource_path(kind.type), kind.version, kind.read)


def _is_ours(part: DiskReply | AddressReply | NamedReply) -> bool:
    """Whether labctl created it: a disk may bear no tag, but its name is the server's."""
    return part.tags.get(tags.OURS) == "1" or part.name.startswith(tags.PREFIX)


def _describe_disk(disk: DiskReply, living: LivingMachines) -> Resource:
    size = disk.properties.disk_size_gb
    tiers = (price for gib, price in SSD_USD_PER_MONTH.items() if size <= gib)
    return Resource(
        provider=tags.PROVIDER,
        kind=DISK,
        id=disk.name,
        price_usd_per_month=next(tiers, max(SSD_USD_PER_MONTH.values())),
        note=f"{size} GiB {disk.sku.name} in {disk.location}, at East US's list price",
        lab=disk.tags.get(tags.LAB, ""),
        lab_id=disk.tags.get(tags.LAB_ID, ""),
        region=disk.location,
        server_id=living.find_owner(disk.name, tags.DISK_ENDING),
        created_at=parse_arm_time(disk.properties.time_created) or None,
    )


def _describe_address(address: AddressReply, living: LivingMachines) -> Resource:
    return Resource(
        provider=tags.PROVIDER,
        kind=ADDRESS,
        id=address.name,
        price_usd_per_month=round(ADDRESS_USD_PER_MONTH, 2),
        note=address.properties.ip_address,
        lab=address.tags.get(tags.LAB, ""),
        lab_id=address.tags.get(tags.LAB_ID, ""),
        region=address.location,
        server_id=living.find_owner(address.name, tags.IP_ENDING),
    )


def _describe_other(kind: str, part: NamedReply, living: LivingMachines) -> Resource:
    lab_id = part.tags.get(tags.LAB_ID, "")
    if kind == NIC:
        server_id = living.find_owner(part.name, tags.NIC_ENDING)
    else:
        server_id = living.find_member(lab_id, part.location)
    return Resource(
        provider=tags.PROVIDER,
        kind=kind,
        id=part.name,
        lab=part.tags.get(tags.LAB, ""),
        lab_id=lab_id,
        region=part.location,
        server_id=server_id,
    )
