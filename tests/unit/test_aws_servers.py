"""Servers on EC2: made once, known by their tags alone, ended for good."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import boto3
import msgspec
import pytest
from aws_cloud import REGION, Cloud
from aws_provider import a_request, a_server, an_image, an_offer, provider, with_market

from labctl.errors import (
    BusyError,
    CapacityError,
    ConnectError,
    DeniedError,
    LabError,
    NotFoundError,
    QuotaError,
    ThrottledError,
    UsageError,
)
from labctl.model import CreateServerRequest
from labctl.providers import ConsoleSource, Deadline, Firewall, FirstBoot, Keep, Provider, Stoppable
from labctl.providers.aws import AwsProvider, AwsSettings


@pytest.fixture
def aws(cloud: Cloud, tmp_path: Path) -> AwsProvider:
    with_market(cloud)
    return provider(tmp_path)


def run_instances(cloud: Cloud) -> list[dict[str, str]]:
    return [body for body in cloud.bodies if body.get("Action") == "RunInstances"]


def described(server_id: str) -> dict[str, Any]:
    instance_id, _, region = server_id.partition(".")
    ec2 = boto3.client("ec2", region_name=region)
    found = ec2.describe_instances(InstanceIds=[instance_id])["Reservations"][0]["Instances"][0]
    ec2.close()
    return dict(found)


def test_it_can_do_all_that_a_provider_may(aws: AwsProvider) -> None:
    as_provider: Provider = aws
    assert as_provider.name == "aws"
    for ability in (Stoppable, FirstBoot, Firewall, Deadline, Keep, ConsoleSource):
        assert isinstance(aws, ability)


def test_one_call_makes_a_server_with_all_that_guards_it(
    aws: AwsProvider, cloud: Cloud, tmp_path: Path
) -> None:
    request = a_request(aws, tmp_path)
    server = aws.create(an_offer(spot=True), request)
    [call] = run_instances(cloud)
    assert call["ClientToken"] == request.token
    assert (call["MinCount"], call["MaxCount"]) == ("1", "1")
    assert call["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert call["MetadataOptions.HttpTokens"] == "required"
    assert call["MetadataOptions.HttpPutResponseHopLimit"] == "1"
    assert call["BlockDeviceMapping.1.Ebs.Encrypted"] == "true"
    assert call["BlockDeviceMapping.1.Ebs.VolumeType"] == "gp3"
    assert call["BlockDeviceMapping.1.Ebs.VolumeSize"] == "94"
    assert call["InstanceMarketOptions.SpotOptions.SpotInstanceType"] == "one-time"
    assert "InstanceMarketOptions.SpotOptions.MaxPrice" not in call
    kinds = {value for key, value in call.items() if key.endswith("ResourceType")}
    assert kinds == {"instance", "volume", "network-interface", "spot-instances-request"}
    assert (server.lab, server.lab_id) == ("digits", request.lab_id)
    assert server.endpoint.identity == request.identity


def test_on_demand_server_has_no_market_options(
    aws: AwsProvider, cloud: Cloud, tmp_path: Path
) -> None:
    a_server(aws, tmp_path)
    [call] = run_instances(cloud)
    assert not [key for key in call if key.startswith("InstanceMarketOptions")]
    assert "spot-instances-request" not in call.values()


def test_same_attempt_is_sent_byte_for_byte_the_same(
    aws: AwsProvider, cloud: Cloud, tmp_path: Path
) -> None:
    """By another process too: nothing in it comes from anywhere but the offer and the request."""
    request = a_request(aws, tmp_path)
    stored = msgspec.json.decode(msgspec.json.encode(request), type=CreateServerRequest)
    aws.create(an_offer(), request)
    provider(tmp_path).create(an_offer(), stored)
    first, second = run_instances(cloud)
    assert first == second


def test_tags_alone_tell_all_of_a_server(aws: AwsProvider, tmp_path: Path) -> None:
    request = a_request(aws, tmp_path)
    made = aws.create(an_offer(spot=True), request)
    found = provider(tmp_path).find(made.id)
    assert found is not None
    assert found.offer == an_offer(spot=True)
    assert found.endpoint.host_key == request.host_key
    assert found.endpoint.host
    assert found.state == "running"
    bears = {tag["Key"]: tag["Value"] for tag in described(made.id)["Tags"]}
    assert bears["labctl:token"] == request.token
    assert bears["labctl:owner"] == "ada"
    assert bears["labctl:ttl-s"] == "3600"
    assert bears["labctl:budget"] == "5.0000"
    assert provider(tmp_path).servers() == [found]


def test_strangers_machine_is_neither_found_nor_listed(aws: AwsProvider, cloud: Cloud) -> None:
    ec2 = boto3.client("ec2", region_name=REGION)
    made = ec2.run_instances(ImageId=an_image(cloud), MinCount=1, MaxCount=1)
    ec2.close()
    stranger = f"{made['Instances'][0]['InstanceId']}.{REGION}"
    assert aws.find(stranger) is None
    assert aws.servers() == []
    with pytest.raises(NotFoundError):
        aws.stop(stranger)


def test_token_known_with_other_arguments_leads_to_its_server(
    aws: AwsProvider, cloud: Cloud, tmp_path: Path
) -> None:
    """The newest image may be another one when the attempt is repeated."""
    request = a_request(aws, tmp_path)
    made = aws.create(an_offer(), request)
    cloud.refuse("RunInstances", "IdempotentParameterMismatch")
    assert aws.create(an_offer(), request).id == made.id


def test_token_known_to_aws_whose_server_is_not_shown_is_asked_for_again(
    aws: AwsProvider, cloud: Cloud, tmp_path: Path
) -> None:
    cloud.refuse("RunInstances", "IdempotentParameterMismatch")
    with pytest.raises(BusyError):
        aws.create(an_offer(), a_request(aws, tmp_path))


def test_token_whose_server_has_ended_needs_a_new_one(
    aws: AwsProvider, cloud: Cloud, tmp_path: Path
) -> None:
    request = a_request(aws, tmp_path)
    made = aws.create(an_offer(), request)
    aws.terminate(made.id)
    cloud.refuse("RunInstances", "IdempotentParameterMismatch")
    with pytest.raises(CapacityError) as raised:
        aws.create(an_offer(), request)
    assert "ended" in raised.value.what


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        ("InsufficientInstanceCapacity", CapacityError, "us-east-1a"),
        ("SpotMaxPriceTooLow", CapacityError, "us-east-1a"),
        ("VcpuLimitExceeded", QuotaError, "L-DB2E81BA"),
        ("MaxSpotInstanceCountExceeded", QuotaError, "L-DB2E81BA"),
        ("RequestLimitExceeded", ThrottledError, ""),
        ("UnauthorizedOperation", DeniedError, "labctl docs aws"),
        ("InvalidParameterValue", UsageError, ""),
        ("InvalidGroup.NotFound", BusyError, ""),
    ],
)
def test_refusal_is_told_for_what_it_is_after_one_call(
    aws: AwsProvider,
    cloud: Cloud,
    tmp_path: Path,
    code: str,
    kind: type[LabError],
    said: str,
) -> None:
    cloud.refuse("RunInstances", code, status=500 if "Insufficient" in code else 400)
    with pytest.raises(kind) as raised:
        aws.create(an_offer(), a_request(aws, tmp_path))
    error = raised.value
    assert said in f"{error.what} {error.why} {error.hint}"
    assert error.hint or isinstance(error, BusyError)
    assert cloud.seen["RunInstances"] == 1
    assert aws.servers() == []


def test_lost_reply_is_no_answer(aws: AwsProvider, cloud: Cloud, tmp_path: Path) -> None:
    cloud.refuse("RunInstances", "InternalError", status=500, applied=True)
    with pytest.raises(BusyError):
        aws.create(an_offer(), a_request(aws, tmp_path))
    assert cloud.seen["RunInstances"] == 1
    assert len(aws.servers()) == 1


def test_image_that_is_not_there_is_told_before_anything_is_made(
    cloud: Cloud, tmp_path: Path
) -> None:
    settings = AwsSettings(ami="ami-00000000000000000", ssh_from=("192.0.2.0/24",))
    aws = provider(tmp_path, settings)
    with pytest.raises(UsageError) as raised:
        aws.create(an_offer(), a_request(aws, tmp_path))
    assert "ami-00000000000000000" in raised.value.what
    assert "server.aws.ami" in raised.value.hint
    assert aws.leftovers() == []


def test_region_without_a_default_network_is_told_with_the_command_that_makes_one(
    aws: AwsProvider, cloud: Cloud, tmp_path: Path
) -> None:
    ec2 = boto3.client("ec2", region_name=REGION)
    for subnet in ec2.describe_subnets()["Subnets"]:
        ec2.delete_subnet(SubnetId=subnet["SubnetId"])
    request = a_request(aws, tmp_path)
    with pytest.raises(CapacityError) as no_subnet:
        aws.create(an_offer(), request)
    assert "create-default-subnet" in no_subnet.value.hint
    for vpc in ec2.describe_vpcs()["Vpcs"]:
        ec2.delete_vpc(VpcId=vpc["VpcId"])
    ec2.close()
    with pytest.raises(UsageError) as no_network:
        aws.create(an_offer(), request)
    assert f"aws ec2 create-default-vpc --region {REGION}" in no_network.value.hint


def test_thirty_servers_need_their_context_asked_for_once(
    aws: AwsProvider, cloud: Cloud, tmp_path: Path
) -> None:
    request = a_request(aws, tmp_path)
    aws.create(an_offer(), request)
    once = cloud.seen.total()
    for number in range(4):
        again = msgspec.structs.replace(request, token=f"token-{number}")
        aws.create(an_offer(), again)
    assert cloud.seen["RunInstances"] == 5
    assert cloud.seen.total() == once + 4


def test_terminate_may_be_repeated_and_absent_counts_as_success(
    aws: AwsProvider, tmp_path: Path
) -> None:
    server = a_server(aws, tmp_path)
    aws.terminate(server.id)
    aws.terminate(server.id)
    found = aws.find(server.id)
    assert found is not None
    assert found.state == "terminated"
    assert aws.servers() == []
    aws.terminate(f"i-0123456789abcdef0.{REGION}")
    aws.terminate("nonsense")
    assert aws.find("nonsense") is None


def test_stopped_server_starts_again(aws: AwsProvider, tmp_path: Path) -> None:
    server = a_server(aws, tmp_path)
    aws.stop(server.id)
    stopped = aws.find(server.id)
    assert stopped is not None
    assert stopped.state == "stopped"
    own = [one for one in aws.leftovers() if one.server_id == server.id]
    assert sum(one.price_usd_per_month for one in own) > 0, "`labctl stop` names the disk's price"
    aws.start(server.id)
    again = aws.find(server.id)
    assert again is not None
    assert again.state == "running"
    assert again.created_at == server.created_at


def test_start_while_it_is_stopping_is_for_later(
    aws: AwsProvider, cloud: Cloud, tmp_path: Path
) -> None:
    server = a_server(aws, tmp_path)
    cloud.refuse("StartInstances", "IncorrectInstanceState")
    with pytest.raises(BusyError):
        aws.start(server.id)


def test_pinned_keys_are_changed_in_one_call(
    aws: AwsProvider, cloud: Cloud, tmp_path: Path
) -> None:
    server = a_server(aws, tmp_path)
    before = cloud.seen["CreateTags"]
    aws.pin(server.id, "ssh-ed25519 first", "ssh-ed25519 next")
    assert cloud.seen["CreateTags"] == before + 1
    found = aws.find(server.id)
    assert found is not None
    assert found.endpoint.host_key == "ssh-ed25519 first"
    assert found.endpoint.next_host_key == "ssh-ed25519 next"
    aws.pin(server.id, "ssh-ed25519 next")
    found = aws.find(server.id)
    assert found is not None
    assert found.endpoint.next_host_key == ""


def test_deadline_at_aws_is_set_and_moved(aws: AwsProvider, tmp_path: Path) -> None:
    server = a_server(aws, tmp_path)
    at = time.time() + 3600
    aws.set_deadline(server.id, at)
    aws.set_deadline(server.id, at + 600)
    scheduler = boto3.client("scheduler", region_name=REGION)
    [listed] = scheduler.list_schedules()["Schedules"]
    schedule = scheduler.get_schedule(Name=listed["Name"])
    scheduler.close()
    assert schedule["Target"]["Arn"] == "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances"
    assert server.id.partition(".")[0] in schedule["Target"]["Input"]
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at + 600))
    assert schedule["ScheduleExpression"] == f"at({when})"
    found = aws.find(server.id)
    assert found is not None
    assert found.deadline_at == pytest.approx(at + 600, abs=1)


def test_deadline_without_a_role_is_denied(cloud: Cloud, tmp_path: Path) -> None:
    aws = provider(tmp_path, AwsSettings())
    with pytest.raises(DeniedError) as raised:
        aws.set_deadline(f"i-0123456789abcdef0.{REGION}", time.time() + 60)
    assert "scheduler_role" in raised.value.why


def test_console_of_what_has_none_is_empty(aws: AwsProvider, tmp_path: Path) -> None:
    server = a_server(aws, tmp_path)
    assert aws.read_console(server.id)
    assert aws.read_console(f"i-0123456789abcdef0.{REGION}") == ""


def test_api_that_does_not_answer_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch, cloud: Cloud, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ConnectError):
        provider(tmp_path).servers()


def test_everywhere_asks_every_region(cloud: Cloud, tmp_path: Path) -> None:
    with_market(cloud)
    aws = provider(tmp_path, AwsSettings(regions=("eu-west-1",), ssh_from=("192.0.2.0/24",)))
    server = a_server(aws, tmp_path)
    assert server.id.endswith(REGION)
    assert aws.servers() == []
    around = msgspec.structs.replace(aws.context, everywhere=True)
    everywhere = AwsProvider(aws.settings, around)
    assert [found.id for found in everywhere.servers()] == [server.id]
