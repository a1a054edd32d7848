"""One rehearsal without machines and one with real ones, each shared by its tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from rehearsal_bed import RehearsalSetup, building

from labctl.rehearsal.aws import Rehearsal, Scenario
from labctl.rehearsal.core.images import Building


@pytest.fixture(scope="session")
def images() -> Building:
    return building(os.environ.get("LABCTL_BASE_IMAGE", ""))


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RehearsalSetup]:
    """No machines: instances run at once and nothing listens."""
    with Rehearsal(Scenario(boot="none")) as rehearsal:
        yield RehearsalSetup(rehearsal, tmp_path_factory.mktemp("cloud"))


@pytest.fixture
def setup(cloud: RehearsalSetup) -> Iterator[RehearsalSetup]:
    """The shared one with the default scenario, before and after."""
    yield cloud
    cloud.rehearsal.change(
        **{key: getattr(Scenario(), key) for key in Scenario.__struct_fields__} | {"boot": "none"}
    )


@pytest.fixture(scope="module")
def real(images: Building, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RehearsalSetup]:
    """Machines are containers."""
    with Rehearsal(Scenario(), images) as rehearsal:
        yield RehearsalSetup(rehearsal, tmp_path_factory.mktemp("real"))
