"""Vast.ai's own: exactly one instance, offers that are gone, bids; on records without machines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import requests
from msgspec.structs import replace
from vast_case import DESCRIPTIONS, VastCase, export, find_description, find_disk, make_case

from labctl.errors import (
    BusyError,
    CapacityError,
    CredentialsError,
    DeniedError,
    NoOfferError,
    QuotaError,
)
from labctl.model import Boot, GpuNeed, Need, Offer, Server
from labctl.providers.gpu_names import name_gpu
from labctl.providers.vast import VastProvider, VastSettings
from labctl.providers.vast.first_boot import MOST_LETTERS
from labctl.providers.vast.label import format_label, make_label, parse_label
from labctl.rehearsal.core.scenario import CallFailure, CloudCapacity, CloudDelays, Loss, Throttle
from labctl.rehearsal.vast import VastRehearsal, VastScenario
from labctl.servers.host_keys import ensure_key_pair

CALLS_OF_CREATE = (
    "showInstances",
    "showUser",
    "searchOffers",
    "getSshKeysUser",
    "createSshKey",
    "createInstance",
)
LONG_NAME = "a-lab-with-a-rather-long-name-of-its-own"


def test_a_request_that_is_not_as_described_is_noticed() -> None:
    """So the other tests check every request and reply."""
    if not (description := find_description()):
        pytest.skip(f"without Vast.ai's description, requests are not checked: set {DESCRIPTIONS}")
    cloud = VastRehearsal(VastScenario(boot="none", description=description))
    with closing(cloud.__enter__()):
        keys = f"{cloud.url}/api/v0/ssh/"
        headers = {"Authorization": f"Bearer {cloud.key}"}
        requests.post(keys, json={"ssh_key": 5}, headers=headers, timeout=10)
        assert cloud.violations


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> Iterator[VastRehearsal]:
    """At its end, it fails the test if a request or a reply was not as described, where Vast.ai's
    official description is on this machine.
    """
    with VastRehearsal(VastScenario(boot="none", description=find_description())) as cloud:
        export(cloud, monkeypatch)
        yield cloud


@pytest.fixture
def case(rehearsal: VastRehearsal, tmp_path: Path) -> VastCase:
    return make_case(rehearsal, tmp_path, VastSettings(settle_s=0))


def get_provider(case: VastCase) -> VastProvider:
    assert isinstance(case.provider, VastProvider)
    return case.provider


def get_alive(rehearsal: VastRehearsal) -> list[str]:
    return [name for name, state in rehearsal.instances.items() if state not in ("ending", "ended")]


def list_offers(case: VastCase, settings: VastSettings, need: Need | None = None) -> list[Offer]:
    provider = VastProvider(settings, case.provider.context)
    return provider.offers(need or case.need)


@pytest.mark.parametrize("kind", ["lost", "dropped", "failed"])
@pytest.mark.parametrize("action", CALLS_OF_CREATE)
def test_whichever_reply_of_create_is_lost_one_instance_exists(
    case: VastCase, rehearsal: VastRehearsal, action: str, kind: str
) -> None:
    """A call that only reads is repeated by itself; for the others, the flow repeats `create`."""
    offer = case.provider.offers(case.need)[0]
    fault = CallFailure(action=action, status=502) if kind == "failed" else Loss(action=action)
    rehearsal.change(**{kind: (fault,)})
    request = case.request()
    server: Server | None = None
    for _ in range(3):
        try:
            server = case.provider.create(offer, request)
        except BusyError:
            continue
        break
    assert server is not None
    assert get_alive(rehearsal) == [server.id]
    assert len(rehearsal.api.instances.keys) == 1


def test_an_instance_that_is_listed_late_is_awaited_before_another_is_rented(
    rehearsal: VastRehearsal, tmp_path: Path
) -> None:
    case = make_case(rehearsal, tmp_path, VastSettings(settle_s=3600))
    rehearsal.change(lost=(Loss(action="createInstance"),), delays=CloudDelays(visible=3600))
    request = case.request()
    for _ in range(3):
        with pytest.raises(BusyError, match="not said whether"):
            case.create(request)
    assert rehearsal.calls["createInstance"] == 1
    rehearsal.change(lost=(), delays=CloudDelays())
    assert get_alive(rehearsal) == [case.create(request).id]


def test_of_two_instances_of_one_attempt_the_oldest_stays(
    case: VastCase, rehearsal: VastRehearsal
) -> None:
    """Another process may rent one while Vast.ai does not list the first yet."""
    rehearsal.change(lost=(Loss(action="createInstance"),), delays=CloudDelays(visible=3600))
    request = case.request()
    with pytest.raises(BusyError):
        case.create(request)
    second = case.create(request)
    assert len(get_alive(rehearsal)) == 2
    rehearsal.change(lost=(), delays=CloudDelays())
    kept = case.create(request)
    assert kept.id != second.id
    assert get_alive(rehearsal) == [kept.id]


@pytest.mark.parametrize("how", ["rented", "rented meanwhile", "dearer"])
def test_for_an_offer_that_is_gone_the_next_one_is_tried(
    case: VastCase, rehearsal: VastRehearsal, how: str
) -> None:
    first, second = case.provider.offers(case.need)[:2]
    if how == "rented":
        make_case(rehearsal, case.directory).create()
    elif how == "rented meanwhile":
        rehearsal.change(gone=(first.zone.removeprefix("ask-"),))
    else:
        rehearsal.change(prices={first.type: 0.25})
    request = case.request()
    with pytest.raises(CapacityError, match=r"no longer has this|no such machine") as caught:
        case.provider.create(first, request)
    assert (how == "dearer") == ("was confirmed" in caught.value.why)
    rehearsal.change(prices={})
    assert case.provider.create(second, request).id in get_alive(rehearsal)


def test_without_credit_nothing_is_rented(case: VastCase, rehearsal: VastRehearsal) -> None:
    offer = case.provider.offers(case.need)[0]
    rehearsal.change(balance_usd=0.0)
    with pytest.raises(QuotaError, match="credit") as caught:
        case.provider.create(offer, case.request())
    assert "cloud.vast.ai/billing" in str(caught.value.hint)
    assert "createInstance" not in rehearsal.calls
    checks = {check.name: check for check in case.provider.check()}
    assert not checks["balance"].ok


def test_a_key_without_the_permission_is_refused(case: VastCase, rehearsal: VastRehearsal) -> None:
    rehearsal.change(denied=("createInstance",))
    with pytest.raises(DeniedError):
        case.create()
    assert rehearsal.instances == {}


def test_only_machines_that_settings_allow_are_offered(
    case: VastCase, rehearsal: VastRehearsal
) -> None:
    types = [offer.type for offer in case.provider.offers(case.need)]
    assert types[0] == "1x_RTX_3090"
    assert "1x_RTX_3060" not in types  # its host runs no VMs
    assert "1x_GTX_1080" not in types  # unreliable
    cheapest = list_offers(case, VastSettings(verified=False))
    assert next(one.price_usd_per_hour for one in cheapest if one.type == "1x_RTX_4090") < 0.25
    low = list_offers(case, VastSettings(reliability=0.5))
    assert low[0].type == "1x_GTX_1080"
    safe = list_offers(case, VastSettings(datacenter=True))
    assert {one.gpu_name for one in safe} == {"A100", "H100"}
    assert {one.region for one in list_offers(case, VastSettings(countries=("SE",)))} == {"SE"}
    with pytest.raises(NoOfferError) as caught:
        list_offers(case, VastSettings(reliability=1.0))
    assert "a reliability of at least 1" in caught.value.why


def test_a_gpu_has_the_name_that_users_write(case: VastCase) -> None:
    found = case.provider.offers(Need(gpu=GpuNeed(kind="A100", count=1), spot="never"))
    assert [one.type for one in found] == ["1x_A100_PCIE", "1x_A100_SXM4"]
    assert {one.gpu_memory_bytes for one in found} == {80 * 1024**3}
    assert name_gpu("H100 PCIE", 80 * 1024**3) == "H100 PCIE"  # slower than the others
    four = case.provider.offers(Need(gpu=GpuNeed(kind="RTX 4090", count=4), spot="never"))
    assert [(one.gpu_count, one.gpu_name) for one in four] == [(4, "RTX 4090")]


def test_a_bid_is_above_the_least_and_part_of_the_price(
    case: VastCase, rehearsal: VastRehearsal
) -> None:
    server = case.create_bidding()
    record = rehearsal.find_instance(server.id)
    assert record.body is not None
    assert record.body.price == pytest.approx(0.09 * 1.1)
    assert server.offer.spot
    assert server.offer.price_usd_per_hour == pytest.approx(0.099 + 0.15 * 60 / 730, abs=1e-3)


def test_an_outbid_server_is_gone_and_its_disk_is_left_with_a_price(
    case: VastCase, rehearsal: VastRehearsal
) -> None:
    server = case.create_bidding()
    rehearsal.reclaim(server.id, 0)
    case.gone(server.id)
    rehearsal.wait(server.id, "stopped")
    assert case.ours() == []
    disk = find_disk(case, server.id)
    assert disk is not None
    assert disk.price_usd_per_month == pytest.approx(9.0)
    assert "its data is still there" in disk.note
    case.provider.remove(disk)
    rehearsal.wait(server.id, "ended")
    assert find_disk(case, server.id) is None


def test_the_disk_of_a_stopped_server_has_a_price_and_ends_with_it(
    case: VastCase, rehearsal: VastRehearsal
) -> None:
    server = case.running(case.create())
    get_provider(case).stop(server.id)
    rehearsal.wait(server.id, "stopped")
    assert [one.state for one in case.ours()] == ["stopped"]
    disk = find_disk(case, server.id)
    assert disk is not None
    assert disk.price_usd_per_month == pytest.approx(9.0)
    with pytest.raises(BusyError, match="still has this disk"):
        case.provider.remove(disk)
    case.provider.terminate(server.id)
    assert find_disk(case, server.id) is None


def test_throttling_delays_and_does_not_fail(case: VastCase, rehearsal: VastRehearsal) -> None:
    rehearsal.change(throttle=(Throttle(action="show*", rate=2, burst=1),))
    server = case.create()
    assert get_alive(rehearsal) == [server.id]


def test_credentials_that_expire_midway_leave_an_attempt_that_ends_well(
    case: VastCase, rehearsal: VastRehearsal
) -> None:
    offer = case.provider.offers(case.need)[0]
    request = case.request()
    rehearsal.change(lost=(Loss(action="createInstance"),))
    with pytest.raises(BusyError):
        case.provider.create(offer, request)
    rehearsal.change(expired=True)
    with pytest.raises(CredentialsError):
        case.provider.create(offer, request)
    rehearsal.change(expired=False)
    assert get_alive(rehearsal) == [case.provider.create(offer, request).id]


def test_a_wrong_key_is_an_error_of_credentials_in_a_search_too(
    case: VastCase, rehearsal: VastRehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vast.ai answers it with 404 there."""
    monkeypatch.setenv("VAST_API_KEY", "1" * 64)
    with pytest.raises(CredentialsError):
        case.provider.offers(case.need)


def test_more_instances_than_a_page_has_are_all_listed(
    case: VastCase, rehearsal: VastRehearsal
) -> None:
    server = case.running(case.create())
    record = rehearsal.find_instance(server.id)
    for number in range(60):
        copy = type(record)(**{**vars(record), "id": str(30_000_000 + number)})
        rehearsal.fleet.add(copy)
    assert len(case.provider.servers()) == 61


def test_pinned_keys_are_in_the_label(case: VastCase, tmp_path: Path) -> None:
    provider = get_provider(case)
    server = case.create(case.request(LONG_NAME))
    first = server.endpoint.host_key
    following = ensure_key_pair(tmp_path / "next").rpartition(" ")[0]
    for keys in ((first, following), (following, "")):
        provider.pin(server.id, *keys)
        [shown] = provider.servers()
        assert (shown.endpoint.host_key, shown.endpoint.next_host_key) == keys
        assert (shown.lab, shown.lab_id) == (LONG_NAME, server.lab_id)


def test_a_label_fits_and_is_read_again(case: VastCase) -> None:
    tags = {f"tag{number}": "x y=z" * 30 for number in range(20)}
    request = replace(case.request(LONG_NAME), tags={"labctl:budget": "3.5", **tags})
    label = make_label(request, "A Student <s@example.com>")
    text = format_label(label)
    assert len(text) <= 1024
    found = parse_label(text)
    assert found is not None
    assert (found.lab, found.lab_id, found.token) == (LONG_NAME, request.lab_id, request.token)
    assert found.host_key == request.host_key
    assert dict(found.tags)["labctl:budget"] == "3.5"
    assert [parse_label(other) for other in (None, "", "labctl", "my own label")] == [None] * 4


def test_a_key_of_an_ended_lab_is_left_for_free_and_removed(
    case: VastCase, rehearsal: VastRehearsal
) -> None:
    server = case.create()
    [key] = [one for one in case.provider.leftovers() if one.kind == "SSH key"]
    assert (key.lab_id, key.server_id, key.price_usd_per_month) == (server.lab_id, server.id, 0.0)
    case.provider.terminate(server.id)
    [key] = case.provider.leftovers()
    assert key.server_id == ""
    for _ in range(2):
        case.provider.remove(key)
    assert case.provider.leftovers() == []


def test_the_account_is_the_users_number(
    case: VastCase, rehearsal: VastRehearsal, tmp_path: Path
) -> None:
    assert case.provider.get_account().id == str(rehearsal.scenario.account)
    assert rehearsal.calls["showUser"] == 1
    make_case(rehearsal, tmp_path).provider.get_account()
    assert rehearsal.calls["showUser"] == 1


def test_the_first_boot_fits_into_onstart_for_any_lab(case: VastCase, tmp_path: Path) -> None:
    public_key = ensure_key_pair(tmp_path / "key")
    boot = Boot(
        lab=LONG_NAME,
        public_key=public_key,
        host_key=public_key,
        host_private_key=(tmp_path / "key").read_text(),
        ttl_s=30 * 86_400,
    )
    assert len(get_provider(case).build_first_boot(boot)) <= MOST_LETTERS


def test_doctor_says_what_ends_the_costs(
    case: VastCase, rehearsal: VastRehearsal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = {check.name: check for check in case.provider.check()}
    assert all(check.ok for check in checks.values())
    assert checks["deadline at Vast.ai"].warning
    assert "1x_RTX_3090" in checks["capacity"].detail
    key_file = tmp_path / ".config" / "vastai" / "vast_api_key"
    key_file.parent.mkdir(parents=True)
    key_file.write_text(rehearsal.key)
    key_file.chmod(0o644)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VAST_API_KEY")
    checks = {check.name: check for check in case.provider.check()}
    assert checks["key file"].next == "chmod 600 ~/.config/vastai/vast_api_key"
    rehearsal.change(expired=True)
    [credentials] = case.provider.check()
    assert not credentials.ok
    assert "cloud.vast.ai/manage-keys" in str(credentials.next)


def test_no_capacity_leaves_no_offer(case: VastCase, rehearsal: VastRehearsal) -> None:
    rehearsal.change(capacity=(CloudCapacity(left=0),))
    with pytest.raises(NoOfferError, match=r"Vast\.ai has no machine that fits"):
        case.provider.offers(case.need)
