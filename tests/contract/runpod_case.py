"""The RunPod provider under the contract: a rehearsed RunPod whose pods boot and let people in."""

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
from labctl.providers.http import ApiClient
from labctl.providers.runpod import RunPodProvider, RunPodSettings
from labctl.providers.runpod.api import RUNPOD
from labctl.rehearsal.core.images import Building
from labctl.rehearsal.runpod import RunPodRehearsal, RunPodScenario
from labctl.rehearsal.runpod.replies import CreateVolumeBody, VolumeReply
from labctl.servers.host_keys import ensure_key_pair

# The directory of RunPod's official description, which is not part of this repository.
DESCRIPTIONS = "LABCTL_API_DESCRIPTIONS"
NAME = "runpod-v2.json"


def find_description() -> str:
    """The file of the official description; "" where it is not, and a test is skipped for that."""
    path = Path(os.environ.get(DESCRIPTIONS, ""), NAME)
    return str(path) if path.is_file() else ""


@dataclass
class RunPodCase(Case):
    """What the flow does besides: a script for the first boot, and the key to log in with."""

    def request(self, lab: str = "contract") -> CreateServerRequest:
        request = super().request(lab)
        assert isinstance(self.provider, RunPodProvider)
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


def make_case(directory: Path, settings: RunPodSettings | None = None) -> RunPodCase:
    def unexpected(*_: Any) -> Any:
        raise AssertionError("the RunPod provider needs no connection")

    def leave_something() -> Resource:
        """A network volume that a user named for labctl; labctl itself makes none."""
        body = CreateVolumeBody(name="labctl-data", size=50, data_center="EU-RO-1")
        path = "/v2/network-volumes"
        volume = ApiClient(RUNPOD).post("create a volume", path, VolumeReply, body)
        return next(one for one in provider.leftovers() if one.id == volume.id)

    context = ProviderContext(
        data_dir=ROOT,
        owner="contract",
        connect=unexpected,
        settle_host_key=unexpected,
        progress=lambda text, done, total: None,
        cache_dir=directory / "cache",
    )
    provider = RunPodProvider(settings or RunPodSettings(), context)
    need = Need(gpu=GpuNeed(kind="any", count=1))
    return RunPodCase(provider, directory, leave_something, need)


def export(rehearsal: RunPodRehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RUNPOD_")]:
        monkeypatch.delenv(name)
    for name, value in rehearsal.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def runpod_rehearsal() -> Iterator[RunPodRehearsal]:
    building = Building(
        data_dir=ROOT, base_image=base_image(), progress=lambda text, done, total: None
    )
    scenario = RunPodScenario(description=find_description())
    with RunPodRehearsal(scenario, building) as rehearsal:
        yield rehearsal


@pytest.fixture
def runpod_case(
    runpod_rehearsal: RunPodRehearsal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Case]:
    export(runpod_rehearsal, monkeypatch)
    case = make_case(tmp_path)
    try:
        yield case
    finally:
        case.clean_up()
