"""kill -9 of `up` at Google Cloud at random moments: one machine, and an end to all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from killed_up import kill_at_random, list_living, open_lab
from lab_directory import LabDirectory

from labctl.rehearsal.gcp import GcpRehearsal, GcpScenario

LAB_YAML = "lab: digits\nserver: {provider: gcp, gpu: any, ttl: 2h, gcp: {settle: 1s}}\n"


@pytest.fixture(scope="module")
def cloud() -> Iterator[GcpRehearsal]:
    with GcpRehearsal(GcpScenario(boot="none")) as rehearsal:
        yield rehearsal


@pytest.fixture
def lab(cloud: GcpRehearsal, tmp_path: Path) -> Iterator[LabDirectory]:
    with open_lab(cloud, tmp_path, LAB_YAML, lambda: list_left(cloud)) as made:
        yield made


def list_left(cloud: GcpRehearsal) -> list[str]:
    rules = (name for name in cloud.project.firewalls if name != "default-allow-ssh")
    return [*list_living(cloud), *rules, *map(str, cloud.project.disks)]


@pytest.mark.long
def test_kills_at_random_moments_leave_nothing(lab: LabDirectory, cloud: GcpRehearsal) -> None:
    kill_at_random(lab, cloud, lambda: list_left(cloud))
