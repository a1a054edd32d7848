"""The Lambda provider under the contract: a rehearsed cloud whose machines boot."""

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
from labctl.providers.lambda_cloud import LambdaProvider, LambdaSettings
from labctl.rehearsal.core.images import Building
from labctl.rehearsal.lambda_cloud import LambdaRehearsal, LambdaScenario
from labctl.servers.host_keys import ensure_key_pair


@dataclass
class LambdaCase(Case):
    """A case with a script for the first boot, and the key to log in with."""

    def request(self, lab: str = "contract") -> CreateServerRequest:
        request = super().request(lab)
        assert isinstance(self.provider, LambdaProvider)
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


def make_case(
    rehearsal: LambdaRehearsal, directory: Path, settings: LambdaSettings | None = None
) -> LambdaCase:
    def unexpected(*_: Any) -> Any:
        raise AssertionError("the Lambda provider needs no connection")

    def leave_something() -> Resource:
        """A key, after its server has ended."""
        server = case.create()
        provider.terminate(server.id)
        case.gone(server.id)
        [key] = [one for one in provider.leftovers() if one.lab_id == server.lab_id]
        return key

    context = ProviderContext(
        data_dir=ROOT,
        owner="contract",
        connect=unexpected,
        settle_host_key=unexpected,
        progress=lambda text, done, total: None,
        cache_dir=directory / "cache",
    )
    provider = LambdaProvider(settings or LambdaSettings(), context)
    need = Need(gpu=GpuNeed(kind="any", count=1))
    case = LambdaCase(provider, directory, leave_something, need)
    return case


def export(rehearsal: LambdaRehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LAMBDA_")]:
        monkeypatch.delenv(name)
    for name, value in rehearsal.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def lambda_rehearsal() -> Iterator[LambdaRehearsal]:
    building = Building(
        data_dir=ROOT, base_image=base_image(), progress=lambda text, done, total: None
    )
    with LambdaRehearsal(LambdaScenario(), building) as rehearsal:
        yield rehearsal


@pytest.fixture
def lambda_case(
    lambda_rehearsal: LambdaRehearsal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Case]:
    export(lambda_rehearsal, monkeypatch)
    case = make_case(lambda_rehearsal, tmp_path)
    try:
        yield case
    finally:
        case.clean_up()
        for resource in case.provider.leftovers():
            if resource.lab_id in case.lab_ids:
                case.provider.remove(resource)
