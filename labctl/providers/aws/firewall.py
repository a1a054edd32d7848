"""Open ssh to the caller's present address."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from labctl.providers.aws import instances
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.network import admit_networks, list_our_groups, list_ssh_networks

if TYPE_CHECKING:
    from labctl.providers.aws.settings import AwsSettings


def admit(clients: Clients, settings: AwsSettings, owner: str, server_id: str) -> str:
    """Admit the allowed networks; return those that are new, with commas, "" for none."""
    with ThreadPoolExecutor(1) as threads:
        allowed = threads.submit(list_ssh_networks, settings)
        instance = instances.require_instance(clients, server_id)
        ec2 = clients.get_ec2(server_id.rpartition(".")[2])
        attached = [*instance.get("SecurityGroups", ())]
        for interface in instance.get("NetworkInterfaces", ()):
            attached += interface.get("Groups", ())
        ids = sorted({group["GroupId"] for group in attached})
        groups = list_our_groups(ec2, ids)
        networks = allowed.result()
    admitted: set[str] = set()
    for group in groups:
        admitted.update(admit_networks(ec2, group, networks, owner))
    return ", ".join(sorted(admitted))
