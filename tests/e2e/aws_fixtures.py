"""Fixtures: `bed`, whose instances answer nobody, and `machines`, whose instances boot.

Use `pytest_plugins = ["aws_fixtures"]` in a test module.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from aws_bed import ORPHANS, REGION, Bed
from lab_servers import ROOT
from warm_labctl import Warm

from labctl.rehearsal.aws import Rehearsal, Scenario
from labctl.rehearsal.core.images import Building


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    with Warm() as begun:
        yield begun


def _bed(
    warm: Warm, folder: Path, scenario: Scenario, building: Building | None = None
) -> Iterator[Bed]:
    with Rehearsal(scenario, building) as rehearsal:
        yield Bed(rehearsal, warm, folder, scenario)


def _emptied(account: Bed) -> Iterator[Bed]:
    """The account, which a test must leave empty; if it does not, the next finds it so."""
    yield account
    account.warm.end_all()
    account.reset()
    left = account.left()
    if left:
        account.lab().labctl(*ORPHANS, "--kept-too", code=None)
    assert left == []


@pytest.fixture(scope="session")
def _account(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    scenario = Scenario(boot="none", types=("g4dn.xlarge", "g5.xlarge"), regions=(REGION,))
    yield from _bed(warm, tmp_path_factory.mktemp("aws"), scenario)


@pytest.fixture
def bed(_account: Bed) -> Iterator[Bed]:
    """Instances run and refuse connections. Every test must leave nothing."""
    yield from _emptied(_account)


@pytest.fixture(scope="session")
def _account_with_machines(
    warm: Warm, base_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bed]:
    scenario = Scenario(types=("g4dn.xlarge", "g5.xlarge"), regions=(REGION,))
    building = Building(
        data_dir=ROOT, base_image=base_image, progress=lambda text, done, total: None
    )
    yield from _bed(warm, tmp_path_factory.mktemp("aws-machines"), scenario, building)


@pytest.fixture
def machines(_account_with_machines: Bed) -> Iterator[Bed]:
    """Instances boot and let people in. Every test must leave nothing."""
    yield from _emptied(_account_with_machines)
