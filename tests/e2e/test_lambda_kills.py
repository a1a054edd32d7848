"""kill -9 of `up` at Lambda, whose launch is not idempotent: one instance, and an end to all."""

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

from labctl.rehearsal.lambda_cloud import LambdaRehearsal, LambdaScenario

LAB_YAML = "lab: digits\nserver: {provider: lambda, gpu: any, ttl: 2h, lambda: {settle: 1s}}\n"
CALLS = ("getAuditEvents", "listInstanceTypes", "listSSHKeys", "addSSHKey", "launchInstance")


@pytest.fixture(scope="module")
def cloud() -> Iterator[LambdaRehearsal]:
    with LambdaRehearsal(LambdaScenario(boot="none")) as rehearsal:
        yield rehearsal


@pytest.fixture
def lab(cloud: LambdaRehearsal, tmp_path: Path) -> Iterator[LabDirectory]:
    with open_lab(cloud, tmp_path, LAB_YAML, lambda: list_left(cloud)) as made:
        yield made


def list_left(cloud: LambdaRehearsal) -> list[str]:
    return [*list_living(cloud), *(key.name for key in cloud.api.storage.keys.values())]


# Only the lost reply to a launch leaves something that costs money.
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
    lab: LabDirectory, cloud: LambdaRehearsal, kind: str, action: str
) -> None:
    kill_up_at(lab, cloud, kind, action)
    continue_up(lab)
    assert len(list_left(cloud)) == 2  # one instance, one key
    lab.labctl(*DOWN)


@pytest.mark.long
@pytest.mark.parametrize("action", ["addSSHKey", "launchInstance"])
def test_without_any_state_orphans_ends_what_a_kill_left(
    lab: LabDirectory, cloud: LambdaRehearsal, action: str
) -> None:
    kill_up_at(lab, cloud, "lost", action)
    forget_state(lab)
    lab.labctl(*ORPHANS)


def test_another_account_does_not_call_the_server_gone(
    lab: LabDirectory, cloud: LambdaRehearsal
) -> None:
    continue_up(lab)
    instances = list_left(cloud)
    first_key, first_account = cloud.key, cloud.scenario.account
    cloud.key = lab.environ["LAMBDA_API_KEY"] = "another-key-of-another-account"
    cloud.change(account="lrn:lambda:account:other")
    try:
        refused = lab.labctl(*DOWN, code=3).stderr
        assert f"belongs to lambda account {first_account}" in refused
        assert list_left(cloud) == instances
    finally:
        cloud.key = lab.environ["LAMBDA_API_KEY"] = first_key
        cloud.change(account=first_account)
    lab.labctl(*DOWN)


@pytest.mark.long
def test_kills_at_random_moments_leave_nothing(lab: LabDirectory, cloud: LambdaRehearsal) -> None:
    kill_at_random(lab, cloud, lambda: list_left(cloud))
