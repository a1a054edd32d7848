"""Quotas asked for a class, and a machine image made of a server, at a cloud over real HTTP."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from aws_cloud import REGION, Cloud
from aws_provider import a_request, a_server, an_offer, provider, with_market

import labctl.rehearsal.aws.amis  # noqa: F401  moto learns to tag snapshots of images
from labctl.errors import NotFoundError, UsageError
from labctl.model import GIB, Resource, Server
from labctl.providers import Bake, QuotaSource
from labctl.providers.aws import AwsProvider, AwsSettings
from labctl.providers.aws.baking import estimate_usd_per_month

EXPIRES = str(int(time.time()) + 86_400)
TAGS = {"labctl:lab": "ml-1", "labctl:lab-id": "0123456789abcdef", "labctl:expires": EXPIRES}


@pytest.fixture
def aws(cloud: Cloud, tmp_path: Path) -> AwsProvider:
    with_market(cloud)
    return provider(tmp_path)


@pytest.fixture
def server(aws: AwsProvider, tmp_path: Path) -> Server:
    return a_server(aws, tmp_path)


def made(aws: AwsProvider) -> list[Resource]:
    return [one for one in aws.leftovers() if one.kind in ("image", "snapshot")]


def test_it_says_that_it_can(aws: AwsProvider) -> None:
    assert isinstance(aws, QuotaSource)
    assert isinstance(aws, Bake)


def test_a_quota_is_told_in_machines_with_the_page_that_raises_it(aws: AwsProvider) -> None:
    room = aws.compute_room(an_offer(spot=True))
    assert room.limit is not None
    assert room.most == room.limit // 4
    assert (room.units, room.each) == ("vCPUs", 4.0)
    assert room.code in room.next
    assert REGION in room.quota


def test_an_image_bears_our_tags_and_its_price(aws: AwsProvider, server: Server) -> None:
    image_id = aws.bake(server.id, "ml-1", TAGS)
    assert image_id.endswith(f".{REGION}")
    assert aws.get_image_state(image_id) == "ready"
    found = {one.kind: one for one in made(aws)}
    assert found["image"].id == image_id
    assert found["snapshot"].price_usd_per_month > 0
    assert {one.lab for one in found.values()} == {"ml-1"}
    assert {one.lab_id for one in found.values()} == {TAGS["labctl:lab-id"]}
    assert {one.expires_at for one in found.values()} == {float(EXPIRES)}


def test_servers_boot_from_it_in_its_own_region(
    aws: AwsProvider, server: Server, tmp_path: Path, cloud: Cloud
) -> None:
    image_id = aws.bake(server.id, "ml-1", TAGS)
    settings = aws.with_image(aws.settings, image_id)
    assert settings.regions == (REGION,)
    baked = provider(tmp_path / "second", settings)
    (tmp_path / "second").mkdir()
    born = baked.create(an_offer(), a_request(baked, tmp_path / "second", lab="ml-0a1b2c3d"))
    described = baked.clients.get_ec2(REGION).describe_instances(
        InstanceIds=[born.id.partition(".")[0]]
    )
    instance = described["Reservations"][0]["Instances"][0]
    assert instance["ImageId"] == image_id.partition(".")[0]


def test_both_can_be_removed_and_removed_again(aws: AwsProvider, server: Server) -> None:
    aws.bake(server.id, "ml-1", TAGS)
    found = sorted(made(aws), key=lambda one: one.kind)
    for _ in range(2):
        for one in found:
            aws.remove(one)
    assert made(aws) == []


def test_an_image_of_elsewhere_is_refused() -> None:
    settings = AwsSettings(regions=("eu-central-1",))
    with pytest.raises(UsageError, match="us-east-1"):
        AwsProvider.with_image(settings, "ami-0123456789abcdef0.us-east-1")
    with pytest.raises(NotFoundError):
        AwsProvider.with_image(settings, "ami-0123456789abcdef0")


def test_no_image_is_made_of_a_server_that_is_gone(aws: AwsProvider) -> None:
    with pytest.raises(NotFoundError):
        aws.bake(f"i-0123456789abcdef0.{REGION}", "ml-1", TAGS)


def test_the_price_of_an_image_is_that_of_a_snapshot_of_the_whole_disk() -> None:
    assert estimate_usd_per_month(AwsSettings(disk_bytes=100 * GIB)) == 5.0
    assert estimate_usd_per_month(AwsSettings(disk_bytes=100 * GIB + 1)) == 5.05
