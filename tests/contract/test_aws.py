"""What is AWS's alone, on a rehearsed EC2 with machines that boot: beyond the contract."""

from __future__ import annotations

import time

import pytest
from aws_case import AwsCase
from case import wait_for
from msgspec.structs import replace

from labctl.errors import BusyError, CapacityError, DeniedError, QuotaError, ThrottledError
from labctl.model import Boot, GpuNeed, Need, Offer, Server
from labctl.providers.aws import AwsProvider, AwsSettings
from labctl.rehearsal.aws import Rehearsal
from labctl.rehearsal.aws.scenario import Capacity, Delays, VcpuQuotas
from labctl.rehearsal.core.scenario import Loss, Throttle

pytestmark = pytest.mark.engine


@pytest.fixture
def rehearsal(aws_rehearsal: Rehearsal) -> Rehearsal:
    return aws_rehearsal


@pytest.fixture
def case(aws_case: AwsCase, rehearsal: Rehearsal) -> AwsCase:
    return aws_case


@pytest.fixture(autouse=True)
def as_before(rehearsal: Rehearsal) -> object:
    before = rehearsal.scenario
    yield
    rehearsal.change(**{name: getattr(before, name) for name in before.__struct_fields__})


def spot_offer(case: AwsCase) -> Offer:
    return case.provider.offers(Need(gpu=GpuNeed(kind="any", count=1), spot="only"))[0]


def with_ttl(case: AwsCase, ttl_s: int) -> Server:
    assert isinstance(case.provider, AwsProvider)
    request = case.request()
    boot = Boot(
        lab=request.lab,
        public_key=request.public_key,
        host_key=request.host_key,
        host_private_key=(case.directory / "host_key").read_text(),
        ttl_s=ttl_s,
    )
    request = replace(request, first_boot=case.provider.build_first_boot(boot))
    return case.create(request)


def test_machine_that_nobody_reaches_ends_at_its_ttl_for_good(case: AwsCase) -> None:
    """The boothook alone does it: no login, no watchdog. Its shutdown is a termination."""
    server = with_ttl(case, 6)
    case.running(server)
    began = time.monotonic()
    case.gone(server.id)
    assert time.monotonic() - began < 180
    assert case.ours() == []


def test_machine_presents_the_pinned_host_key_and_no_other(
    case: AwsCase, rehearsal: Rehearsal
) -> None:
    server = case.running(case.create())
    case.log_in(server)
    instance_id = server.id.partition(".")[0]
    code, said = rehearsal.execute(instance_id, "cat /etc/ssh/ssh_host_*.pub")
    assert code == 0
    [line] = said.strip().splitlines()
    assert line.split()[:2] == server.endpoint.host_key.split()
    assert rehearsal.execute(instance_id, "hostname")[1].strip() == "labctl-contract"
    code, said = rehearsal.execute(instance_id, "cloud-init schema --system")
    assert code == 0, said
    assert "docker" in rehearsal.execute(instance_id, "id -nG ubuntu")[1].split()


def test_spot_server_boots_and_bears_its_price(case: AwsCase) -> None:
    offer = spot_offer(case)
    server = case.provider.create(offer, case.request())
    case.log_in(case.running(server))
    found = case.provider.find(server.id)
    assert found is not None
    assert found.offer.spot
    assert found.offer.price_usd_per_hour == offer.price_usd_per_hour


def test_spot_offers_bear_scores_history_and_the_list_price(case: AwsCase) -> None:
    offer = spot_offer(case)
    assert offer.placement_score in range(1, 11)
    assert offer.on_demand_usd_per_hour
    assert offer.price_usd_per_hour < offer.on_demand_usd_per_hour
    assert offer.week_low_usd_per_hour is not None
    assert offer.week_high_usd_per_hour is not None
    assert offer.week_low_usd_per_hour <= offer.price_usd_per_hour <= offer.week_high_usd_per_hour


def test_zone_without_capacity_is_told_after_one_call_and_the_next_one_has_some(
    case: AwsCase, rehearsal: Rehearsal
) -> None:
    first, second = case.provider.offers(case.need)[:2]
    assert first.zone != second.zone
    rehearsal.change(capacity=(Capacity(zone=first.zone),))
    before = rehearsal.calls.get("RunInstances", 0)
    with pytest.raises(CapacityError) as raised:
        case.provider.create(first, case.request())
    assert first.zone in raised.value.what
    assert rehearsal.calls["RunInstances"] == before + 1
    assert case.provider.create(second, case.request()).offer.zone == second.zone


def test_lost_reply_and_the_same_request_again_make_one_server(
    case: AwsCase, rehearsal: Rehearsal
) -> None:
    rehearsal.change(lost=(Loss(action="RunInstances", count=1),))
    request = case.request()
    with pytest.raises(BusyError):
        case.create(request)
    again = case.create(request)
    assert [server.id for server in case.ours()] == [again.id]


def test_token_of_an_ended_server_is_no_server(case: AwsCase) -> None:
    request = case.request()
    server = case.create(request)
    case.provider.terminate(server.id)
    case.gone(server.id)
    with pytest.raises(CapacityError):
        case.create(request)


@pytest.mark.long
def test_server_that_is_not_shown_yet_is_found_later(case: AwsCase, rehearsal: Rehearsal) -> None:
    rehearsal.change(delays=Delays(visible=2.0))
    server = case.create()
    assert case.provider.find(server.id) is None
    assert wait_for(lambda: case.provider.find(server.id))


def test_quota_throttle_and_denial_are_told_apart(case: AwsCase, rehearsal: Rehearsal) -> None:
    offer = case.provider.offers(case.need)[0]
    rehearsal.change(quotas=VcpuQuotas(g=0))
    with pytest.raises(QuotaError) as quota:
        case.provider.create(offer, case.request())
    assert "L-DB2E81BA" in quota.value.hint
    rehearsal.change(quotas=VcpuQuotas(), denied=("RunInstances",))
    with pytest.raises(DeniedError):
        case.provider.create(offer, case.request())
    rehearsal.change(denied=(), throttle=(Throttle(action="RunInstances", rate=0.001, burst=0),))
    with pytest.raises(ThrottledError):
        case.provider.create(offer, case.request())
    assert case.ours() == []


@pytest.mark.long
def test_deadline_at_aws_ends_a_machine_that_hangs(case: AwsCase) -> None:
    assert isinstance(case.provider, AwsProvider)
    role = "arn:aws:iam::123456789012:role/labctl-deadline"
    settings: AwsSettings = replace(case.provider.settings, scheduler_role=role)
    aws = AwsProvider(settings, case.provider.context)
    server = case.create()
    aws.set_deadline(server.id, time.time() + 3600)
    aws.set_deadline(server.id, time.time() + 2)
    case.gone(server.id)


@pytest.mark.long
def test_removal_of_a_group_in_use_is_for_later_and_then_succeeds(case: AwsCase) -> None:
    server = case.create()
    [group] = [
        one
        for one in case.provider.leftovers()
        if one.kind == "security-group" and one.lab_id == server.lab_id
    ]
    assert group.server_id == server.id
    with pytest.raises(BusyError):
        case.provider.remove(group)
    case.provider.terminate(server.id)
    case.gone(server.id)
    case.provider.remove(group)
    left = [one for one in case.provider.leftovers() if one.lab_id == server.lab_id]
    assert {one.kind for one in left} == {"key-pair"}
