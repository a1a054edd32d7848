"""The Azure provider on a rehearsed Azure: what goes wrong, and what it costs afterwards.

Microsoft's own libraries sign in and send the requests, and each body is checked against the types
of Microsoft's SDK.
"""

from __future__ import annotations

import time

import pytest
from azure_bed import GPU, HOST_KEY, AzureBed, azure, azure_cloud, create_patiently, wait_for

from labctl.errors import (
    BusyError,
    CapacityError,
    CredentialsError,
    DeniedError,
    NoOfferError,
    ProviderError,
    QuotaError,
    ThrottledError,
)
from labctl.model import GpuNeed, Need
from labctl.providers.azure import tags as azure_tags
from labctl.providers.azure.errors import ArmErrorBody, ArmFault, translate_fault
from labctl.providers.azure.machines import ADDRESSES, NICS, VMS
from labctl.providers.azure.network import NSGS
from labctl.providers.azure.tags import AzureTimer
from labctl.rehearsal.azure.scenario import FamilyQuota
from labctl.rehearsal.core.scenario import CallFailure, CloudCapacity, Loss, Throttle

__all__ = ["azure", "azure_cloud"]

PUTS = (
    "ResourceGroups_CreateOrUpdate",
    "NetworkSecurityGroups_CreateOrUpdate",
    "SecurityRules_CreateOrUpdate",
    "VirtualNetworks_CreateOrUpdate",
    "PublicIPAddresses_CreateOrUpdate",
    "NetworkInterfaces_CreateOrUpdate",
    "VirtualMachines_CreateOrUpdate",
)
EACH = {
    "network-interface": 1,
    "public-ip": 1,
    "security-group": 1,
    "virtual-network": 1,
    "disk": 1,
}


def count_kinds(azure: AzureBed) -> dict[str, int]:
    kinds = [resource.kind for resource in azure.provider().leftovers()]
    return {kind: kinds.count(kind) for kind in kinds}


def list_created(azure: AzureBed) -> set[str]:
    return {kind for kind, _ in azure.cloud.account.resources}


def test_bodies_are_checked_against_the_types_of_microsofts_sdk(azure: AzureBed) -> None:
    if not azure.cloud.has_description:
        pytest.skip("azure-mgmt-compute is not installed: no request is checked")
    azure.up(azure.provider())
    assert azure.cloud.violations == []


@pytest.mark.parametrize("kind", ["lost", "dropped"])
@pytest.mark.parametrize("action", PUTS)
def test_a_lost_call_of_create_leaves_one_machine(azure: AzureBed, action: str, kind: str) -> None:
    azure.cloud.account.groups.clear()
    provider = azure.provider()
    offer, request = provider.offers(GPU)[0], azure.request(provider)
    azure.cloud.change(**{kind: (Loss(action=action, count=2),)})
    server = create_patiently(provider, offer, request)
    assert [one.id for one in provider.servers()] == [server.id]
    assert len(azure.cloud.fleet.list_shown()) == 1
    assert count_kinds(azure) == EACH


def test_without_room_the_next_offer_is_tried_and_nothing_is_left(azure: AzureBed) -> None:
    provider = azure.provider()
    first, *_ = offers = provider.offers(GPU)
    azure.cloud.change(capacity=(CloudCapacity(region=first.region),))
    with pytest.raises(CapacityError) as refused:
        provider.create(first, azure.request(provider))
    assert str(refused.value).startswith(
        f"{first.type} (spot) in {first.region}: Azure has no room"
    )
    assert "AllocationFailed" in refused.value.why
    assert provider.servers() == []
    assert not {VMS, NICS, ADDRESSES} & list_created(azure)
    elsewhere = next(offer for offer in offers if offer.region != first.region)
    provider.create(elsewhere, azure.request(provider))
    assert len(provider.servers()) == 1


def test_a_size_that_is_not_available_leads_to_the_next_offer(azure: AzureBed) -> None:
    provider = azure.provider()
    first = provider.offers(GPU)[0]
    azure.cloud.change(closed=(first.type,))
    with pytest.raises(CapacityError, match="no room") as refused:
        provider.create(first, azure.request(provider))
    assert "SkuNotAvailable" in refused.value.why
    assert ADDRESSES not in list_created(azure)
    assert {offer.type for offer in provider.offers(GPU)}.isdisjoint({first.type})


def test_a_quota_is_named_and_leads_to_the_next_offer(azure: AzureBed) -> None:
    provider = azure.provider()
    first = provider.offers(GPU)[0]
    azure.cloud.change(quotas=(FamilyQuota(name="lowPriorityCores", limit=4),))
    provider.create(first, azure.request(provider))
    with pytest.raises(CapacityError, match="the quota of the region") as refused:
        provider.create(first, azure.request(provider))
    assert "OperationNotAllowed" in refused.value.why
    assert "portal.azure.com" in refused.value.hint
    assert count_kinds(azure)["public-ip"] == 1


def test_what_no_quota_allows_is_not_offered(azure: AzureBed) -> None:
    azure.cloud.change(quotas=(FamilyQuota(name="Standard NCASv3_T4 Family", limit=0),))
    provider = azure.provider()
    offers = provider.offers(GPU)
    assert {offer.spot for offer in offers if offer.gpu_name == "T4"} == {True}
    with pytest.raises(NoOfferError) as refused:
        provider.offers(Need(gpu=GpuNeed(kind="T4", count=1), spot="never"))
    assert "the quota Standard NCASv3_T4 Family in eastus" in refused.value.why


def test_a_new_subscriptions_quotas_are_named_before_money_is_spent(azure: AzureBed) -> None:
    azure.cloud.change(
        quotas=tuple(FamilyQuota(name=one, limit=0) for one in ("cores", "lowPriorityCores"))
    )
    failed = {one.name: one for one in azure.provider().check(GPU) if not one.ok}
    assert set(failed) == {"offers"}
    assert "the quota lowPriorityCores in eastus" in failed["offers"].detail


def test_room_for_a_class_is_the_smallest_quota(azure: AzureBed) -> None:
    azure.cloud.change(quotas=(FamilyQuota(name="cores", limit=20),))
    provider = azure.provider()
    need = Need(gpu=GpuNeed(kind="T4", count=1), spot="never")
    room = provider.compute_room(provider.offers(need)[0])
    assert (room.most, room.code, room.units) == (5, "cores", "vCPUs")


def test_prices_need_no_account(azure: AzureBed) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IDENTITY_ENDPOINT", "IDENTITY_HEADER", "AZURE_SUBSCRIPTION_ID"):
            patch.delenv(name)
        patch.setenv("AZURE_CONFIG_DIR", str(azure.directory))
        provider = azure.provider()
        assert not provider.has_credentials
        offers = provider.offers(GPU)
        with pytest.raises(CredentialsError, match="no Azure subscription"):
            provider.get_account()
    assert {offer.region for offer in offers} == {"eastus", "westeurope"}
    cheapest = offers[0]
    assert (cheapest.type, cheapest.spot) == ("Standard_NC4as_T4_v3", True)
    assert cheapest.price_usd_per_hour == pytest.approx(0.526 * 0.25)
    assert cheapest.on_demand_usd_per_hour == pytest.approx(0.526), "neither Windows' nor another"


def test_throttling_is_waited_for_where_nothing_changes_and_reported_otherwise(
    azure: AzureBed,
) -> None:
    provider = azure.provider()
    offer, request = provider.offers(GPU)[0], azure.request(provider)
    azure.cloud.change(throttle=(Throttle(action="VirtualMachines_Get", rate=1.0),))
    server = provider.create(offer, request)
    assert provider.find(server.id) is not None
    azure.cloud.change(throttle=(Throttle(action="VirtualMachines_CreateOrUpdate", burst=0),))
    with pytest.raises(ThrottledError) as refused:
        provider.create(offer, azure.request(provider))
    assert refused.value.hint.endswith("in 2 s")


def test_a_missing_permission_is_named(azure: AzureBed) -> None:
    provider = azure.provider()
    offer = provider.offers(GPU)[0]
    azure.cloud.change(denied=("VirtualMachines_CreateOrUpdate",))
    with pytest.raises(DeniedError, match=r"Microsoft\.Compute/virtualMachines/write") as refused:
        provider.create(offer, azure.request(provider))
    assert "labctl docs azure" in refused.value.hint
    assert ADDRESSES not in list_created(azure)


def test_doctor_names_what_the_role_lacks(azure: AzureBed) -> None:
    azure.up(azure.provider())
    vm = "Microsoft.Compute/virtualMachines"
    azure.cloud.change(lacking=(f"{vm}/write", f"{vm}/deallocate/action"))
    checks = {one.name: one for one in azure.provider().check(GPU)}
    assert not checks[f"permission {vm}/write"].ok
    stop = checks[f"permission {vm}/deallocate/action"]
    assert (stop.ok, stop.warning, stop.detail) == (True, True, "missing; needed for labctl stop")


def test_a_subscription_without_credit_is_named(azure: AzureBed) -> None:
    provider = azure.provider()
    offer = provider.offers(GPU)[0]
    azure.cloud.change(balance_usd=0.0)
    with pytest.raises(DeniedError, match="its credit is used up"):
        provider.create(offer, azure.request(provider))
    [only] = azure.provider().check(GPU)
    assert not only.ok
    assert "is Disabled" in only.detail


def test_credentials_that_expire_midway(azure: AzureBed) -> None:
    provider = azure.provider()
    server = azure.up(provider)
    azure.cloud.change(expired=True)
    for call in (lambda: provider.find(server.id), lambda: provider.terminate(server.id)):
        with pytest.raises(CredentialsError, match="expired") as refused:
            call()
        assert refused.value.hint == "az login"
    with pytest.raises(CredentialsError):
        azure.provider().servers()
    azure.cloud.change(expired=False)
    provider.terminate(server.id)


def test_a_machine_whose_operation_cannot_be_read_is_not_refused(azure: AzureBed) -> None:
    """A DeniedError would say that none was created, and another offer would be tried."""
    provider = azure.provider()
    offer, request = provider.offers(GPU)[0], azure.request(provider)
    azure.up(provider)
    azure.cloud.change(denied=("Operations_Get",))
    with pytest.raises(BusyError):
        provider.create(offer, request)
    azure.cloud.change(denied=())
    server = create_patiently(provider, offer, request)
    assert server.id in {one.id for one in provider.servers()}


def test_another_subscription_is_another_account(azure: AzureBed) -> None:
    provider = azure.provider()
    server = azure.up(provider)
    assert server.account == provider.get_account().id == azure.cloud.scenario.subscription
    other = azure.provider(subscription="11111111-1111-2222-3333-444444444444")
    assert other.get_account().id == "11111111-1111-2222-3333-444444444444"
    with pytest.raises(DeniedError, match="do not reach the subscription"):
        other.find(server.id)


def test_tags_alone_show_everything_and_its_price(azure: AzureBed) -> None:
    """As `orphans` does, after the local state was deleted."""
    server = azure.up(azure.provider())
    [found] = azure.provider(owner="grace").servers()
    assert (found.lab, found.lab_id, found.offer) == (server.lab, server.lab_id, server.offer)
    assert found.endpoint.host_key == HOST_KEY
    parts = {one.kind: one for one in azure.provider().leftovers()}
    assert set(parts) == set(EACH)
    assert {one.server_id for one in parts.values()} == {server.id}
    assert parts["disk"].price_usd_per_month == pytest.approx(9.60)
    assert parts["public-ip"].price_usd_per_month == pytest.approx(3.65)


def test_a_damaged_record_leaves_a_server_that_can_be_ended(azure: AzureBed) -> None:
    provider = azure.provider()
    server = azure.up(provider)
    machine = azure.cloud.find_instance(server.id)
    tags = {name: text for name, text in machine.body.tags.items() if "record" not in name}
    azure.cloud.account.set_tags(machine, tags)
    [found] = provider.servers()
    assert (found.id, found.lab, found.lab_id) == (server.id, "digits", server.lab_id)
    provider.terminate(found.id)
    wait_for(lambda: not provider.servers())


def test_of_two_writers_none_loses_a_tag(azure: AzureBed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody adds a tag, and another computer pins keys, while this one sets the timer."""
    provider = azure.provider()
    server = azure.up(provider)
    machine = azure.cloud.find_instance(server.id)
    count = azure_tags.count_record_tags(machine.body.tags)
    read, next_key = azure_tags.parse_timer, HOST_KEY.replace("Host", "Next")

    def write_meanwhile(shown: dict[str, str]) -> AzureTimer | None:
        azure.cloud.account.set_tags(machine, {**machine.body.tags, "team": "vision"})
        monkeypatch.setattr(azure_tags, "parse_timer", read)
        azure.provider(owner="grace").pin(server.id, HOST_KEY, next_key)
        return read(shown)

    monkeypatch.setattr(azure_tags, "parse_timer", write_meanwhile)
    at = round(time.time() + 7200)
    provider.set_deadline(server.id, at)
    found = provider.find(server.id)
    assert found is not None
    keys = (found.endpoint.host_key, found.endpoint.next_host_key)
    assert (keys, found.deadline_at) == ((HOST_KEY, next_key), at)
    assert machine.body.tags["team"] == "vision"
    provider.pin(server.id, next_key, "")
    found = provider.find(server.id)
    assert found is not None
    assert (found.endpoint.host_key, found.endpoint.next_host_key) == (next_key, "")
    assert azure_tags.count_record_tags(machine.body.tags) == count, (
        "a shorter record leaves no rest"
    )
    if azure.cloud.has_description:
        assert azure.cloud.violations == []


def test_what_a_server_leaves_costs_nothing_and_can_be_removed(azure: AzureBed) -> None:
    provider = azure.provider()
    server = azure.up(provider)
    provider.terminate(server.id)
    wait_for(lambda: provider.find(server.id) is None)
    left = provider.leftovers()
    assert {one.kind for one in left} == {"virtual-network", "security-group"}
    assert {(one.price_usd_per_month, one.server_id) for one in left} == {(0.0, "")}
    for resource in left:
        provider.remove(resource)
    assert provider.leftovers() == []


def test_azures_timer_deallocates_a_machine_that_hangs(azure: AzureBed) -> None:
    provider = azure.provider()
    assert provider.missing_deadline_setup == ""
    server = azure.up(provider)
    at = time.time() + 7200
    provider.set_deadline(server.id, at)
    assert (found := provider.find(server.id)) is not None
    assert found.deadline_at == float(round(at))
    azure.cloud.change(timer=0.3)
    provider.set_deadline(server.id, at + 60)
    assert len(azure.cloud.account.timers) == 1, "the earlier timer was canceled"
    wait_for(lambda: azure.cloud.instances[server.id] == "stopped")
    assert (found := provider.find(server.id)) is not None
    assert found.state == "stopped"


def test_without_the_resource_provider_doctor_says_how_to_have_timers(azure: AzureBed) -> None:
    azure.cloud.change(registered=False)
    provider = azure.provider()
    command = "az provider register --namespace Microsoft.ComputeSchedule"
    assert command in provider.missing_deadline_setup
    timer = next(one for one in provider.check(GPU) if one.name == "timer")
    assert (timer.ok, timer.warning) == (True, True)
    server = azure.up(provider)
    with pytest.raises(DeniedError, match=r"has not registered Microsoft\.ComputeSchedule"):
        provider.set_deadline(server.id, time.time() + 60)


def test_a_machine_that_is_off_is_billed_until_it_is_deallocated(azure: AzureBed) -> None:
    provider = azure.provider()
    server = azure.up(provider)
    wait_for(lambda: azure.cloud.instances[server.id] == "running")
    azure.cloud.fleet.stop(azure.cloud.find_instance(server.id), "power-off")
    wait_for(lambda: azure.cloud.instances[server.id] == "stopped")
    assert (found := provider.find(server.id)) is not None
    assert found.state == "running", "to labctl, a stopped server costs its disk alone"
    provider.stop(server.id)
    assert (found := provider.find(server.id)) is not None
    assert found.state == "stopped"
    provider.start(server.id)
    wait_for(lambda: (found := provider.find(server.id)) and found.state == "running")


def test_an_evicted_machine_is_gone_with_its_disk(azure: AzureBed) -> None:
    provider = azure.provider()
    server = azure.up(provider)
    body = azure.cloud.find_instance(server.id).body.properties
    assert (body["priority"], body["evictionPolicy"]) == ("Spot", "Delete")
    assert body["billingProfile"] == {"maxPrice": -1.0}
    azure.cloud.reclaim(server.id, 0)
    wait_for(lambda: provider.find(server.id) is None)
    wait_for(lambda: "disk" not in count_kinds(azure))


def test_a_price_limit_is_the_highest_price_of_a_spot_machine(azure: AzureBed) -> None:
    need = Need(gpu=GPU.gpu, max_price_usd_per_hour=0.3)
    server = azure.up(azure.provider(), need)
    body = azure.cloud.find_instance(server.id).body.properties
    assert body["billingProfile"] == {"maxPrice": 0.3}


def test_only_the_caller_reaches_ssh(azure: AzureBed) -> None:
    azure.cloud.change(address="192.0.2.7")
    provider = azure.provider()
    server = azure.up(provider)
    machine, account = azure.cloud.find_instance(server.id), azure.cloud.account
    other = azure.up(provider)
    assert other.id != server.id
    ssh = "--protocol tcp --dport 22 --source"
    assert account.build_rules(machine) == (f"{ssh} 192.0.2.7/32",)
    azure.cloud.change(address="192.0.2.9")
    assert provider.admit(server.id) == "192.0.2.9/32"
    assert provider.admit(server.id) == ""
    assert account.build_rules(machine) == (f"{ssh} 192.0.2.9/32",)
    azure.cloud.change(address="192.0.2.20")
    assert azure.provider(owner="keeper").admit(server.id) == "192.0.2.20/32"
    assert len(account.build_rules(machine)) == 2


def test_the_servers_of_a_gang_reach_one_another(azure: AzureBed) -> None:
    provider = azure.provider()
    offer = provider.offers(GPU)[0]
    group = {"group": "0123456789ab", "group_name": "team"}
    loners = [provider.create(offer, azure.request(provider, **group)) for _ in range(2)]
    one, two = (azure.cloud.find_instance(server.id) for server in loners)
    wait_for(lambda: one.address and two.address)
    assert f"--source {two.address}/32" not in azure.cloud.account.build_rules(one)
    gang = {**group, "gang": "0123456789ab"}
    provider.create(offer, azure.request(provider, **gang))
    assert f"--source {two.address}/32" in azure.cloud.account.build_rules(one)


def test_a_security_group_in_use_stays(azure: AzureBed) -> None:
    provider = azure.provider()
    azure.up(provider)
    group = next(one for one in provider.leftovers() if one.kind == "security-group")
    with pytest.raises(ProviderError):
        provider.remove(group)
    assert NSGS in list_created(azure)


def test_both_host_keys_are_pinned_in_one_call(azure: AzureBed) -> None:
    provider = azure.provider()
    server = azure.up(provider)
    provider.set_deadline(server.id, time.time() + 7200)
    provider.pin(server.id, HOST_KEY, "ssh-ed25519 NEXT")
    pinned = provider.find(server.id)
    assert pinned is not None
    assert pinned.endpoint.next_host_key == "ssh-ed25519 NEXT"
    assert pinned.deadline_at is not None
    provider.pin(server.id, "ssh-ed25519 NEXT")
    settled = provider.find(server.id)
    assert settled is not None
    assert (settled.endpoint.host_key, settled.endpoint.next_host_key) == ("ssh-ed25519 NEXT", "")


def test_a_slow_operation_leaves_the_server_starting(azure: AzureBed) -> None:
    azure.cloud.change(operation=0.3)
    provider = azure.provider()
    server = azure.up(provider)
    assert azure.cloud.calls["Operations_Get"] > 3
    assert server.state in ("starting", "running")


def test_azures_own_failure_is_repeated_by_the_caller(azure: AzureBed) -> None:
    provider = azure.provider()
    offer, request = provider.offers(GPU)[0], azure.request(provider)
    azure.cloud.change(failed=(CallFailure(action="NetworkInterfaces_CreateOrUpdate", status=503),))
    with pytest.raises(BusyError):
        provider.create(offer, request)
    assert provider.create(offer, request).id
    assert count_kinds(azure) == EACH


def test_no_quota_for_addresses_is_an_error_of_its_own() -> None:
    fault = ArmFault(400, ArmErrorBody(code="PublicIPCountLimitReached", message="10 of 10"))
    error = translate_fault(fault, "Microsoft.Network/publicIPAddresses/write")
    assert isinstance(error, QuotaError)
