"""RunPod's own: exactly one pod, errors by status, names, disks; on records without machines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace
from runpod_case import DESCRIPTIONS, RunPodCase, export, find_description, make_case

from labctl.config.lab import load_lab
from labctl.config.schema import LabConfig
from labctl.errors import (
    BusyError,
    CapacityError,
    ConfigError,
    CredentialsError,
    DeniedError,
    NoOfferError,
    QuotaError,
)
from labctl.model import GIB, GpuNeed, Need, Server
from labctl.providers.ed25519_code import decode_host_key, encode_host_key
from labctl.providers.runpod import RunPodProvider, RunPodSettings
from labctl.providers.runpod.tags import make_pinned_name
from labctl.rehearsal.core.scenario import CallFailure, CloudCapacity, CloudDelays, Loss, Throttle
from labctl.rehearsal.runpod import RunPodRehearsal, RunPodScenario
from labctl.servers.host_keys import ensure_key_pair
from labctl.servers.provider_traits import read_provider_traits

CALLS_OF_CREATE = ("listPods", "createPod")
LONG_NAME = "a-lab-with-a-rather-long-name-of-its-own"


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunPodRehearsal]:
    """At its end, it fails the test if a request or a reply was not as described."""
    scenario = RunPodScenario(boot="none", description=find_description())
    with RunPodRehearsal(scenario) as cloud:
        export(cloud, monkeypatch)
        yield cloud


@pytest.fixture
def case(rehearsal: RunPodRehearsal, tmp_path: Path) -> RunPodCase:
    return make_case(tmp_path, RunPodSettings(settle_s=0))


def load(directory: Path, lines: str) -> LabConfig:
    (directory / "lab.yaml").write_text(f"lab: pods\n{lines}\n")
    return load_lab(directory, environ={"HOME": str(directory)}, find_provider=read_provider_traits)


def get_provider(case: RunPodCase) -> RunPodProvider:
    assert isinstance(case.provider, RunPodProvider)
    return case.provider


def get_alive(cloud: RunPodRehearsal) -> list[str]:
    return [name for name, state in cloud.instances.items() if state not in ("ending", "ended")]


def test_a_request_that_is_not_as_described_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the other tests check every request and reply."""
    if not (description := find_description()):
        pytest.skip(f"without RunPod's description, requests are not checked: set {DESCRIPTIONS}")
    cloud = RunPodRehearsal(RunPodScenario(boot="none", description=description))
    with closing(cloud.__enter__()):
        export(cloud, monkeypatch)
        with pytest.raises(BusyError):
            make_case(tmp_path, RunPodSettings(disk_gb=0)).create()
        assert "POST /v2/pods: " in cloud.violations[0]


@pytest.mark.parametrize("kind", ["lost", "dropped", "failed"])
@pytest.mark.parametrize("action", CALLS_OF_CREATE)
@pytest.mark.parametrize("skip", [0, 1])
def test_whichever_reply_of_create_is_lost_one_pod_exists(
    case: RunPodCase, rehearsal: RunPodRehearsal, action: str, kind: str, skip: int
) -> None:
    """A call that only reads is repeated by itself; for the others, the flow repeats `create`."""
    fault = (
        CallFailure(action=action, status=502, skip=skip)
        if kind == "failed"
        else Loss(action=action, skip=skip)
    )
    rehearsal.change(**{kind: (fault,)})
    request = case.request()
    server: Server | None = None
    for _ in range(3):
        try:
            server = case.create(request)
        except BusyError:
            continue
        break
    assert server is not None
    assert get_alive(rehearsal) == [server.id]


def test_a_pod_that_is_listed_late_is_awaited_before_another_is_created(
    rehearsal: RunPodRehearsal, tmp_path: Path
) -> None:
    case = make_case(tmp_path, RunPodSettings(settle_s=3600))
    rehearsal.change(lost=(Loss(action="createPod"),), delays=CloudDelays(visible=3600))
    request = case.request()
    for _ in range(3):
        with pytest.raises(BusyError, match="not said whether"):
            case.create(request)
    assert rehearsal.calls["createPod"] == 1
    rehearsal.change(lost=(), delays=CloudDelays())
    assert get_alive(rehearsal) == [case.create(request).id]


def test_of_two_pods_of_one_attempt_the_oldest_stays(
    case: RunPodCase, rehearsal: RunPodRehearsal
) -> None:
    """Another process may create one while RunPod does not list the first yet."""
    rehearsal.change(lost=(Loss(action="createPod"),), delays=CloudDelays(visible=3600))
    request = case.request()
    with pytest.raises(BusyError):
        case.create(request)
    second = case.create(request)
    assert len(get_alive(rehearsal)) == 2
    rehearsal.change(lost=(), delays=CloudDelays())
    kept = case.create(request)
    assert kept.id != second.id
    rehearsal.wait(second.id, "ended")
    assert get_alive(rehearsal) == [kept.id]


def test_capacity_pool_and_balance_have_errors_of_their_own(
    case: RunPodCase, rehearsal: RunPodRehearsal
) -> None:
    offers = case.provider.offers(case.need)
    first = offers[0]
    rehearsal.change(capacity=(CloudCapacity(type=first.type, left=0),))
    with pytest.raises(CapacityError, match=f"did not place {first.type} in {first.zone}"):
        case.provider.create(first, case.request())
    assert first.type not in {one.type for one in case.provider.offers(case.need)}
    rehearsal.change(capacity=(), no_pool=(first.type,))
    with pytest.raises(CapacityError, match="no access"):
        case.provider.create(first, case.request())
    rehearsal.change(no_pool=(), balance_usd=0.01)
    with pytest.raises(QuotaError, match="credit") as caught:
        case.create()
    assert "user/billing" in str(caught.value.hint)
    assert rehearsal.instances == {}


def test_a_key_that_may_only_read_is_no_lack_of_capacity(
    case: RunPodCase, rehearsal: RunPodRehearsal
) -> None:
    rehearsal.change(denied=("createPod", "deletePod"))
    with pytest.raises(DeniedError):
        case.create()
    permission = {check.name: check for check in case.provider.check()}["permission"]
    assert not permission.ok
    assert "labctl docs runpod" in permission.next


def test_no_capacity_anywhere_is_said_with_what_would_fit(
    case: RunPodCase, rehearsal: RunPodRehearsal
) -> None:
    rehearsal.change(capacity=(CloudCapacity(left=0),))
    with pytest.raises(NoOfferError) as caught:
        case.provider.offers(Need(gpu=GpuNeed(kind="L4", count=1)))
    assert caught.value.why.splitlines()[-1] == "no capacity now rules out 1 of 1"
    rehearsal.change(capacity=())
    for need in (Need(gpu=GpuNeed(kind="none")), replace(case.need, spot="only")):
        with pytest.raises(NoOfferError, match="RunPod has no machine that fits"):
            case.provider.offers(need)


def test_offers_name_the_gpu_as_users_do_and_each_place(case: RunPodCase) -> None:
    offers = case.provider.offers(case.need)
    assert {one.region for one in offers} == {"secure"}
    assert {one.zone for one in offers} == {"EU-RO-1", "US-KS-2"}
    named = {one.gpu_name: one for one in offers}
    assert {"A100", "H100", "H100 PCIe", "RTX 4090"} <= set(named)
    assert "MI300X" not in named
    assert named["A100"].gpu_memory_bytes == 80 * GIB
    [eight, *_] = case.provider.offers(Need(gpu=GpuNeed(kind="A100", count=8)))
    assert (eight.gpu_count, eight.price_usd_per_hour) == (8, 8 * 1.64)


def test_offers_follow_the_settings(rehearsal: RunPodRehearsal, tmp_path: Path) -> None:
    need = Need(gpu=GpuNeed(kind="RTX 4090", count=1))
    both = make_case(tmp_path, RunPodSettings(cloud="any", data_centers=("US-KS-2",)))
    offers = both.provider.offers(need)
    assert [(one.region, one.zone, one.price_usd_per_hour) for one in offers] == [
        ("community", "US-KS-2", 0.34),
        ("secure", "US-KS-2", 0.69),
    ]
    server = both.provider.create(offers[0], both.request())
    assert (server.offer.region, server.offer.price_usd_per_hour) == ("community", 0.34)


def test_throttling_delays_and_does_not_fail(case: RunPodCase, rehearsal: RunPodRehearsal) -> None:
    rehearsal.change(throttle=(Throttle(action="*", rate=4, burst=1),))
    server = case.create()
    assert get_alive(rehearsal) == [server.id]
    assert rehearsal.calls["listPods"] > 2


def test_a_key_that_expires_midway_leaves_an_attempt_that_ends_well(
    case: RunPodCase, rehearsal: RunPodRehearsal
) -> None:
    request = case.request()
    rehearsal.change(lost=(Loss(action="createPod"),))
    with pytest.raises(BusyError):
        case.create(request)
    rehearsal.change(expired=True)
    with pytest.raises(CredentialsError):
        case.create(request)
    rehearsal.change(expired=False)
    assert get_alive(rehearsal) == [case.create(request).id]


def test_the_account_is_the_key_s_and_another_key_is_another_account(
    case: RunPodCase, rehearsal: RunPodRehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """labctl refuses to act on a server of another account: tests/unit has that for every cloud."""
    assert case.provider.get_account().id == "user_rehearsal"
    assert case.create().account == "user_rehearsal"
    monkeypatch.setattr(rehearsal, "key", "rpa_of_somebody_else")
    monkeypatch.setenv("RUNPOD_API_KEY", rehearsal.key)
    rehearsal.change(account="user_else")
    assert case.provider.get_account().id == "user_else"


@pytest.mark.parametrize("why", ["errors", "denied"])
def test_without_graphql_a_hash_of_the_key_stands_for_the_account(
    case: RunPodCase,
    rehearsal: RunPodRehearsal,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
) -> None:
    monkeypatch.setattr(rehearsal, "key", f"rpa_without_graphql_{why}")
    monkeypatch.setenv("RUNPOD_API_KEY", rehearsal.key)
    changes = {"account": ""} if why == "errors" else {"denied": ("graphql",)}
    rehearsal.change(**changes)
    account = case.provider.get_account().id
    assert account.startswith("key-")
    assert rehearsal.key not in account
    checks = {check.name: check for check in case.provider.check()}
    assert checks["account"].warning
    assert "balance" not in checks


def test_pinned_keys_are_in_the_name_and_the_rest_in_the_environment(
    case: RunPodCase, tmp_path: Path
) -> None:
    """Another machine that has only the key finds all of it."""
    provider = get_provider(case)
    server = case.create(case.request(LONG_NAME))
    first = server.endpoint.host_key
    following = ensure_key_pair(tmp_path / "next").rpartition(" ")[0]
    provider.pin(server.id, first, following)
    [shown] = make_case(tmp_path / "other").provider.servers()
    assert (shown.endpoint.host_key, shown.endpoint.next_host_key) == (first, following)
    provider.pin(server.id, following)
    [shown] = make_case(tmp_path / "other").provider.servers()
    assert (shown.endpoint.host_key, shown.endpoint.next_host_key) == (following, "")
    assert (shown.lab, shown.lab_id, shown.offer) == (LONG_NAME, server.lab_id, server.offer)
    assert len(make_pinned_name(LONG_NAME, following, "")) <= 60


def test_a_host_key_survives_its_letters(tmp_path: Path) -> None:
    line = ensure_key_pair(tmp_path / "key").rpartition(" ")[0]
    assert decode_host_key(encode_host_key(line)) == line
    assert [decode_host_key(text) for text in ("", "short", "=" * 43)] == ["", "", ""]


def test_a_stopped_pod_bills_its_disk_and_names_its_price(
    case: RunPodCase, rehearsal: RunPodRehearsal
) -> None:
    server = case.create()
    rehearsal.wait(server.id, "running")
    [disk] = case.provider.leftovers()
    # `labctl stop` names this price beforehand.
    assert (disk.server_id, disk.price_usd_per_month) == (server.id, 10.0)
    with pytest.raises(BusyError, match="still has this disk"):
        case.provider.remove(disk)
    provider = get_provider(case)
    for _ in range(2):
        provider.stop(server.id)
    rehearsal.wait(server.id, "stopped")
    [disk] = case.provider.leftovers()
    assert disk.price_usd_per_month == 10.0
    [stopped] = provider.servers()
    assert (stopped.state, stopped.endpoint.port) == ("stopped", 0)
    assert stopped.offer.price_usd_per_hour == server.offer.price_usd_per_hour


def test_pods_of_others_are_left_alone(case: RunPodCase, rehearsal: RunPodRehearsal) -> None:
    server = case.create()
    record = rehearsal.find_instance(server.id)
    record.body = replace(record.body, env={"MODEL": "llama"})
    provider = get_provider(case)
    assert provider.servers() == []
    assert provider.leftovers() == []
    assert provider.find(server.id) is None


def test_doctor_says_what_the_balance_pays_and_what_ends_the_costs(
    case: RunPodCase, rehearsal: RunPodRehearsal
) -> None:
    checks = {check.name: check for check in case.provider.check()}
    assert all(check.ok for check in checks.values())
    assert "$100.00" in checks["balance"].detail
    assert "RTX A4000" in checks["capacity"].detail
    assert checks["deadline at RunPod"].warning
    assert rehearsal.instances == {}
    rehearsal.change(balance_usd=0.10)
    checks = {check.name: check for check in case.provider.check()}
    assert not checks["balance"].ok
    rehearsal.change(expired=True)
    [credentials] = case.provider.check()
    assert not credentials.ok
    assert "API Keys" in credentials.next


@pytest.mark.parametrize(
    ("lines", "key", "text"),
    [
        ("server: {provider: runpod, executor: docker}", "server.executor", "without a Docker"),
        ("server: {provider: runpod}\nimage: python:3.12", "image", "without a Docker Engine"),
        ("server: {provider: runpod}\nimage: {build: .}", "image", "requirements"),
        ("server: {provider: runpod}\nlimits: {memory: 1GB}", "limits.memory", "container"),
        ("server: {provider: runpod, runpod: {volume: 2GB}}", "server.runpod.volume", "10GB"),
    ],
)
def test_what_a_pod_cannot_do_is_refused_in_lab_yaml(
    tmp_path: Path, lines: str, key: str, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, lines)
    [problem] = caught.value.problems
    assert problem.path == key
    assert text in problem.message


def test_runs_of_a_pod_are_processes_without_being_told(tmp_path: Path) -> None:
    config = load(tmp_path, "server: {provider: runpod}")
    assert config.server.executor == "process"
    assert not config.uses_containers
