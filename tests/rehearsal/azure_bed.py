"""A rehearsed Azure without machines, and the provider on it through Microsoft's own libraries."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from labctl.errors import BusyError
from labctl.model import Boot, CreateServerRequest, GpuNeed, Need, Offer, Server
from labctl.providers import ProviderContext
from labctl.providers.azure import AzureProvider, AzureSettings
from labctl.rehearsal.azure import AzureRehearsal, AzureScenario
from labctl.rehearsal.core.images import Building

ROOT = Path(__file__).parents[2]
GPU = Need(gpu=GpuNeed(kind="any", count=1))
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGk4 labctl"
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHost"


@dataclass
class AzureBed:
    """The cloud, and a provider for its user."""

    cloud: AzureRehearsal
    directory: Path

    def provider(self, owner: str = "ada", **settings: Any) -> AzureProvider:
        def unexpected(*_: Any) -> Any:
            raise AssertionError("the provider needs no connection")

        context = ProviderContext(
            data_dir=ROOT,
            owner=owner,
            connect=unexpected,
            settle_host_key=unexpected,
            progress=lambda text, done, total: None,
            cache_dir=self.directory / "cache",
        )
        url = self.cloud.url
        chosen = {
            "regions": ("eastus", "westeurope"),
            "endpoint_url": url,
            "address_from": f"{url}/checkip",
            "prices_from": f"{url}/prices",
            **settings,
        }
        return AzureProvider(AzureSettings(**chosen), context)

    def request(
        self, provider: AzureProvider, need: Need = GPU, **more: Any
    ) -> CreateServerRequest:
        boot = Boot(
            lab="digits", public_key=KEY, host_key=HOST_KEY, host_private_key="k", ttl_s=3600
        )
        return CreateServerRequest(
            lab="digits",
            lab_id=secrets.token_hex(6),
            token=secrets.token_hex(8),
            public_key=KEY,
            identity="/nowhere",
            need=need,
            host_key=HOST_KEY,
            first_boot=provider.build_first_boot(boot),
            **more,
        )

    def up(self, provider: AzureProvider, need: Need = GPU, **more: Any) -> Server:
        return provider.create(provider.offers(need)[0], self.request(provider, need, **more))


def create_patiently(provider: AzureProvider, offer: Offer, request: CreateServerRequest) -> Server:
    """Repeat the same request until the provider replies, as `servers/attempts.py` does."""
    for _ in range(10):
        try:
            return provider.create(offer, request)
        except BusyError:
            time.sleep(0.05)
    raise AssertionError("no reply after ten calls")


def wait_for(condition: Callable[[], Any], deadline_s: float = 30.0) -> Any:
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline_s} s"
        time.sleep(0.02)
    return value


@pytest.fixture(scope="module")
def azure_cloud() -> Iterator[AzureRehearsal]:
    building = Building(data_dir=ROOT, base_image="", progress=lambda text, done, total: None)
    with AzureRehearsal(AzureScenario(boot="none"), building) as cloud:
        yield cloud


@pytest.fixture
def azure(
    azure_cloud: AzureRehearsal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[AzureBed]:
    for name in [name for name in os.environ if name.startswith(("AZURE_", "IDENTITY_"))]:
        monkeypatch.delenv(name)
    for name, value in azure_cloud.environment.items():
        monkeypatch.setenv(name, value)
    plain = azure_cloud.scenario
    made = AzureBed(azure_cloud, tmp_path)
    yield made
    azure_cloud.scenario = plain
    azure_cloud.change()
    provider = made.provider()
    for server in provider.servers():
        provider.terminate(server.id)
    wait_for(lambda: not provider.servers())
    azure_cloud.account.timers.clear()
    azure_cloud.account.failed.clear()
    azure_cloud.account.resources.clear()
