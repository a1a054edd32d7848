"""The way in, renewed where the caller's address has changed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from labctl.providers.aws import instances
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.network import caller_network, groups_of, open_to

if TYPE_CHECKING:
    from labctl.providers.aws.settings import AwsSettings


def admit(clients: Clients, settings: AwsSettings, owner: str, server_id: str) -> str:
    """The networks that were let in now and were not before, with commas; "" for none."""
    with ThreadPoolExecutor(1) as threads:
        allowed = threads.submit(_networks, settings)
        instance = instances.present(clients, server_id)
        ec2 = clients.ec2(server_id.rpartition(".")[2])
        held = [*instance.get("SecurityGroups", ())]
        for interface in instance.get("NetworkInterfaces", ()):
            held += interface.get("Groups", ())
        ids = sorted({group["GroupId"] for group in held})
        groups = groups_of(ec2, ids)
        networks = allowed.result()
    news: set[str] = set()
    for group in groups:
        news.update(open_to(ec2, group, networks, owner))
    return ", ".join(sorted(news))


def _networks(settings: AwsSettings) -> tuple[str, ...]:
    return settings.ssh_from or (caller_network(settings),)
