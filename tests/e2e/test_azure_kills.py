"""kill -9 of `up` at Azure at random moments: one machine, and an end to all its parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from killed_up import kill_at_random, list_living, open_lab
from lab_directory import LabDirectory

from labctl.rehearsal.azure import AzureRehearsal, AzureScenario

LAB_YAML = "lab: digits\nserver: {provider: azure, gpu: any, ttl: 2h, azure: {settle: 1s}}\n"


@pytest.fixture(scope="module")
def cloud() -> Iterator[AzureRehearsal]:
    with AzureRehearsal(AzureScenario(boot="none")) as rehearsal:
        yield rehearsal


@pytest.fixture
def lab(cloud: AzureRehearsal, tmp_path: Path) -> Iterator[LabDirectory]:
    with open_lab(cloud, tmp_path, LAB_YAML, lambda: list_left(cloud)) as made:
        yield made


def list_left(cloud: AzureRehearsal) -> list[str]:
    return [*list_living(cloud), *map(str, cloud.account.resources)]


@pytest.mark.long
def test_kills_at_random_moments_leave_nothing(lab: LabDirectory, cloud: AzureRehearsal) -> None:
    kill_at_random(lab, cloud, lambda: list_left(cloud))
