"""What labctl may leave at Lambda besides instances: SSH keys, and file systems named like them."""

from __future__ import annotations

from labctl.model import GIB, Resource
from labctl.providers.lambda_cloud.cloud import LambdaCloud
from labctl.providers.lambda_cloud.launch import ENDED
from labctl.providers.lambda_cloud.tags import LAB_ID, PREFIX, PROVIDER, get_tags, split_key_name

KEY, FILE_SYSTEM = "SSH key", "file system"
# docs.lambda.ai, Billing: the rate that its example names. The API shows no price.
FILE_SYSTEM_USD_PER_GIB_MONTH = 0.20


def list_leftovers(cloud: LambdaCloud) -> list[Resource]:
    """List the keys, free, and the file systems, at the documented rate for what they hold."""
    servers = {
        get_tags(one).get(LAB_ID, ""): one.id
        for one in cloud.list_instances()
        if one.status not in ENDED
    }
    account = cloud.get_account_id()
    found = []
    for key in cloud.list_keys():
        if (parts := split_key_name(key.name)) is not None:
            lab, lab_id = parts
            found.append(
                Resource(
                    provider=PROVIDER,
                    kind=KEY,
                    id=key.id,
                    note=key.name,
                    lab=lab,
                    lab_id=lab_id,
                    server_id=servers.get(lab_id, ""),
                    account=account,
                )
            )
    for system in cloud.list_file_systems():
        if system.name.startswith(PREFIX):
            price = system.bytes_used / GIB * FILE_SYSTEM_USD_PER_GIB_MONTH
            found.append(
                Resource(
                    provider=PROVIDER,
                    kind=FILE_SYSTEM,
                    id=system.id,
                    note=system.name,
                    region=system.region.name,
                    price_usd_per_month=round(price, 2),
                    account=account,
                )
            )
    return found


def remove_leftover(cloud: LambdaCloud, resource: Resource) -> None:
    """Remove one; BusyError while an instance mounts a file system."""
    if resource.kind == KEY:
        cloud.delete_key(resource.id)
    else:
        cloud.delete_file_system(resource.id)
