"""What is left of servers: listed with its price, kept on purpose, or taken away."""

from __future__ import annotations

import time
from pathlib import Path

import boto3
import msgspec
import pytest
from aws_cloud import REGION, Cloud
from aws_provider import ZONE, a_request, a_server, an_image, an_offer, provider, with_market

from labctl.config.member_ids import make_member_id
from labctl.errors import BusyError, NotFoundError, ProviderError
from labctl.model import Resource, Server
from labctl.providers.aws import AwsProvider

DAY_S = 86_400.0


@pytest.fixture
def aws(cloud: Cloud, tmp_path: Path) -> AwsProvider:
    with_market(cloud)
    return provider(tmp_path)


@pytest.fixture
def server(aws: AwsProvider, tmp_path: Path) -> Server:
    return a_server(aws, tmp_path)


def by_kind(aws: AwsProvider) -> dict[str, Resource]:
    return {resource.kind: resource for resource in aws.leftovers()}


def test_what_a_living_server_uses_names_it(aws: AwsProvider, server: Server) -> None:
    aws.set_deadline(server.id, time.time() + 3600)
    found = by_kind(aws)
    assert set(found) >= {"volume", "security-group", "key-pair", "schedule"}
    assert {resource.server_id for resource in found.values()} == {server.id}
    assert {resource.lab_id for resource in found.values()} == {server.lab_id}
    assert {resource.region for resource in found.values()} == {REGION}


def test_what_several_servers_share_belongs_to_each_of_them(
    aws: AwsProvider, tmp_path: Path
) -> None:
    request = a_request(aws, tmp_path)
    second = msgspec.structs.replace(
        request,
        lab_id=make_member_id(request.lab_id, 1),
        group=request.lab_id,
        gang=request.lab_id,
    )
    server = aws.create(an_offer(), second)
    found = by_kind(aws)
    for kind in ("security-group", "key-pair"):
        assert (found[kind].lab_id, found[kind].server_id) == (request.lab_id, server.id)
    aws.terminate(server.id)
    assert {resource.server_id for resource in aws.leftovers()} == {""}


def test_terminated_server_leaves_what_can_all_be_removed(aws: AwsProvider, server: Server) -> None:
    aws.set_deadline(server.id, time.time() + 3600)
    aws.terminate(server.id)
    left = aws.leftovers()
    assert {resource.kind for resource in left} == {"security-group", "key-pair", "schedule"}
    assert {resource.server_id for resource in left} == {""}
    for resource in left:
        aws.remove(resource)
    assert aws.leftovers() == []
    for resource in left:
        aws.remove(resource)


def test_kept_disk_outlives_its_server_and_says_what_it_costs(
    aws: AwsProvider, server: Server
) -> None:
    until = time.time() + 14 * DAY_S
    [disk] = aws.keep_disk(server.id, until)
    assert disk.kind == "volume"
    assert disk.server_id == server.id
    assert disk.price_usd_per_month == pytest.approx(94 * 0.08, abs=0.01)
    assert disk.expires_at == pytest.approx(until, abs=1)
    aws.terminate(server.id)
    left = by_kind(aws)["volume"]
    assert left.id == disk.id
    assert left.server_id == ""
    assert left.expires_at == disk.expires_at
    assert left.lab == "digits"
    aws.remove(left)
    assert "volume" not in by_kind(aws)


def test_a_living_servers_own_disk_is_a_part_of_it_until_the_server_ends(
    aws: AwsProvider, server: Server
) -> None:
    aws.keep_disk(server.id, time.time() + DAY_S)
    living = by_kind(aws)["volume"]
    assert (living.server_id, living.expires_at) == (server.id, None)
    later = time.time() + 2 * DAY_S
    aws.keep_disk(server.id, later)
    aws.terminate(server.id)
    assert by_kind(aws)["volume"].expires_at == pytest.approx(later, abs=1)


def test_a_released_disk_ends_with_its_server(aws: AwsProvider, server: Server) -> None:
    aws.keep_disk(server.id, time.time() + DAY_S)
    aws.release_disk(server.id)
    aws.terminate(server.id)
    assert "volume" not in by_kind(aws)
    aws.release_disk(server.id)
    aws.release_disk(f"i-0123456789abcdef0.{REGION}")


def test_a_release_spares_the_disk_of_an_earlier_server(
    aws: AwsProvider, server: Server, tmp_path: Path
) -> None:
    [disk] = aws.keep_disk(server.id, time.time() + DAY_S)
    aws.terminate(server.id)
    other = a_server(aws, tmp_path)
    aws.attach_kept_disk(disk, other.id)
    [own] = aws.keep_disk(other.id, time.time() + DAY_S)
    assert own.id != disk.id
    aws.release_disk(other.id)
    [held] = [one for one in aws.leftovers() if one.id == disk.id]
    assert (held.server_id, held.expires_at) == (other.id, disk.expires_at)
    aws.terminate(other.id)
    assert [one.id for one in aws.leftovers() if one.kind == "volume"] == [disk.id]


def test_kept_disk_is_given_to_another_server(
    aws: AwsProvider, server: Server, tmp_path: Path
) -> None:
    [disk] = aws.keep_disk(server.id, time.time() + DAY_S)
    aws.terminate(server.id)
    other = a_server(aws, tmp_path)
    path = aws.attach_kept_disk(disk, other.id)
    serial = disk.id.partition(".")[0].replace("-", "")
    assert path == f"/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_{serial}"
    assert aws.attach_kept_disk(disk, other.id) == path
    held = [one for one in aws.leftovers() if one.id == disk.id]
    assert [one.server_id for one in held] == [other.id]
    with pytest.raises(BusyError):
        aws.remove(held[0])


def test_kept_disk_cannot_go_to_another_zone(
    aws: AwsProvider, server: Server, tmp_path: Path
) -> None:
    [disk] = aws.keep_disk(server.id, time.time() + DAY_S)
    aws.terminate(server.id)
    other = aws.create(an_offer(zone=f"{REGION}b"), a_request(aws, tmp_path))
    with pytest.raises(ProviderError) as raised:
        aws.attach_kept_disk(disk, other.id)
    assert ZONE in raised.value.why


def test_disk_that_is_gone_is_told(aws: AwsProvider, server: Server) -> None:
    gone = Resource(provider="aws", kind="volume", id=f"vol-0123456789abcdef0.{REGION}")
    with pytest.raises(ProviderError) as raised:
        aws.attach_kept_disk(gone, server.id)
    assert "gone" in raised.value.what


def test_group_in_use_is_for_later(aws: AwsProvider, server: Server, cloud: Cloud) -> None:
    group = by_kind(aws)["security-group"]
    cloud.refuse("DeleteSecurityGroup", "DependencyViolation")
    with pytest.raises(BusyError):
        aws.remove(group)


def test_strangers_things_are_not_listed(aws: AwsProvider, cloud: Cloud) -> None:
    ec2 = boto3.client("ec2", region_name=REGION)
    ec2.create_volume(AvailabilityZone=ZONE, Size=8)
    ec2.create_key_pair(KeyName="theirs")
    ec2.run_instances(ImageId=an_image(cloud), MinCount=1, MaxCount=1)
    ec2.close()
    assert aws.leftovers() == []


def test_addresses_and_snapshots_with_our_tag_are_listed_with_their_price(
    aws: AwsProvider, server: Server
) -> None:
    ec2 = boto3.client("ec2", region_name=REGION)
    ours = [{"Key": "labctl", "Value": "1"}, {"Key": "labctl:lab-id", "Value": "abc"}]
    volume = ec2.create_volume(AvailabilityZone=ZONE, Size=20)["VolumeId"]
    ec2.create_snapshot(
        VolumeId=volume, TagSpecifications=[{"ResourceType": "snapshot", "Tags": ours}]
    )
    address = ec2.allocate_address(Domain="vpc")["AllocationId"]
    ec2.create_tags(Resources=[address], Tags=ours)
    ec2.close()
    found = by_kind(aws)
    assert found["snapshot"].price_usd_per_month == 1.0
    assert found["address"].price_usd_per_month == 3.65
    assert found["address"].lab_id == "abc"
    for kind in ("snapshot", "address"):
        aws.remove(found[kind])
        assert kind not in by_kind(aws)


def test_who_may_not_list_schedules_has_made_none(
    aws: AwsProvider, server: Server, cloud: Cloud
) -> None:
    cloud.reply("/schedules", {"__type": "AccessDeniedException", "message": "no"})
    assert "schedule" not in by_kind(aws)


def test_nothing_can_be_kept_of_what_is_not_there(aws: AwsProvider) -> None:
    with pytest.raises(NotFoundError):
        aws.keep_disk(f"i-0123456789abcdef0.{REGION}", time.time())
