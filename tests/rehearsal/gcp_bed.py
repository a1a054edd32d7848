"""A rehearsed Google Cloud without machines, and the provider on it through Google's own SDK."""

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
from labctl.providers.gcp import GcpProvider, GcpSettings
from labctl.rehearsal.core.images import Building
from labctl.rehearsal.gcp import GcpRehearsal, GcpScenario

ROOT = Path(__file__).parents[2]
GPU = Need(gpu=GpuNeed(kind="any", count=1))
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGk4 labctl"
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHost"


@dataclass
class Google:
    """The cloud, and a provider for its user."""

    cloud: GcpRehearsal
    directory: Path

    def provider(self, owner: str = "ada", **settings: Any) -> GcpProvider:
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
            "endpoint_url": url,
            "address_from": f"{url}/checkip",
            "prices_from": f"{url}/prices",
            **settings,
        }
        return GcpProvider(GcpSettings(**chosen), context)

    def request(self, provider: GcpProvider, need: Need = GPU, **more: Any) -> CreateServerRequest:
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

    def up(self, provider: GcpProvider, need: Need = GPU, **more: Any) -> Server:
        return provider.create(provider.offers(need)[0], self.request(provider, need, **more))


def create_patiently(provider: GcpProvider, offer: Offer, request: CreateServerRequest) -> Server:
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
def gcp_cloud() -> Iterator[GcpRehearsal]:
    building = Building(data_dir=ROOT, base_image="", progress=lambda text, done, total: None)
    with GcpRehearsal(GcpScenario(boot="none"), building) as cloud:
        yield cloud


@pytest.fixture
def google(
    gcp_cloud: GcpRehearsal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Google]:
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    for name, value in gcp_cloud.environment.items():
        monkeypatch.setenv(name, value)
    plain = gcp_cloud.scenario
    made = Google(gcp_cloud, tmp_path)
    yield made
    gcp_cloud.scenario = plain
    gcp_cloud.change()
    provider = made.provider()
    for server in provider.servers():
        provider.terminate(server.id)
    wait_for(lambda: not provider.servers())
    for resource in provider.leftovers():
        provider.remove(resource)
