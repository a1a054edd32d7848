"""kill -9 of `up` at RunPod, whose creation is not idempotent: one pod, and an end to all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from killed_up import (
    DOWN,
    ORPHANS,
    continue_up,
    forget_state,
    kill_at_random,
    kill_up_at,
    list_living,
    open_lab,
)
from lab_directory import LabDirectory

from labctl.rehearsal.runpod import RunPodRehearsal, RunPodScenario

LAB_YAML = "lab: digits\nserver: {provider: runpod, gpu: any, ttl: 2h, runpod: {settle: 1s}}\n"
CALLS = ("graphql", "listGpuTypes", "listPods", "createPod")


@pytest.fixture(scope="module")
def cloud() -> Iterator[RunPodRehearsal]:
    with RunPodRehearsal(RunPodScenario(boot="none")) as rehearsal:
        yield rehearsal


@pytest.fixture
def lab(cloud: RunPodRehearsal, tmp_path: Path) -> Iterator[LabDirectory]:
    with open_lab(cloud, tmp_path, LAB_YAML, lambda: list_living(cloud)) as made:
        yield made


@pytest.mark.long
@pytest.mark.parametrize("kind", ["lost", "dropped"])
@pytest.mark.parametrize("action", CALLS)
def test_after_a_kill_at_any_call_one_pod_comes_up_and_goes(
    lab: LabDirectory, cloud: RunPodRehearsal, kind: str, action: str
) -> None:
    kill_up_at(lab, cloud, kind, action)
    continue_up(lab)
    assert len(list_living(cloud)) == 1
    lab.labctl(*DOWN)


def test_without_any_state_orphans_ends_what_a_kill_left(
    lab: LabDirectory, cloud: RunPodRehearsal
) -> None:
    """Nobody on this machine knows of the pod: the reply to its creation was lost."""
    kill_up_at(lab, cloud, "lost", "createPod")
    assert len(list_living(cloud)) == 1
    forget_state(lab)
    lab.labctl(*ORPHANS)


@pytest.mark.long
def test_kills_at_random_moments_leave_nothing(lab: LabDirectory, cloud: RunPodRehearsal) -> None:
    kill_at_random(lab, cloud, lambda: list_living(cloud))
