"""kill -9 of `up` at Vast.ai, where a rental is not idempotent: one instance, and an end to all."""

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

from labctl.rehearsal.vast import VastRehearsal, VastScenario

LAB_YAML = "lab: digits\nserver: {provider: vast, gpu: any, ttl: 2h, vast: {settle: 1s}}\n"
CALLS = ("showUser", "searchOffers", "getSshKeysUser", "createSshKey", "createInstance")


@pytest.fixture(scope="module")
def cloud() -> Iterator[VastRehearsal]:
    with VastRehearsal(VastScenario(boot="none")) as rehearsal:
        yield rehearsal


@pytest.fixture
def lab(cloud: VastRehearsal, tmp_path: Path) -> Iterator[LabDirectory]:
    with open_lab(cloud, tmp_path, LAB_YAML, lambda: list_left(cloud)) as made:
        yield made


def list_left(cloud: VastRehearsal) -> list[str]:
    return [*list_living(cloud), *(key.key for key in cloud.api.instances.keys.values())]


# Only the lost reply to a rental leaves something that costs money.
@pytest.mark.parametrize(
    ("kind", "action"),
    [
        pytest.param(
            kind, action, marks=() if (kind, action) == ("lost", CALLS[-1]) else (pytest.mark.long,)
        )
        for kind in ("lost", "dropped")
        for action in CALLS
    ],
)
def test_after_a_kill_at_any_call_one_server_comes_up_and_goes(
    lab: LabDirectory, cloud: VastRehearsal, kind: str, action: str
) -> None:
    kill_up_at(lab, cloud, kind, action)
    continue_up(lab)
    assert len(list_left(cloud)) == 2  # one instance, one key
    lab.labctl(*DOWN)


@pytest.mark.long
@pytest.mark.parametrize("action", ["createSshKey", "createInstance"])
def test_without_any_state_orphans_ends_what_a_kill_left(
    lab: LabDirectory, cloud: VastRehearsal, action: str
) -> None:
    kill_up_at(lab, cloud, "lost", action)
    forget_state(lab)
    lab.labctl(*ORPHANS)


def test_another_account_does_not_call_the_server_gone(
    lab: LabDirectory, cloud: VastRehearsal
) -> None:
    continue_up(lab)
    instances = list_left(cloud)
    first_key, first_account = cloud.key, cloud.scenario.account
    cloud.key = lab.environ["VAST_API_KEY"] = "1" * 64
    cloud.change(account=first_account + 1)
    try:
        refused = lab.labctl(*DOWN, code=3).stderr
        assert f"belongs to vast account {first_account}" in refused
        assert list_left(cloud) == instances
    finally:
        cloud.key = lab.environ["VAST_API_KEY"] = first_key
        cloud.change(account=first_account)
    lab.labctl(*DOWN)


@pytest.mark.long
def test_kills_at_random_moments_leave_nothing(lab: LabDirectory, cloud: VastRehearsal) -> None:
    kill_at_random(lab, cloud, lambda: list_left(cloud))
