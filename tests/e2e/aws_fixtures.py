"""Fixtures: `bed`, whose instances answer nobody, and `machines`, whose instances boot.

Use `pytest_plugins = ["aws_fixtures"]` in a test module.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from aws_bed import REGION, Bed
from lab_servers import ROOT
from warm_labctl import Warm

from labctl.rehearsal import Building, Rehearsal, Scenario


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    with Warm() as begun:
        yield begun


def _bed(
    warm: Warm, folder: Path, scenario: Scenario, building: Building | None = None
) -> Iterator[Bed]:
    with Rehearsal(scenario, building) as rehearsal:
        yield Bed(rehearsal, warm, folder, scenario)


@pytest.fixture(scope="session")
def _account(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    scenario = Scenario(boot="none", types=("g4dn.xlarge", "g5.xlarge"), regions=(REGION,))
    yield from _bed(warm, tmp_path_factory.mktemp("aws"), scenario)


@pytest.fixture
def bed(_account: Bed) -> Iterator[Bed]:
    """Instances run and refuse connections. Every test must leave nothing."""
    yield _account
    _account.reset()
    assert _account.left() == []


@pytest.fixture(scope="session")
def machines(
    warm: Warm, base_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bed]:
    """Instances boot and let people in."""
    scenario = Scenario(types=("g4dn.xlarge", "g5.xlarge"), regions=(REGION,))
    building = Building(
        data_dir=ROOT, base_image=base_image, progress=lambda text, done, total: None
    )
    yield from _bed(warm, tmp_path_factory.mktemp("aws-machines"), scenario, building)
