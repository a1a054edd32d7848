"""The AWS provider under the contract: a rehearsed EC2 whose machines boot and let people in."""

from __future__ import annotations

import os
import time
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
from labctl.providers.aws import AwsProvider, AwsSettings
from labctl.rehearsal.aws import Rehearsal, Scenario
from labctl.rehearsal.core.images import Building
from labctl.servers.host_keys import ensure_key_pair

ADDRESS = "LABCTL_SERVER_AWS_ADDRESS_FROM"


@dataclass
class AwsCase(Case):
    """What the flow does besides: a script for the first boot, and the key to log in with."""

    def request(self, lab: str = "contract") -> CreateServerRequest:
        request = super().request(lab)
        assert isinstance(self.provider, AwsProvider)
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
def aws_rehearsal() -> Iterator[Rehearsal]:
    building = Building(
        data_dir=ROOT, base_image=base_image(), progress=lambda text, done, total: None
    )
    with Rehearsal(Scenario(types=("g4dn.xlarge", "g5.xlarge")), building) as rehearsal:
        yield rehearsal


@pytest.fixture(scope="session")
def aws_cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the prices are kept, which take a second to read."""
    return tmp_path_factory.mktemp("aws-cache")


@pytest.fixture
def aws_case(
    aws_rehearsal: Rehearsal,
    aws_cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Case]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in aws_rehearsal.environment.items():
        monkeypatch.setenv(name, value)

    def unexpected(*_: Any) -> Any:
        raise AssertionError("the AWS provider needs no connection")

    def leave_something() -> Resource:
        """A disk that was kept, since there was nowhere else to save what is on it."""
        server = case.create()
        [disk] = provider.keep_disk(server.id, time.time() + 86_400)
        provider.terminate(server.id)
        case.gone(server.id)
        return replace(disk, server_id="")

    around = ProviderContext(
        data_dir=ROOT,
        owner="contract",
        connect=unexpected,
        settle_host_key=unexpected,
        progress=lambda text, done, total: None,
        cache_dir=aws_cache_dir,
    )
    settings = AwsSettings(address_from=aws_rehearsal.environment[ADDRESS])
    provider = AwsProvider(settings, around)
    # Spot machines cannot be stopped and started again, which the contract asks of this provider.
    need = Need(gpu=GpuNeed(kind="any", count=1), spot="never")
    case = AwsCase(provider, tmp_path, leave_something, need)
    try:
        yield case
    finally:
        case.clean_up()
        for resource in provider.leftovers():
            if resource.lab_id in case.lab_ids:
                provider.remove(resource)
