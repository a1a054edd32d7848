"""`server.aws` in lab.yaml, and what AWS's own configuration says."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.config.document import parse
from labctl.config.reader import read
from labctl.errors import Problem
from labctl.providers.aws import account
from labctl.providers.aws.settings import AwsSettings


def settings(text: str) -> AwsSettings | list[Problem]:
    problems: list[Problem] = []
    node = parse(text.encode(), "lab.yaml", problems)
    assert node is not None
    found = read(node, AwsSettings, "server.aws", problems)
    return problems or found


def test_all_of_them() -> None:
    text = """
regions: [us-east-1, eu-west-1]
ami: /aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id
user: ec2-user
ssh_from: [192.0.2.0/24, 2001:db8::/32, 198.51.100.7]
address_from: https://ip.example.org/
disk: 200GB
subnet: subnet-0123456789abcdef0
instance_profile: labctl-server
scheduler_role: arn:aws:iam::123456789012:role/labctl-deadline
profile: teaching
settle: 90s
"""
    found = settings(text)
    assert isinstance(found, AwsSettings)
    assert found.regions == ("us-east-1", "eu-west-1")
    assert found.ssh_from == ("192.0.2.0/24", "2001:db8::/32", "198.51.100.7/32")
    assert found.disk_bytes == 200 * 10**9
    assert found.settle_s == 90


def test_text_may_hold_several_as_a_variable_does() -> None:
    found = settings("regions: us-east-1,us-west-2\nssh_from: 192.0.2.1, 192.0.2.2\n")
    assert isinstance(found, AwsSettings)
    assert found.regions == ("us-east-1", "us-west-2")
    assert found.ssh_from == ("192.0.2.1/32", "192.0.2.2/32")


@pytest.mark.parametrize(
    "line",
    [
        "regions: [Virginia]",
        "regions: us-east-1;rm",
        "ami: image",
        "user: -oProxyCommand=x",
        "ssh_from: [192.0.2.1/24]",
        "ssh_from: [everyone]",
        "address_from: http://ip.example.org/",
        "address_from: file:///etc/passwd",
        "address_from: https://user@ip.example.org/",
        "subnet: net",
        "instance_profile: arn:aws:iam::1:role/x",
        "scheduler_role: labctl",
        "disk: big",
        "colour: red",
    ],
)
def test_nonsense_is_refused_with_its_place(line: str) -> None:
    found = settings(line)
    assert isinstance(found, list)
    [problem] = found
    assert problem.path.startswith(f"server.aws.{line.partition(':')[0]}")
    assert problem.line == 1


def test_address_source_may_be_this_machine() -> None:
    found = settings("address_from: http://127.0.0.1:8123/address")
    assert isinstance(found, AwsSettings)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(
        "[default]\nregion = eu-central-1\n[profile teaching]\nregion=us-west-2\n[profile bare]\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("profile", "environ", "region"),
    [
        ("", {}, "eu-central-1"),
        ("teaching", {}, "us-west-2"),
        ("", {"AWS_PROFILE": "teaching"}, "us-west-2"),
        ("bare", {}, "us-east-1"),
        ("", {"AWS_DEFAULT_REGION": "ap-south-1"}, "ap-south-1"),
        ("", {"AWS_REGION": "ap-east-1", "AWS_DEFAULT_REGION": "ap-south-1"}, "ap-east-1"),
        ("", {"AWS_CONFIG_FILE": "/nowhere/config"}, "us-east-1"),
    ],
)
def test_region_is_the_one_that_aws_itself_would_take(
    home: Path, profile: str, environ: dict[str, str], region: str
) -> None:
    assert account.resolve_home_region(profile, {"HOME": str(home), **environ}) == region


def test_unreadable_configuration_is_left_to_aws_to_complain_about(tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_bytes(b"region = no section\n\xff")
    assert account.resolve_home_region("", {"HOME": str(tmp_path)}) == "us-east-1"


def test_fingerprint_changes_with_account_endpoint_and_files(home: Path) -> None:
    base = {"HOME": str(home)}
    marks = {
        account.fingerprint("", base),
        account.fingerprint("teaching", base),
        account.fingerprint("", {**base, "AWS_ACCESS_KEY_ID": "A"}),
        account.fingerprint("", {**base, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}),
        account.fingerprint("", {**base, "AWS_ENDPOINT_URL_EC2": "http://127.0.0.1:1"}),
    }
    (home / ".aws" / "credentials").write_text("[default]\n")
    marks.add(account.fingerprint("", base))
    assert len(marks) == 6
    assert account.fingerprint("", {**base, "LANG": "C"}) in marks
