"""Lambda's own: exactly one instance, errors by code, keys, names; on records without machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lambda_case import LambdaCase, export, make_case
from msgspec.structs import replace

from labctl.errors import (
    BusyError,
    CapacityError,
    ConnectError,
    CredentialsError,
    DeniedError,
    NoOfferError,
    QuotaError,
)
from labctl.model import GpuNeed, Need, Server
from labctl.providers.lambda_cloud import LambdaProvider, LambdaSettings
from labctl.providers.lambda_cloud.cloud import LambdaCloud
from labctl.rehearsal.core.scenario import (
    CallFailure,
    CloudCapacity,
    CloudDelays,
    Loss,
    Throttle,
)
from labctl.rehearsal.lambda_cloud import LambdaRehearsal, LambdaScenario
from labctl.servers.host_keys import ensure_key_pair

CALLS_OF_CREATE = ("listInstances", "listSSHKeys", "addSSHKey", "launchInstance")


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> Iterator[LambdaRehearsal]:
    with LambdaRehearsal(LambdaScenario(boot="none")) as cloud:
        export(cloud, monkeypatch)
        yield cloud


@pytest.fixture
def case(rehearsal: LambdaRehearsal, tmp_path: Path) -> LambdaCase:
    return make_case(rehearsal, tmp_path, LambdaSettings(settle_s=0))


def get_alive(rehearsal: LambdaRehearsal) -> list[str]:
    return [name for name, state in rehearsal.instances.items() if state not in ("ending", "ended")]


@pytest.mark.parametrize("kind", ["lost", "dropped", "failed"])
@pytest.mark.parametrize("action", CALLS_OF_CREATE)
def test_whichever_reply_of_create_is_lost_one_instance_exists(
    case: LambdaCase, rehearsal: LambdaRehearsal, action: str, kind: str
) -> None:
    """A call that only reads is repeated by itself; for the others, the flow repeats `create`."""
    fault = CallFailure(action=action, status=502) if kind == "failed" else Loss(action=action)
    rehearsal.change(**{kind: (fault,)})
    request = case.request()
    server: Server | None = None
    for _ in range(3):
        try:
            server = case.create(request)
        except (ConnectError, BusyError):
            continue
        break
    assert server is not None
    assert get_alive(rehearsal) == [server.id]
    assert len(rehearsal.api.storage.keys) == 1


def test_an_instance_that_is_listed_late_is_awaited_before_another_is_launched(
    rehearsal: LambdaRehearsal, tmp_path: Path
) -> None:
    case = make_case(rehearsal, tmp_path, LambdaSettings(settle_s=3600))
    rehearsal.change(lost=(Loss(action="launchInstance"),), delays=CloudDelays(visible=3600))
    request = case.request()
    for _ in range(3):
        with pytest.raises(BusyError, match="not said whether"):
            case.create(request)
    assert rehearsal.calls["launchInstance"] == 1
    rehearsal.change(lost=(), delays=CloudDelays())
    assert get_alive(rehearsal) == [case.create(request).id]


def test_an_instance_that_is_listed_late_is_not_doubled_for_good(
    case: LambdaCase, rehearsal: LambdaRehearsal
) -> None:
    rehearsal.change(lost=(Loss(action="launchInstance"),), delays=CloudDelays(visible=3600))
    request = case.request()
    with pytest.raises(BusyError, match="not said whether"):
        case.create(request)
    second = case.create(request)
    assert len(get_alive(rehearsal)) == 2
    rehearsal.change(lost=(), delays=CloudDelays(forget=60))
    kept = case.create(request)
    assert kept.id != second.id
    rehearsal.wait(second.id, "ended")
    assert get_alive(rehearsal) == [kept.id]


def test_quota_capacity_and_account_have_errors_of_their_own(
    case: LambdaCase, rehearsal: LambdaRehearsal
) -> None:
    offers = case.provider.offers(case.need)
    rehearsal.change(capacity=(CloudCapacity(type=offers[0].type, left=0),))
    with pytest.raises(CapacityError):
        case.provider.create(offers[0], case.request())
    assert offers[0].type not in {one.type for one in case.provider.offers(case.need)}
    rehearsal.change(capacity=(), quota=0)
    with pytest.raises(QuotaError, match="quota") as caught:
        case.create()
    assert "global/quota-exceeded" in caught.value.why
    rehearsal.change(quota=5, denied=("launchInstance",))
    with pytest.raises(DeniedError):
        case.create()
    assert rehearsal.instances == {}


def test_no_capacity_anywhere_is_said_with_what_would_fit(
    case: LambdaCase, rehearsal: LambdaRehearsal
) -> None:
    rehearsal.change(capacity=(CloudCapacity(left=0),))
    with pytest.raises(NoOfferError) as caught:
        case.provider.offers(Need(gpu=GpuNeed(kind="A10", count=1)))
    assert caught.value.why.splitlines()[-1] == "no capacity now rules out 1 of 1"
    rehearsal.change(capacity=())
    with pytest.raises(NoOfferError, match="Lambda has no machine that fits") as caught:
        case.provider.offers(Need(gpu=GpuNeed(kind="any", count=1), spot="only"))
    assert "spot only rules out" in caught.value.why


def test_only_configured_regions_are_offered(case: LambdaCase, rehearsal: LambdaRehearsal) -> None:
    provider = case.provider
    assert isinstance(provider, LambdaProvider)
    assert {one.region for one in provider.offers(case.need)} == {"us-east-1", "us-west-1"}
    west = LambdaProvider(LambdaSettings(regions=("us-west-1",)), provider.context)
    assert {one.region for one in west.offers(case.need)} == {"us-west-1"}


def test_a_gpu_is_read_from_its_description(case: LambdaCase) -> None:
    found = {one.type: one for one in case.provider.offers(case.need)}
    a10, v100 = found["gpu_1x_a10"], found["gpu_8x_v100"]
    assert (a10.gpu_name, a10.gpu_memory_bytes, a10.gpu_count) == ("A10", 24 * 1024**3, 1)
    assert (v100.gpu_name, v100.gpu_count, v100.price_usd_per_hour) == ("V100", 8, 4.40)
    assert "gpu_1x_gh200" not in found
    arm = case.provider.offers(replace(case.need, arch="arm64"))
    assert [one.type for one in arm][:1] == ["gpu_1x_gh200"]


def test_throttling_delays_and_does_not_fail(case: LambdaCase, rehearsal: LambdaRehearsal) -> None:
    """Lambda documents one request a second; here they are four."""
    rehearsal.change(throttle=(Throttle(action="*", rate=4, burst=1),))
    server = case.create()
    assert get_alive(rehearsal) == [server.id]
    assert rehearsal.calls["launchInstance"] >= 1


def test_credentials_that_expire_midway_leave_an_attempt_that_ends_well(
    case: LambdaCase, rehearsal: LambdaRehearsal
) -> None:
    request = case.request()
    rehearsal.change(lost=(Loss(action="launchInstance"),))
    with pytest.raises(BusyError):
        case.create(request)
    rehearsal.change(expired=True)
    with pytest.raises(CredentialsError):
        case.create(request)
    rehearsal.change(expired=False)
    assert get_alive(rehearsal) == [case.create(request).id]


def test_credentials_that_expire_after_the_launch_leave_its_attempt_open(
    rehearsal: LambdaRehearsal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CredentialsError of the first call would say that nothing was created."""
    case = make_case(rehearsal, tmp_path, LambdaSettings(settle_s=3600))
    launch = LambdaCloud.launch

    def launch_and_expire(*words: Any) -> str:
        instance_id = launch(*words)
        rehearsal.change(expired=True, delays=CloudDelays(visible=3600))
        return instance_id

    monkeypatch.setattr(LambdaCloud, "launch", launch_and_expire)
    request = case.request()
    with pytest.raises(BusyError, match="not said whether"):
        case.create(request)
    rehearsal.change(expired=False)
    with pytest.raises(BusyError, match="not said whether"):
        case.create(request)
    rehearsal.change(delays=CloudDelays())
    assert get_alive(rehearsal) == [case.create(request).id]


def test_the_account_is_the_owner_that_the_audit_log_names(
    case: LambdaCase, rehearsal: LambdaRehearsal, tmp_path: Path
) -> None:
    assert case.provider.get_account().id == rehearsal.scenario.account
    assert rehearsal.calls["getAuditEvents"] == 1
    make_case(rehearsal, tmp_path).provider.get_account()
    assert rehearsal.calls["getAuditEvents"] == 1


@pytest.mark.parametrize("why", ["empty", "denied"])
def test_without_an_owner_a_hash_of_the_key_stands_for_the_account(
    case: LambdaCase, rehearsal: LambdaRehearsal, why: str
) -> None:
    changes = {"account": ""} if why == "empty" else {"denied": ("getAuditEvents",)}
    rehearsal.change(**changes)
    account = case.provider.get_account().id
    assert account.startswith("key-")
    assert rehearsal.key not in account


def test_pinned_keys_are_in_the_name(case: LambdaCase, tmp_path: Path) -> None:
    """Tags cannot be changed, and who lost all state still knows the host key."""
    provider = case.provider
    assert isinstance(provider, LambdaProvider)
    server = case.create(case.request("a-lab-with-a-rather-long-name-of-its-own"))
    first = server.endpoint.host_key
    following = ensure_key_pair(tmp_path / "next").rpartition(" ")[0]
    provider.pin(server.id, first, following)
    [shown] = provider.servers()
    assert (shown.endpoint.host_key, shown.endpoint.next_host_key) == (first, following)
    provider.pin(server.id, following)
    [shown] = provider.servers()
    assert (shown.endpoint.host_key, shown.endpoint.next_host_key) == (following, "")
    assert shown.lab == "a-lab-with-a-rather-long-name-of-its-own"


def test_keys_and_file_systems_are_leftovers_with_prices(
    case: LambdaCase, rehearsal: LambdaRehearsal
) -> None:
    server = case.create()
    [key] = case.provider.leftovers()
    assert (key.kind, key.lab_id, key.server_id) == ("SSH key", server.lab_id, server.id)
    case.provider.terminate(server.id)
    rehearsal.wait(server.id, "ended")
    [key] = case.provider.leftovers()
    assert key.server_id == ""
    for _ in range(2):
        case.provider.remove(key)
    assert case.provider.leftovers() == []


def test_doctor_says_what_ends_the_costs(case: LambdaCase, rehearsal: LambdaRehearsal) -> None:
    checks = {check.name: check for check in case.provider.check()}
    assert all(check.ok for check in checks.values())
    assert checks["deadline at Lambda"].warning
    assert "gpu_1x_rtx6000" in checks["capacity"].detail
    rehearsal.change(expired=True)
    [credentials] = case.provider.check()
    assert not credentials.ok
    assert "cloud.lambda.ai/api-keys" in credentials.next
