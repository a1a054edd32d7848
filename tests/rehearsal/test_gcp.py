"""The GCP provider on a rehearsed Compute Engine: what goes wrong, and what it costs afterwards.

Google's own SDK makes the calls, and each request and reply is checked against Google's description
of its API.
"""

from __future__ import annotations

import time

import pytest
from gcp_bed import GPU, HOST_KEY, Google, create_patiently, gcp_cloud, google, wait_for

from labctl.errors import (
    BusyError,
    CapacityError,
    CredentialsError,
    DeniedError,
    NoOfferError,
    QuotaError,
    ThrottledError,
    UsageError,
)
from labctl.model import GpuNeed, Need
from labctl.rehearsal.core.scenario import CloudCapacity, Loss, Throttle
from labctl.rehearsal.gcp.scenario import GcpQuota

__all__ = ["gcp_cloud", "google"]

MUTATIONS = ("firewalls.insert", "instances.insert")


def test_calls_are_checked_against_googles_description(google: Google) -> None:
    if not google.cloud.has_description:
        pytest.skip("google-api-python-client is not installed: no request is checked")
    google.up(google.provider())
    assert google.cloud.violations == []


@pytest.mark.parametrize("kind", ["lost", "dropped"])
@pytest.mark.parametrize("action", MUTATIONS)
def test_a_lost_call_of_create_leaves_one_machine(google: Google, action: str, kind: str) -> None:
    provider = google.provider()
    offer, request = provider.offers(GPU)[0], google.request(provider)
    google.cloud.change(**{kind: (Loss(action=action, count=2),)})
    server = create_patiently(provider, offer, request)
    assert [one.id for one in provider.servers()] == [server.id]
    assert len(google.cloud.fleet.list_shown()) == 1
    rules = [one.id for one in provider.leftovers() if one.kind == "firewall-rule"]
    assert len(set(rules)) == 2


def test_a_repeated_request_finds_its_machine_even_when_google_forgot_the_request(
    google: Google,
) -> None:
    provider = google.provider()
    offer, request = provider.offers(GPU)[0], google.request(provider)
    server = provider.create(offer, request)
    google.cloud.project.by_request.clear()
    assert google.provider().create(offer, request).id == server.id


def test_the_machine_of_an_ended_attempt_is_not_created_again(google: Google) -> None:
    provider = google.provider()
    offer, request = provider.offers(GPU)[0], google.request(provider)
    server = provider.create(offer, request)
    provider.terminate(server.id)
    wait_for(lambda: provider.find(server.id) is None)
    with pytest.raises(CapacityError, match="already ended"):
        provider.create(offer, request)


def test_without_room_the_next_offer_is_tried(google: Google) -> None:
    provider = google.provider()
    first, *_ = offers = provider.offers(GPU)
    google.cloud.change(capacity=(CloudCapacity(region=first.zone),))
    with pytest.raises(CapacityError) as refused:
        provider.create(first, google.request(provider))
    assert refused.value.what == f"Google has no room for {first.type} (spot) in {first.zone} now"
    assert "ZONE_RESOURCE_POOL_EXHAUSTED" in refused.value.why
    elsewhere = next(offer for offer in offers if offer.zone != first.zone)
    provider.create(elsewhere, google.request(provider))
    assert len(provider.servers()) == 1


def test_what_no_quota_allows_is_not_offered(google: Google) -> None:
    limits = ("NVIDIA_T4_GPUS", "PREEMPTIBLE_NVIDIA_T4_GPUS")
    quotas = tuple(GcpQuota(metric=name, limit=0, region="us-central1") for name in limits)
    google.cloud.change(quotas=quotas)
    provider = google.provider()
    assert {offer.gpu_name for offer in provider.offers(GPU)} == {"L4", "A100"}
    with pytest.raises(NoOfferError) as refused:
        provider.offers(Need(gpu=GpuNeed(kind="T4", count=1)))
    assert "the quota NVIDIA_T4_GPUS in us-central1 rules out" in refused.value.why


def test_a_new_projects_quota_is_named_before_money_is_spent(google: Google) -> None:
    google.cloud.change(quotas=(GcpQuota(metric="GPUS_ALL_REGIONS", limit=0),))
    failed = {one.name: one for one in google.provider().check(GPU) if not one.ok}
    assert set(failed) == {"offers"}
    assert "the quota GPUS_ALL_REGIONS rules out" in failed["offers"].detail


def test_a_quota_of_one_region_leads_to_the_next_offer_and_one_of_all_does_not(
    google: Google,
) -> None:
    provider = google.provider()
    first = provider.offers(GPU)[0]
    quota = GcpQuota(metric="PREEMPTIBLE_NVIDIA_T4_GPUS", limit=1, region="us-central1")
    google.cloud.change(quotas=(quota,))
    provider.create(first, google.request(provider))
    with pytest.raises(CapacityError, match="PREEMPTIBLE-NVIDIA-T4-GPUS"):
        provider.create(first, google.request(provider))
    google.cloud.change(quotas=(GcpQuota(metric="GPUS_ALL_REGIONS", limit=1),))
    with pytest.raises(QuotaError, match="GPUS-ALL-REGIONS") as refused:
        provider.create(first, google.request(provider))
    assert "console.cloud.google.com/iam-admin/quotas" in refused.value.hint


def test_room_for_a_class_is_the_smallest_quota(google: Google) -> None:
    google.cloud.change(quotas=(GcpQuota(metric="GPUS_ALL_REGIONS", limit=4),))
    provider = google.provider()
    room = provider.compute_room(provider.offers(GPU)[0])
    assert (room.most, room.code, room.units) == (4, "GPUS_ALL_REGIONS", "GPUs")


def test_throttling_is_repeated_by_the_caller(google: Google) -> None:
    provider = google.provider()
    offer, request = provider.offers(GPU)[0], google.request(provider)
    google.cloud.change(throttle=(Throttle(action="instances.insert", rate=0.001),))
    provider.create(offer, request)
    with pytest.raises(ThrottledError):
        provider.create(offer, google.request(provider))


def test_a_missing_permission_is_named(google: Google) -> None:
    provider = google.provider()
    offer = provider.offers(GPU)[0]
    google.cloud.change(denied=("instances.insert",))
    with pytest.raises(DeniedError, match=r"compute\.instances\.create") as refused:
        provider.create(offer, google.request(provider))
    assert "labctl docs gcp" in refused.value.hint


def test_doctor_names_what_the_role_lacks(google: Google) -> None:
    google.cloud.change(lacking=("compute.instances.create", "compute.instances.stop"))
    checks = {one.name: one for one in google.provider().check(GPU)}
    assert not checks["permission compute.instances.create"].ok
    stop = checks["permission compute.instances.stop"]
    assert (stop.ok, stop.warning, stop.detail) == (True, True, "missing; needed for labctl stop")


def test_credentials_that_expire_midway(google: Google) -> None:
    provider = google.provider()
    server = google.up(provider)
    google.cloud.change(expired=True)
    for call in (lambda: provider.find(server.id), lambda: provider.terminate(server.id)):
        with pytest.raises(CredentialsError, match="expired") as refused:
            call()
        assert refused.value.hint == "gcloud auth application-default login"
    google.cloud.change(expired=False)
    provider.terminate(server.id)


@pytest.mark.parametrize("action", ["zoneOperations.get", "instances.get"])
def test_a_machine_that_may_not_be_read_is_not_refused(google: Google, action: str) -> None:
    """A DeniedError would say that none was created, and another provider would be tried."""
    provider = google.provider()
    offer, request = provider.offers(GPU)[0], google.request(provider)
    google.cloud.change(denied=(action,))
    with pytest.raises(BusyError, match="not said whether"):
        provider.create(offer, request)
    google.cloud.change(denied=())
    server = create_patiently(provider, offer, request)
    assert [one.id for one in provider.servers()] == [server.id]


def test_another_project_is_another_account(google: Google) -> None:
    provider = google.provider()
    server = google.up(provider)
    assert server.account == provider.get_account().id == "rehearsal-project"
    other = google.provider(project="another-project")
    assert other.get_account().id == "another-project"
    with pytest.raises(DeniedError, match=r"compute\.instances\.get"):
        other.find(server.id)


def test_labels_alone_show_everything_and_its_price(google: Google) -> None:
    """As `orphans` does, after the local state was deleted."""
    server = google.up(google.provider())
    [found] = google.provider(owner="grace").servers()
    assert (found.lab, found.lab_id, found.offer) == (server.lab, server.lab_id, server.offer)
    assert found.endpoint.host_key == HOST_KEY
    parts = {one.kind: one for one in google.provider().leftovers()}
    assert set(parts) == {"disk", "firewall-rule"}
    assert parts["disk"].price_usd_per_month == pytest.approx(9.4)
    assert {one.server_id for one in google.provider().leftovers()} == {server.id}


def test_a_damaged_record_leaves_a_server_that_can_be_ended(google: Google) -> None:
    provider = google.provider()
    server = google.up(provider)
    machine = google.cloud.find_instance(server.id.partition(".")[0])
    metadata = type(machine.resource.metadata)()
    machine.resource = type(machine.resource)(
        name=machine.id,
        labels=machine.resource.labels,
        disks=machine.resource.disks,
        network_interfaces=machine.resource.network_interfaces,
        metadata=metadata,
    )
    [found] = provider.servers()
    assert (found.id, found.lab, found.lab_id) == (server.id, "digits", server.lab_id)
    provider.terminate(found.id)
    wait_for(lambda: not provider.servers())


def test_googles_timer_ends_a_machine_that_hangs(google: Google) -> None:
    provider = google.provider()
    before = time.time()
    server = google.up(provider, Need(gpu=GPU.gpu, max_ttl_s=7200))
    assert server.deadline_at == pytest.approx(before + 7200 + 600, abs=60)
    provider.terminate(server.id)
    google.cloud.change(run_limit=3.0)  # `up` has to be over by then
    server = google.up(provider)
    wait_for(lambda: provider.find(server.id) is None)
    assert [one.kind for one in provider.leftovers() if one.kind == "disk"] == []


def test_a_preempted_machine_is_explained_and_its_kept_disk_stays(google: Google) -> None:
    provider = google.provider()
    server = google.up(provider)
    assert server.offer.spot
    assert provider.explain_end(server.id) == ""
    expiry = time.time() + 86_400
    provider.keep_disk(server.id, expiry)
    google.cloud.reclaim(server.id.partition(".")[0], 0)
    wait_for(lambda: provider.find(server.id) is None)
    assert "preempted" in provider.explain_end(server.id)
    [disk] = [one for one in provider.leftovers() if one.kind == "disk"]
    assert disk.expires_at == float(round(expiry))
    again = google.up(provider)
    assert provider.attach_kept_disk(disk, again.id).startswith("/dev/disk/by-id/google-labctl-")
    with pytest.raises(BusyError):
        provider.remove(disk)


def test_a_released_disk_goes_with_its_server(google: Google) -> None:
    provider = google.provider()
    server = google.up(provider)
    provider.keep_disk(server.id, time.time() + 86_400)
    provider.release_disk(server.id)
    provider.terminate(server.id)
    wait_for(lambda: provider.find(server.id) is None)
    assert [one for one in provider.leftovers() if one.kind == "disk"] == []


def test_a_stopped_machine_costs_its_disk_alone_and_starts_again(google: Google) -> None:
    provider = google.provider()
    server = google.up(provider)
    provider.stop(server.id)
    stopped = wait_for(lambda: (found := provider.find(server.id)) and found)
    assert (stopped.state, stopped.deadline_at) == ("stopped", None)
    wait_for(lambda: google.cloud.instances[server.id.partition(".")[0]] == "stopped")
    provider.start(server.id)
    started = provider.find(server.id)
    assert started is not None
    assert started.deadline_at is not None


def test_only_the_caller_reaches_ssh_though_the_network_admits_everybody(google: Google) -> None:
    google.cloud.change(address="192.0.2.7")
    provider = google.provider()
    server = google.up(provider)
    machine = google.cloud.find_instance(server.id.partition(".")[0])
    allowed = google.cloud.project.build_rules(machine)
    assert allowed == ("--protocol tcp --dport 22 --source 192.0.2.7/32",)
    google.cloud.change(address="192.0.2.9")
    assert provider.admit(server.id) == "192.0.2.9/32"
    assert provider.admit(server.id) == ""
    allowed = google.cloud.project.build_rules(machine)
    assert allowed == ("--protocol tcp --dport 22 --source 192.0.2.9/32",)
    google.cloud.change(address="192.0.2.20")
    assert google.provider(owner="keeper").admit(server.id) == "192.0.2.20/32"
    assert len(google.cloud.project.build_rules(machine)) == 2


def test_a_rule_that_another_process_removed_is_there_again_for_the_next_server(
    google: Google,
) -> None:
    """Google creates a server without the rules of its lab, open to everybody."""
    provider = google.provider()
    offer, request = provider.offers(GPU)[0], google.request(provider)
    server = provider.create(offer, request)
    google.cloud.project.firewalls = {
        name: rule
        for name, rule in google.cloud.project.firewalls.items()
        if not name.endswith("-deny")
    }
    assert provider.admit(server.id) == ""
    assert any(name.endswith("-deny") for name in google.cloud.project.firewalls)
    for resource in provider.leftovers():
        if resource.kind == "firewall-rule":
            provider.remove(resource)
    assert set(google.cloud.project.firewalls) == {"default-allow-ssh"}
    provider.create(offer, google.request(provider, group=request.lab_id))
    assert len(google.cloud.project.firewalls) == 3


def test_the_servers_of_a_gang_reach_one_another(google: Google) -> None:
    provider = google.provider()
    offer = provider.offers(GPU)[0]
    group = {"group": "0123456789ab", "group_name": "team", "gang": "0123456789ab"}
    pair = [provider.create(offer, google.request(provider, **group)) for _ in range(2)]
    one, two = (google.cloud.find_instance(server.id.partition(".")[0]) for server in pair)
    wait_for(lambda: one.address and two.address)
    assert f"--source {two.address}/32" in google.cloud.project.build_rules(one)


def test_what_google_refuses_at_once_is_not_tried_elsewhere(google: Google) -> None:
    provider = google.provider(image="debian-cloud/family/debian-12")
    with pytest.raises(UsageError, match="Google has no image debian-cloud/family/debian-12"):
        google.up(provider)
    assert provider.leftovers() == [], "nothing is created before the image is known"


def test_both_host_keys_are_pinned_in_one_call(google: Google) -> None:
    provider = google.provider()
    server = google.up(provider)
    provider.pin(server.id, HOST_KEY, "ssh-ed25519 NEXT")
    pinned = provider.find(server.id)
    assert pinned is not None
    assert pinned.endpoint.next_host_key == "ssh-ed25519 NEXT"
    provider.pin(server.id, "ssh-ed25519 NEXT")
    settled = provider.find(server.id)
    assert settled is not None
    assert (settled.endpoint.host_key, settled.endpoint.next_host_key) == ("ssh-ed25519 NEXT", "")
