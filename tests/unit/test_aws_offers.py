"""Offers as they are asked for: once, and then from a cache that may be anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from aws_cloud import REGION, Cloud
from aws_provider import NEED, context, provider, with_market

from labctl.errors import CredentialsError, DeniedError, NoOfferError
from labctl.model import GpuNeed, Need
from labctl.providers.aws import AwsProvider, AwsSettings

WARM = """
import json, sys, time
from pathlib import Path
from labctl.model import GpuNeed, Need
from labctl.providers import ProviderContext
from labctl.providers.aws import AwsProvider, AwsSettings
around = ProviderContext(data_dir=Path("/"), owner="", connect=None, settle_host_key=None,
                      progress=None, cache_dir=Path(sys.argv[1]))
found = AwsProvider(AwsSettings(), around).offers(Need(gpu=GpuNeed(kind="any", count=1)))
print(json.dumps([len(found), sorted({name.partition(".")[0] for name in sys.modules})]))
"""


@pytest.fixture
def aws(cloud: Cloud, tmp_path: Path) -> AwsProvider:
    with_market(cloud)
    return provider(tmp_path)


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "aws").iterdir())


def test_offers_have_prices_of_both_markets_and_their_age(aws: AwsProvider) -> None:
    found = aws.offers(NEED)
    spot = [offer for offer in found if offer.spot]
    listed = [offer for offer in found if not offer.spot]
    assert {offer.type for offer in listed} == {"g4dn.xlarge", "g5.xlarge"}
    assert {offer.price_usd_per_hour for offer in listed} == {0.526, 1.006}
    assert all(offer.week_low_usd_per_hour is not None for offer in spot)
    assert {offer.region for offer in found} == {REGION}
    assert abs(found[0].priced_at - time.time()) < 60


def test_second_time_nothing_is_asked(aws: AwsProvider, cloud: Cloud, tmp_path: Path) -> None:
    first = aws.offers(NEED)
    asked = cloud.seen.total()
    assert provider(tmp_path).offers(NEED) == first
    assert cloud.seen.total() == asked


def test_answer_from_the_cache_imports_nothing_of_aws(aws: AwsProvider, tmp_path: Path) -> None:
    found = aws.offers(NEED)
    done = subprocess.run(
        [sys.executable, "-c", WARM, str(tmp_path / "cache")],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    count, modules = json.loads(done.stdout)
    assert count == len(found)
    assert not {"boto3", "botocore", "urllib3", "jinja2", "ssl"} & set(modules)


def test_prices_age_sooner_than_types(aws: AwsProvider, cloud: Cloud, tmp_path: Path) -> None:
    aws.offers(NEED)
    for path in cached(tmp_path):
        kept = json.loads(path.read_bytes())
        kept["made_at"] -= 20 * 60
        path.write_text(json.dumps(kept))
    cloud.seen.clear()
    aws.offers(NEED)
    assert cloud.seen["DescribeSpotPriceHistory"] > 0
    assert cloud.seen["DescribeInstanceTypes"] == 0


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]", b'{"version": 99}', b"null"])
def test_broken_cache_is_asked_for_anew(
    aws: AwsProvider, cloud: Cloud, tmp_path: Path, damage: bytes
) -> None:
    before = aws.offers(NEED)
    for path in cached(tmp_path):
        path.write_bytes(damage)
    cloud.seen.clear()
    after = aws.offers(NEED)
    assert [offer.type for offer in after] == [offer.type for offer in before]
    assert cloud.seen["DescribeInstanceTypes"] > 0


def test_cache_that_cannot_be_written_is_done_without(cloud: Cloud, tmp_path: Path) -> None:
    with_market(cloud)
    (tmp_path / "cache").write_text("a file where the directory belongs")
    assert provider(tmp_path).offers(NEED)


def test_another_account_and_another_endpoint_have_other_answers(
    aws: AwsProvider, cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws.offers(NEED)
    count = len(cached(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAANOTHER")
    provider(tmp_path).offers(NEED)
    assert len(cached(tmp_path)) == 2 * count


def test_every_region_asked_for_is_looked_at(cloud: Cloud, tmp_path: Path) -> None:
    with_market(cloud)
    settings = AwsSettings(regions=("us-east-1", "eu-west-1"))
    found = provider(tmp_path, settings).offers(NEED)
    assert {offer.region for offer in found} == {"us-east-1", "eu-west-1"}


def test_machines_without_a_gpu(aws: AwsProvider) -> None:
    found = aws.offers(Need(gpu=GpuNeed(kind="none"), spot="never"))
    assert {offer.type for offer in found} == {"m7i-flex.large"}
    assert {offer.gpu_count for offer in found} == {0}


def test_nothing_that_fits_is_told(aws: AwsProvider) -> None:
    with pytest.raises(NoOfferError) as raised:
        aws.offers(Need(gpu=GpuNeed(kind="H100", count=1), spot="never"))
    assert "an unknown price" in raised.value.why


def test_scores_that_aws_does_not_give_are_not_asked_for_again_at_once(
    aws: AwsProvider, cloud: Cloud
) -> None:
    assert {offer.placement_score for offer in aws.offers(NEED)} == {None}
    asked = cloud.seen["GetSpotPlacementScores"]
    assert asked
    aws.offers(NEED)
    assert cloud.seen["GetSpotPlacementScores"] == asked


def test_prices_that_may_not_be_read_name_the_action(aws: AwsProvider, cloud: Cloud) -> None:
    said = {"__type": "AccessDeniedException", "message": "not authorized to perform"}
    cloud.reply("GetProducts", said)
    with pytest.raises(DeniedError) as raised:
        aws.offers(NEED)
    assert "GetProducts" in raised.value.what


def test_no_credentials_are_told_with_what_to_type(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(CredentialsError) as raised:
        provider(tmp_path).offers(NEED)
    assert "aws configure" in raised.value.hint


def test_profile_that_is_not_there_is_told(cloud: Cloud, tmp_path: Path) -> None:
    with pytest.raises(CredentialsError) as raised:
        provider(tmp_path, AwsSettings(profile="nobody")).offers(NEED)
    assert "nobody" in raised.value.why


def test_no_cache_at_all_asks_each_time(cloud: Cloud, tmp_path: Path) -> None:
    with_market(cloud)
    around = msgspec.structs.replace(context(tmp_path), cache_dir=None)
    assert AwsProvider(AwsSettings(), around).offers(NEED)


def test_subnet_given_decides_the_zone(aws: AwsProvider, cloud: Cloud, tmp_path: Path) -> None:
    import boto3

    ec2 = boto3.client("ec2", region_name=REGION)
    subnet = ec2.describe_subnets()["Subnets"][0]
    ec2.close()
    settings = AwsSettings(subnet=subnet["SubnetId"], ssh_from=("192.0.2.0/24",))
    found = provider(tmp_path, settings).offers(NEED)
    assert {offer.zone for offer in found} == {subnet["AvailabilityZone"]}
