"""Servers as they are: found, listed, stopped, started, ended."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from labctl.errors import NotFoundError
from labctl.model import Server
from labctl.providers.aws import tags
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import is_absent, told

LISTED = ("pending", "running", "shutting-down", "stopping", "stopped")
MOST_REGIONS_AT_ONCE = 16


def described(ec2: Any, filters: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with told():
        pages = ec2.get_paginator("describe_instances").paginate(Filters=filters)
        return [
            tags.with_owner(instance, reservation)
            for page in pages
            for reservation in page["Reservations"]
            for instance in reservation["Instances"]
        ]


def one(clients: Clients, server_id: str) -> dict[str, Any] | None:
    """An instance of ours as AWS describes it, the terminated included; None where it shows none.

    Several at the same time are asked for in one call.
    """
    place = tags.split_id(server_id)
    if place is None:
        return None
    instance_id, region = place
    return clients.together("describe", region, _by_id).call(instance_id)


def _by_id(ec2: Any, ids: list[str]) -> dict[str, dict[str, Any]]:
    """A filter rather than the ids as such: one that is not shown would fail the whole call."""
    found = described(ec2, tags.ours({"Name": "instance-id", "Values": ids}))
    return {str(instance["InstanceId"]): instance for instance in found}


def present(clients: Clients, server_id: str) -> dict[str, Any]:
    instance = one(clients, server_id)
    if instance is None:
        raise NotFoundError(
            f"AWS shows no server {server_id}", why="it may be gone", hint="labctl status --refresh"
        )
    return instance


def every(clients: Clients, regions: Iterable[str], user: str) -> list[Server]:
    """The servers of ours in these regions that have not ended for good, oldest first."""
    only = tags.ours({"Name": "instance-state-name", "Values": list(LISTED)})

    def in_region(region: str) -> list[Server]:
        found = described(clients.ec2(region), only)
        return [tags.server_of(instance, region, user) for instance in found]

    with ThreadPoolExecutor(MOST_REGIONS_AT_ONCE) as threads:
        listed = [server for some in threads.map(in_region, regions) for server in some]
    return sorted(listed, key=lambda server: (server.created_at, server.id))


def enabled_regions(clients: Clients, home: str) -> list[str]:
    """Every region that the account may use."""
    with told():
        found = clients.ec2(home).describe_regions()["Regions"]
    return sorted(region["RegionName"] for region in found)


def terminate(clients: Clients, server_id: str) -> None:
    """An absent one counts as success. One just made may be absent for a moment: ask again."""
    place = tags.split_id(server_id)
    if place is None:
        return
    instance_id, region = place
    clients.together("terminate", region, _terminate).call(instance_id)


def _terminate(ec2: Any, ids: list[str]) -> dict[str, bool]:
    """AWS ends all of them or, where it does not know one, none."""
    from botocore.exceptions import ClientError

    with told():
        try:
            ec2.terminate_instances(InstanceIds=ids)
        except ClientError as error:
            if not is_absent(error):
                raise
            if len(ids) > 1:
                for instance_id in ids:
                    _terminate(ec2, [instance_id])
    return dict.fromkeys(ids, True)


def stop(clients: Clients, server_id: str) -> None:
    instance = present(clients, server_id)
    region = server_id.rpartition(".")[2]
    with told():
        clients.ec2(region).stop_instances(InstanceIds=[instance["InstanceId"]])


def start(clients: Clients, server_id: str) -> None:
    """BusyError while it is still stopping."""
    instance = present(clients, server_id)
    region = server_id.rpartition(".")[2]
    with told():
        clients.ec2(region).start_instances(InstanceIds=[instance["InstanceId"]])


def console(clients: Clients, server_id: str) -> str:
    """The last 64 KB of what it printed; "" where AWS has nothing yet."""
    from botocore.exceptions import ClientError

    place = tags.split_id(server_id)
    if place is None:
        return ""
    instance_id, region = place
    ec2 = clients.ec2(region)
    with told():
        try:
            answer = ec2.get_console_output(InstanceId=instance_id, Latest=True)
        except ClientError as error:
            if is_absent(error):
                return ""
            # Types before Nitro know no latest output.
            answer = ec2.get_console_output(InstanceId=instance_id)
    return str(answer.get("Output") or "")


def pin(clients: Clients, server_id: str, host_key: str, next_host_key: str) -> None:
    """Both in one call, so that no reader sees one without the other."""
    instance_id, _, region = server_id.rpartition(".")
    with told():
        clients.ec2(region).create_tags(
            Resources=[instance_id],
            Tags=tags.pairs({tags.HOST_KEY: host_key, tags.NEXT_HOST_KEY: next_host_key}),
        )
