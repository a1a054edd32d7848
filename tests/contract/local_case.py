"""The local provider under the contract: this machine's engine, a pool of its own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from case import Case

from labctl.model import Resource
from labctl.providers import ProviderContext
from labctl.providers.local import LocalProvider, LocalSettings, cache, engine

ROOT = Path(__file__).parents[2]
MADE_BY_SCRIPT = "labctl-base:bookworm"


def base_image() -> str:
    if chosen := os.environ.get("LABCTL_BASE_IMAGE"):
        return chosen
    with engine.connect() as docker:
        return MADE_BY_SCRIPT if docker.images.list(name=MADE_BY_SCRIPT) else ""


def context(owner: str, base: str) -> ProviderContext:
    def unexpected(*_: Any) -> Any:
        raise AssertionError("the local provider needs no connection")

    return ProviderContext(
        data_dir=ROOT,
        owner=owner,
        connect=unexpected,
        settle_host_key=unexpected,
        progress=lambda text, done, total: None,
        base_image=base,
    )


def drop_pool(provider: LocalProvider) -> None:
    """Remove the caches of this provider's owner, and nobody else's."""
    with engine.connect() as docker:
        for name in cache.list_free_volumes(docker, provider.context.owner):
            docker.volumes.get(name).remove()


@pytest.fixture
def local_provider() -> Iterator[LocalProvider]:
    """A provider whose owner has no caches yet; they go with it."""
    around = context(f"contract-{secrets.token_hex(4)}", base_image())
    provider = LocalProvider(LocalSettings(), around)
    yield provider
    drop_pool(provider)


@pytest.fixture
def local_case(local_provider: LocalProvider, tmp_path: Path) -> Iterator[Case]:
    def leave_something() -> Resource:
        """What a server leaves: the cache that its engine worked in."""
        server = case.create()
        local_provider.terminate(server.id)
        return next(found for found in local_provider.leftovers() if is_ours(found))

    def is_ours(found: Resource) -> bool:
        with engine.connect() as docker:
            return found.id in cache.list_free_volumes(docker, local_provider.context.owner)

    case = Case(local_provider, tmp_path, leave_something)
    try:
        yield case
    finally:
        case.clean_up()
