"""The Vast.ai provider under the contract: a rehearsed marketplace whose VMs boot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from case import Case, wait_for
from local_case import ROOT, base_image
from msgspec.structs import replace

from labctl.model import Boot, CreateServerRequest, GpuNeed, Need, Resource, Server
from labctl.providers import ProviderContext
from labctl.providers.vast import VastProvider, VastSettings
from labctl.rehearsal.core.images import Building
from labctl.rehearsal.vast import VastRehearsal, VastScenario
from labctl.servers.host_keys import ensure_key_pair

# The directory of Vast.ai's official description, which is not part of this repository.
DESCRIPTIONS = "LABCTL_API_DESCRIPTIONS"
NAME = "vast.yaml"


def find_description() -> str:
    """The file of the official description; "" where it is not, and nothing is checked then."""
    path = Path(os.environ.get(DESCRIPTIONS, ""), NAME)
    return str(path) if path.is_file() else ""


@dataclass
class VastCase(Case):
    """What the flow does besides: a script for the first boot, and the key to log in with."""

    def request(self, lab: str = "contract") -> CreateServerRequest:
        request = super().request(lab)
        assert isinstance(self.provider, VastProvider)
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

    def create_bidding(self) -> Server:
        """Create an interruptible server, and wait until it runs."""
        need = replace(self.need, spot="only")
        offer = self.provider.offers(need)[0]
        server = self.provider.create(offer, replace(self.request(), need=need))
        return self.running(server)


def make_case(
    rehearsal: VastRehearsal, directory: Path, settings: VastSettings | None = None
) -> VastCase:
    def unexpected(*_: Any) -> Any:
        raise AssertionError("the Vast.ai provider needs no connection")

    def leave_something() -> Resource:
        """The disk of a server that was outbid."""
        server = case.create_bidding()
        rehearsal.reclaim(server.id, 0)
        case.gone(server.id)
        found: Resource = wait_for(lambda: find_disk(case, server.id))
        return found

    context = ProviderContext(
        data_dir=ROOT,
        owner="contract",
        connect=unexpected,
        settle_host_key=unexpected,
        progress=lambda text, done, total: None,
        cache_dir=directory / "cache",
    )
    provider = VastProvider(settings or VastSettings(), context)
    need = Need(gpu=GpuNeed(kind="any", count=1), spot="never")
    case = VastCase(provider, directory, leave_something, need)
    return case


def find_disk(case: Case, server_id: str) -> Resource | None:
    """The disk of a server among the leftovers."""
    leftovers = case.provider.leftovers()
    return next((r for r in leftovers if r.kind == "disk" and r.server_id == server_id), None)


def export(rehearsal: VastRehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("VAST_")]:
        monkeypatch.delenv(name)
    for name, value in rehearsal.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def vast_rehearsal() -> Iterator[VastRehearsal]:
    building = Building(
        data_dir=ROOT, base_image=base_image(), progress=lambda text, done, total: None
    )
    scenario = VastScenario(description=find_description())
    with VastRehearsal(scenario, building) as rehearsal:
        yield rehearsal


@pytest.fixture
def vast_case(
    vast_rehearsal: VastRehearsal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Case]:
    export(vast_rehearsal, monkeypatch)
    case = make_case(vast_rehearsal, tmp_path)
    try:
        yield case
    finally:
        case.clean_up()
        for resource in case.provider.leftovers():
            if resource.lab_id in case.lab_ids:
                case.provider.remove(resource)
