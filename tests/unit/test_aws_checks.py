"""What `doctor` says of an account."""

from __future__ import annotations

from pathlib import Path

import pytest
from aws_cloud import Cloud
from aws_provider import provider, with_market

from labctl.model import Check, GpuNeed, Need
from labctl.providers.aws import AwsProvider, AwsSettings
from labctl.providers.aws.quotas import find_quota


@pytest.fixture
def aws(cloud: Cloud, tmp_path: Path) -> AwsProvider:
    with_market(cloud)
    return provider(tmp_path)


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.ok]


def test_account_that_can_do_everything(aws: AwsProvider, cloud: Cloud) -> None:
    checks = aws.check()
    assert [check for check in checks if not check.ok] == []
    found = by_name(checks)
    assert "arn:aws" in found["credentials"].detail
    assert "192.0.2.0/24" in found["address"].detail
    assert "ami-" in found["image and network"].detail
    assert "8 vCPUs" in found["quota on-demand"].detail
    assert aws.servers() == []
    assert aws.leftovers() == []


def test_credentials_that_fail_are_the_only_line(aws: AwsProvider, cloud: Cloud) -> None:
    cloud.refuse("GetCallerIdentity", "ExpiredToken", status=403)
    [check] = aws.check()
    assert not check.ok
    assert "expired" in check.detail
    assert "aws sso login" in check.next


@pytest.mark.parametrize(
    "action",
    ["ImportKeyPair", "CreateSecurityGroup", "TerminateInstances", "ModifyInstanceAttribute"],
)
def test_missing_permission_is_named(aws: AwsProvider, cloud: Cloud, action: str) -> None:
    cloud.refuse(action, "UnauthorizedOperation", status=403)
    checks = aws.check()
    assert failed(checks) == [f"permission ec2:{action}"]
    assert "labctl docs aws" in by_name(checks)[f"permission ec2:{action}"].next


def test_missing_permission_to_start_machines_is_named(aws: AwsProvider, cloud: Cloud) -> None:
    cloud.refuse("RunInstances", "UnauthorizedOperation", status=403)
    [name] = failed(checks := aws.check())
    assert "RunInstances" in by_name(checks)[name].detail


def test_quota_of_zero_comes_with_the_page_that_raises_it(aws: AwsProvider, cloud: Cloud) -> None:
    cloud.reply("GetServiceQuota", {"Quota": {"Value": 0.0}})
    found = by_name(checks := aws.check())
    assert failed(checks) == ["quota spot", "quota on-demand"]
    assert "needs 4" in found["quota on-demand"].detail
    assert found["quota on-demand"].next.endswith("/L-DB2E81BA?region=us-east-1")
    assert found["quota spot"].next.endswith("/L-3819A6DF?region=us-east-1")


def test_one_market_is_enough_where_spot_is_preferred(aws: AwsProvider, cloud: Cloud) -> None:
    spot = "L-3819A6DF"

    def allowed(asked: dict[str, str]) -> dict[str, object]:
        return {"Quota": {"Value": 512.0 if asked["QuotaCode"] == spot else 0.0}}

    cloud.reply("GetServiceQuota", allowed)
    found = by_name(checks := aws.check(Need(gpu=GpuNeed(kind="any", count=1))))
    assert failed(checks) == []
    assert "no on-demand servers until it is raised" in found["quota on-demand"].detail
    assert found["quota on-demand"].warning
    assert not found["quota spot"].warning
    never = Need(gpu=GpuNeed(kind="any", count=1), spot="never")
    assert failed(aws.check(never)) == ["quota on-demand"]


def test_quota_that_may_not_be_read_is_not_guessed(aws: AwsProvider, cloud: Cloud) -> None:
    cloud.reply("GetServiceQuota", {"__type": "AccessDeniedException", "message": "no"})
    found = by_name(aws.check())
    assert not found["quota on-demand"].ok
    assert "unknown: the account" in found["quota on-demand"].detail


def test_need_that_nothing_fits_is_told(aws: AwsProvider) -> None:
    checks = aws.check(Need(gpu=GpuNeed(kind="T5", count=1)))
    assert failed(checks) == ["offers"]
    assert "gpu T5" in by_name(checks)["offers"].detail


def test_missing_guards_are_mentioned(cloud: Cloud, tmp_path: Path) -> None:
    with_market(cloud)
    aws = provider(tmp_path, AwsSettings(ssh_from=("192.0.2.0/24",)))
    found = by_name(aws.check())
    assert "scheduler_role is not set" in found["deadline at AWS"].detail
    assert found["deadline at AWS"].next
    assert found["deadline at AWS"].warning
    profile = found["instance profile"]
    assert "instance_profile is not set" in profile.detail
    assert (profile.ok, profile.warning) == (True, True)
    assert profile.next
    given = provider(tmp_path, AwsSettings(ssh_from=("192.0.2.0/24",), instance_profile="labctl"))
    assert not by_name(given.check())["instance profile"].warning


@pytest.mark.parametrize(
    ("name", "spot", "code"),
    [
        ("g5.xlarge", False, "L-DB2E81BA"),
        ("gr6.4xlarge", True, "L-3819A6DF"),
        ("p4d.24xlarge", False, "L-417A185B"),
        ("p4d.24xlarge", True, "L-7212CCBC"),
        ("p5.4xlarge", True, "L-C4BD4855"),
        ("m7i-flex.large", False, "L-1216C47A"),
        ("c7g.xlarge", True, "L-34B43A08"),
    ],
)
def test_type_counts_against_its_quota(name: str, spot: bool, code: str) -> None:
    assert find_quota(name, spot).code == code
