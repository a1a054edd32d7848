"""EC2 instances: find, list, stop, start, terminate."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from labctl.errors import NotFoundError
from labctl.lazy import lazy_imports
from labctl.model import Server
from labctl.providers.aws import tags
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import is_absent, translate_errors

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.type_defs import FilterTypeDef

    from labctl.providers.aws.tags import OwnedInstance

with lazy_imports(__name__):
    from botocore import exceptions as boto_errors

LISTED = ("pending", "running", "shutting-down", "stopping", "stopped")
MOST_REGIONS_AT_ONCE = 16


def describe(ec2: EC2Client, filters: list[FilterTypeDef]) -> list[OwnedInstance]:
    with translate_errors():
        pages = ec2.get_paginator("describe_instances").paginate(Filters=filters)
        return [
            tags.with_owner(instance, reservation)
            for page in pages
            for reservation in page["Reservations"]
            for instance in reservation["Instances"]
        ]


def find_instance(clients: Clients, server_id: str) -> OwnedInstance | None:
    """Return one of our instances as AWS describes it, even a terminated one; None if not shown.

    Requests for several instances at the same time are sent as one call.
    """
    parts = tags.split_id(server_id)
    if parts is None:
        return None
    instance_id, region = parts
    return clients.get_batcher("describe", region, _describe_by_id).call(instance_id)


def _describe_by_id(ec2: EC2Client, ids: list[str]) -> dict[str, OwnedInstance]:
    """Describe instances by a filter: with `InstanceIds` an unknown one fails the whole call."""
    instances = describe(ec2, tags.make_filters({"Name": "instance-id", "Values": ids}))
    return {instance["InstanceId"]: instance for instance in instances}


def require_instance(clients: Clients, server_id: str) -> OwnedInstance:
    instance = find_instance(clients, server_id)
    if instance is None:
        raise NotFoundError(
            f"AWS does not list the server {server_id}",
            why="it may have been terminated",
            hint=lambda subject: subject.refresh,
        )
    return instance


def list_servers(clients: Clients, regions: Iterable[str], user: str) -> list[Server]:
    """List our servers in these regions that are not terminated, oldest first."""
    filters = tags.make_filters({"Name": "instance-state-name", "Values": list(LISTED)})

    def list_region(region: str) -> list[Server]:
        instances = describe(clients.get_ec2(region), filters)
        return [tags.parse_server(instance, region, user) for instance in instances]

    with ThreadPoolExecutor(MOST_REGIONS_AT_ONCE) as threads:
        servers = [server for some in threads.map(list_region, regions) for server in some]
    return sorted(servers, key=lambda server: (server.created_at, server.id))


def list_enabled_regions(clients: Clients, home: str) -> list[str]:
    """List every region that the account may use."""
    with translate_errors():
        regions = clients.get_ec2(home).describe_regions()["Regions"]
    return sorted(region["RegionName"] for region in regions)


def terminate(clients: Clients, server_id: str) -> None:
    """Terminate an instance. An absent one counts as success.

    A new one may be absent for a moment, so the caller must check and repeat.
    """
    parts = tags.split_id(server_id)
    if parts is None:
        return
    instance_id, region = parts
    clients.get_batcher("terminate", region, _terminate).call(instance_id)


def _terminate(ec2: EC2Client, ids: list[str]) -> dict[str, bool]:
    """Terminate instances. AWS terminates none if it does not know one: then one at a time."""
    with translate_errors():
        try:
            ec2.terminate_instances(InstanceIds=ids)
        except boto_errors.ClientError as error:
            if not is_absent(error):
                raise
            if len(ids) > 1:
                for instance_id in ids:
                    _terminate(ec2, [instance_id])
    return dict.fromkeys(ids, True)


def stop(clients: Clients, server_id: str) -> None:
    instance = require_instance(clients, server_id)
    region = server_id.rpartition(".")[2]
    with translate_errors():
        clients.get_ec2(region).stop_instances(InstanceIds=[instance["InstanceId"]])


def start(clients: Clients, server_id: str) -> None:
    """Start a stopped instance; BusyError while it is still stopping."""
    instance = require_instance(clients, server_id)
    region = server_id.rpartition(".")[2]
    with translate_errors():
        clients.get_ec2(region).start_instances(InstanceIds=[instance["InstanceId"]])


def read_console(clients: Clients, server_id: str) -> str:
    """Return the last 64 KB of the console's output; "" if AWS has none yet."""
    parts = tags.split_id(server_id)
    if parts is None:
        return ""
    instance_id, region = parts
    ec2 = clients.get_ec2(region)
    with translate_errors():
        try:
            answer = ec2.get_console_output(InstanceId=instance_id, Latest=True)
        except boto_errors.ClientError as error:
            if is_absent(error):
                return ""
            # Instance types before Nitro do not support `Latest`.
            answer = ec2.get_console_output(InstanceId=instance_id)
    return str(answer.get("Output") or "")


def pin(clients: Clients, server_id: str, host_key: str, next_host_key: str) -> None:
    """Tag the host keys, both in one call, so that no reader sees one without the other."""
    instance_id, _, region = server_id.rpartition(".")
    with translate_errors():
        clients.get_ec2(region).create_tags(
            Resources=[instance_id],
            Tags=tags.as_pairs({tags.HOST_KEY: host_key, tags.NEXT_HOST_KEY: next_host_key}),
        )
