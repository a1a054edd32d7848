"""Microsoft's own clients drive the rehearsal: not only labctl finds it right."""

from __future__ import annotations

from typing import Any

import pytest
from azure_bed import AzureBed, azure, azure_cloud, wait_for

__all__ = ["azure", "azure_cloud"]

compute = pytest.importorskip("azure.mgmt.compute")
identity = pytest.importorskip("azure.identity")

PLAIN = {"enforce_https": False}


def open_client(azure: AzureBed) -> Any:
    return compute.ComputeManagementClient(
        identity.DefaultAzureCredential(),
        azure.cloud.scenario.subscription,
        base_url=azure.cloud.url,
        credential_scopes=["https://management.azure.com/.default"],
        polling_interval=0,
    )


def test_the_sdk_sees_what_labctl_created_and_deletes_it(azure: AzureBed) -> None:
    server = azure.up(azure.provider())
    client = open_client(azure)
    machine = client.virtual_machines.get("labctl", server.id, expand="instanceView", **PLAIN)
    assert machine.hardware_profile.vm_size == server.offer.type
    assert machine.storage_profile.os_disk.disk_size_gb == 128
    assert {one.code for one in machine.instance_view.statuses} & {
        "PowerState/running",
        "PowerState/starting",
    }
    [disk] = client.disks.list_by_resource_group("labctl", **PLAIN)
    assert disk.managed_by == machine.id
    client.virtual_machines.begin_deallocate("labctl", server.id, **PLAIN).result()
    wait_for(lambda: azure.cloud.instances[server.id] == "stopped")
    client.virtual_machines.begin_delete("labctl", server.id, **PLAIN).result()
    wait_for(lambda: azure.provider().find(server.id) is None)
