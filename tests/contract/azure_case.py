"""The Azure provider under the contract: a rehearsed cloud whose machines let people in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from case import Case
from local_case import ROOT, base_image
from msgspec.structs import replace

from labctl.model import Boot, CreateServerRequest, GpuNeed, Need, Resource, Server
from labctl.providers import ProviderContext
from labctl.providers.azure import AzureProvider, AzureSettings
from labctl.providers.azure.leftovers import NSG
from labctl.rehearsal.azure import AzureRehearsal, AzureScenario
from labctl.rehearsal.core.images import Building
from labctl.servers.host_keys import ensure_key_pair


@dataclass
class AzureCase(Case):
    """What the flow does besides: a script for the first boot, and the key to log in with."""

    def request(self, lab: str = "contract") -> CreateServerRequest:
        request = super().request(lab)
        assert isinstance(self.provider, AzureProvider)
        host_key = ensure_key_pair(self.directory / "host_key").rpartition(" ")[0]
        boot = Boot(
            lab=lab,
            public_key=request.public_key,
            host_key=host_key,
            host_private_key=(self.directory / "host_key").read_text(),
            ttl_s=3600,
        )
        script = self.provider.build_first_boot(boot)
        return replace(request, host_key=host_key, first_boot=script)

    def log_in(self, server: Server) -> None:
        identity = str(self.directory / "id_ed25519")
        super().log_in(replace(server, endpoint=replace(server.endpoint, identity=identity)))


@pytest.fixture(scope="session")
def azure_rehearsal() -> Iterator[AzureRehearsal]:
    building = Building(
        data_dir=ROOT, base_image=base_image(), progress=lambda text, done, total: None
    )
    with AzureRehearsal(AzureScenario(boot="sshd"), building) as rehearsal:
        if not rehearsal.has_description:
            print("azure-mgmt-compute is missing: no request is checked")
        yield rehearsal


@pytest.fixture
def azure_case(
    azure_rehearsal: AzureRehearsal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Case]:
    for name in [name for name in os.environ if name.startswith(("AZURE_", "IDENTITY_"))]:
        monkeypatch.delenv(name)
    for name, value in azure_rehearsal.environment.items():
        monkeypatch.setenv(name, value)

    def unexpected(*_: Any) -> Any:
        raise AssertionError("the Azure provider needs no connection")

    def leave_something() -> Resource:
        """The security group, which the servers of a lab share."""
        server = case.create()
        provider.terminate(server.id)
        case.gone(server.id)
        left = provider.leftovers()
        return next(one for one in left if (one.kind, one.lab_id) == (NSG, server.lab_id))

    around = ProviderContext(
        data_dir=ROOT,
        owner="contract",
        connect=unexpected,
        settle_host_key=unexpected,
        progress=lambda text, done, total: None,
        cache_dir=tmp_path / "cache",
    )
    settings = AzureSettings(
        endpoint_url=azure_rehearsal.url,
        address_from=f"{azure_rehearsal.url}/checkip",
        prices_from=f"{azure_rehearsal.url}/prices",
    )
    provider = AzureProvider(settings, around)
    case = AzureCase(provider, tmp_path, leave_something, Need(gpu=GpuNeed(kind="any", count=1)))
    try:
        yield case
    finally:
        case.clean_up()
        for resource in provider.leftovers():
            if resource.lab_id in case.lab_ids:
                provider.remove(resource)
