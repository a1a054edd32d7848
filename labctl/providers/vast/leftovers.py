"""What bills or stays at Vast.ai besides servers: the disks of instances, and SSH keys."""

from __future__ import annotations

from labctl.errors import BusyError
from labctl.model import Resource
from labctl.providers.vast.api import VastInstance
from labctl.providers.vast.catalog import PROVIDER
from labctl.providers.vast.cloud import VastCloud
from labctl.providers.vast.label import get_label, parse_key_line
from labctl.providers.vast.states import has_lost_bid

DISK, KEY = "disk", "SSH key"
DISK_OF = "disk-of-"
HOURS_PER_MONTH = 730


def list_leftovers(cloud: VastCloud) -> list[Resource]:
    """List the disks of labctl's instances, as parts of them, and the labs' keys, which are free.

    The disk of an instance that was outbid goes on to bill without a server.
    """
    account = cloud.get_account_id()
    instances = cloud.list_instances()
    alive = [one for one in instances if not has_lost_bid(one)]
    servers = {get_label(one).lab_id: str(one.id) for one in alive}
    keys = [
        Resource(
            provider=PROVIDER,
            kind=KEY,
            id=str(key.id),
            note=key.key.split()[-1],
            lab=parts[0],
            lab_id=parts[1],
            server_id=servers.get(parts[1], ""),
            account=account,
        )
        for key in cloud.list_keys()
        if (parts := parse_key_line(key.key))
    ]
    return [*(_make_disk(one, account) for one in instances), *keys]


def _make_disk(instance: VastInstance, account: str) -> Resource:
    label = get_label(instance)
    size = f"{instance.disk_space or 0:.0f} GB"
    if has_lost_bid(instance):
        note = f"{size} of a server that was outbid or shut itself down: its data is still there"
    else:
        note = f"{size}, part of the price of a running server"
    return Resource(
        provider=PROVIDER,
        kind=DISK,
        id=f"{DISK_OF}{instance.id}",
        price_usd_per_month=round((instance.storage_total_cost or 0.0) * HOURS_PER_MONTH, 2),
        note=note,
        lab=label.lab,
        lab_id=label.lab_id,
        server_id=str(instance.id),
        account=account,
    )


def remove_leftover(cloud: VastCloud, resource: Resource) -> None:
    """Remove a key, or an instance that was outbid; another one's disk ends with the server."""
    if resource.kind == KEY:
        cloud.delete_key(resource.id)
        return
    instance = cloud.find_instance(resource.id.removeprefix(DISK_OF))
    if instance is None:
        return
    if not has_lost_bid(instance):
        raise BusyError(
            f"the instance {instance.id} still has this disk",
            why="the disk ends with its instance",
            hint=lambda subject: subject.down,
        )
    cloud.destroy(str(instance.id))
