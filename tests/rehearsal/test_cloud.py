"""What the layer over moto does, over real HTTP, with instances that are no machines."""

from __future__ import annotations

import json
import time
import urllib.request
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.error import HTTPError

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError, HTTPClientError
from rehearsal_bed import RehearsalSetup, client, wait_for

from labctl.rehearsal.aws import Rehearsal, Scenario
from labctl.rehearsal.aws.scenario import Capacity, Delays, Spot, SpotReclaim, VcpuQuotas
from labctl.rehearsal.core.scenario import Loss, Throttle

SPOT = {"InstanceMarketOptions": {"MarketType": "spot"}}


def refused(call: Any, *words: Any, **fields: Any) -> str:
    """The code with which AWS refuses."""
    with pytest.raises(ClientError) as caught:
        call(*words, **fields)
    return str(caught.value.response["Error"]["Code"])


def test_a_token_gives_the_same_instance_even_after_its_end(setup: RehearsalSetup) -> None:
    first = setup.run(ClientToken="one", **SPOT)
    again = setup.run(ClientToken="one", **SPOT)
    assert again["InstanceId"] == first["InstanceId"]
    assert again["SpotInstanceRequestId"] == first["SpotInstanceRequestId"]
    setup.ec2.terminate_instances(InstanceIds=[first["InstanceId"]])
    setup.rehearsal.wait(first["InstanceId"], "terminated")
    assert setup.run(ClientToken="one", **SPOT)["State"]["Name"] == "terminated"
    code = refused(setup.run, ClientToken="one", InstanceType="g5.xlarge", **SPOT)
    assert code == "IdempotentParameterMismatch"


def test_a_new_instance_is_not_shown_at_once(setup: RehearsalSetup) -> None:
    setup.rehearsal.change(delays=Delays(visible=3600))
    instance_id = setup.run()["InstanceId"]
    assert refused(setup.described, instance_id) == "InvalidInstanceID.NotFound"
    shown = (
        setup.ec2.get_paginator("describe_instances")
        .paginate()
        .search("Reservations[].Instances[].InstanceId")
    )
    assert instance_id not in list(shown)
    code = refused(setup.ec2.terminate_instances, InstanceIds=[instance_id])
    assert code == "InvalidInstanceID.NotFound"
    setup.rehearsal.change(delays=Delays())
    assert setup.described(instance_id)["InstanceId"] == instance_id


def test_states_are_shown_late(setup: RehearsalSetup) -> None:
    setup.rehearsal.change(delays=Delays(state=3600))
    instance_id = setup.run()["InstanceId"]
    setup.rehearsal.wait(instance_id, "running")
    early = setup.described(instance_id)
    assert early["State"]["Name"] == "pending"
    assert "PublicIpAddress" not in early
    setup.rehearsal.change(delays=Delays(state=0.1))
    wait_for(lambda: setup.described(instance_id)["State"]["Name"] == "running")


def test_delays_of_boot_and_end_show_as_states(setup: RehearsalSetup) -> None:
    setup.rehearsal.change(delays=Delays(boot=2, terminate=2))
    instance_id = setup.run()["InstanceId"]
    assert setup.described(instance_id)["State"]["Name"] == "pending"
    setup.rehearsal.wait(instance_id, "running")
    setup.ec2.terminate_instances(InstanceIds=[instance_id])
    assert setup.described(instance_id)["State"]["Name"] == "shutting-down"
    code = refused(setup.ec2.delete_security_group, GroupId=setup.group)
    assert code == "DependencyViolation"
    setup.rehearsal.wait(instance_id, "terminated")


def test_what_ended_is_forgotten(setup: RehearsalSetup) -> None:
    instance_id = setup.run()["InstanceId"]
    setup.ec2.terminate_instances(InstanceIds=[instance_id])
    setup.rehearsal.wait(instance_id, "terminated")
    assert setup.described(instance_id)["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    setup.rehearsal.change(delays=Delays(forget=0))
    assert refused(setup.described, instance_id) == "InvalidInstanceID.NotFound"


def test_capacity_by_zone_and_market(setup: RehearsalSetup) -> None:
    setup.rehearsal.change(
        capacity=(Capacity(zone="us-east-1a"), Capacity(market="spot", zone="us-east-1b"))
    )
    place = {"Placement": {"AvailabilityZone": "us-east-1a"}}
    with pytest.raises(ClientError) as caught:
        setup.run(**place)
    assert caught.value.response["Error"]["Code"] == "InsufficientInstanceCapacity"
    # AWS answers 500: what retries by status repeats it.
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 500
    assert setup.run()["Placement"]["AvailabilityZone"] == "us-east-1b"
    assert setup.run(**SPOT)["Placement"]["AvailabilityZone"] == "us-east-1c"


def test_a_limited_number_can_be_had(setup: RehearsalSetup) -> None:
    setup.rehearsal.change(capacity=(Capacity(type="g5.*", left=1),))
    first = setup.run(InstanceType="g5.xlarge")
    code = refused(setup.run, InstanceType="g5.2xlarge")
    assert code == "InsufficientInstanceCapacity"
    setup.ec2.terminate_instances(InstanceIds=[first["InstanceId"]])
    setup.rehearsal.wait(first["InstanceId"], "terminated")
    setup.run(InstanceType="g5.2xlarge")


def test_a_zone_without_the_type(setup: RehearsalSetup) -> None:
    setup.rehearsal.change(types=("g4dn.xlarge",))
    assert refused(setup.run, InstanceType="g5.xlarge") == "Unsupported"
    assert refused(setup.run, InstanceType="g99.xlarge") == "InvalidParameterValue"


def test_throttling_lets_a_burst_through(setup: RehearsalSetup) -> None:
    slow = Throttle(action="DescribeInstances", rate=0.001, burst=2)
    fast = Throttle(action="DescribeVolumes", rate=20.0, burst=1)
    setup.rehearsal.change(throttle=(slow, fast))
    setup.ec2.describe_instances()
    setup.ec2.describe_instances()
    assert refused(setup.ec2.describe_instances) == "RequestLimitExceeded"
    setup.ec2.describe_volumes()
    time.sleep(0.1)
    setup.ec2.describe_volumes()


def test_a_lost_reply_was_applied_and_a_dropped_call_was_not(setup: RehearsalSetup) -> None:
    tag = [{"Name": "tag:which", "Values": ["lost"]}]
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "which", "Value": "lost"}]}]
    setup.rehearsal.change(dropped=(Loss(action="RunInstances"),))
    with pytest.raises((ConnectionClosedError, HTTPClientError)):
        setup.run(TagSpecifications=tags)
    assert setup.ec2.describe_instances(Filters=tag)["Reservations"] == []
    setup.rehearsal.change(dropped=(), lost=(Loss(action="RunInstances", skip=1),))
    setup.run()
    with pytest.raises((ConnectionClosedError, HTTPClientError)):
        setup.run(ClientToken="lost", TagSpecifications=tags)
    found = setup.ec2.describe_instances(Filters=tag)["Reservations"][0]["Instances"]
    again = setup.run(ClientToken="lost", TagSpecifications=tags)
    assert [one["InstanceId"] for one in found] == [again["InstanceId"]]


def test_a_lost_call_can_be_held_before_its_connection_closes(setup: RehearsalSetup) -> None:
    setup.rehearsal.change(lost=(Loss(action="DescribeVpcs", hold=0.3),))
    began = time.monotonic()
    with pytest.raises((ConnectionClosedError, HTTPClientError)):
        setup.ec2.describe_vpcs()
    assert 0.3 <= time.monotonic() - began < 60
    assert setup.rehearsal.held_calls["DescribeVpcs"] == 1


def test_what_an_instance_uses_stays(setup: RehearsalSetup) -> None:
    instance = setup.run()
    (interface,) = setup.described(instance["InstanceId"])["NetworkInterfaces"]
    mine = {"NetworkInterfaceId": interface["NetworkInterfaceId"]}
    assert refused(setup.ec2.delete_network_interface, **mine) == "InvalidParameterValue"
    assert refused(setup.ec2.delete_security_group, GroupId=setup.group) == "DependencyViolation"
    setup.ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
    setup.rehearsal.wait(instance["InstanceId"], "terminated")
    assert refused(setup.ec2.delete_network_interface, **mine).endswith("NotFound")


def test_what_is_denied_and_what_a_dry_run_says(setup: RehearsalSetup) -> None:
    assert refused(setup.run, DryRun=True) == "DryRunOperation"
    setup.rehearsal.change(denied=("ec2:Run*", "scheduler:*"))
    assert refused(setup.run, DryRun=True) == "UnauthorizedOperation"
    scheduler = client(setup.rehearsal, "scheduler")
    assert refused(scheduler.list_schedules) == "AccessDeniedException"
    setup.ec2.describe_instances()


def test_credentials_expire(setup: RehearsalSetup) -> None:
    setup.rehearsal.change(expired=True)
    assert refused(setup.ec2.describe_instances) == "RequestExpired"
    sts = client(setup.rehearsal, "sts")
    assert refused(sts.get_caller_identity) == "ExpiredToken"


def test_quotas_count_vcpus_by_market(setup: RehearsalSetup) -> None:
    quotas = client(setup.rehearsal, "service-quotas")
    setup.rehearsal.change(quotas=VcpuQuotas(p=0, spot_p=0))
    code = refused(setup.run, InstanceType="p4d.24xlarge")
    assert code == "VcpuLimitExceeded"
    code = refused(setup.run, InstanceType="p4d.24xlarge", **SPOT)
    assert code == "MaxSpotInstanceCountExceeded"
    told = quotas.get_service_quota(ServiceCode="ec2", QuotaCode="L-417A185B")["Quota"]
    assert (told["Value"], told["Adjustable"]) == (0.0, True)
    listed = quotas.list_service_quotas(ServiceCode="ec2")["Quotas"]
    assert "L-3819A6DF" in {quota["QuotaCode"] for quota in listed}
    fields = {"ServiceCode": "ec2", "QuotaCode": "L-00000000"}
    assert refused(quotas.get_service_quota, **fields) == "NoSuchResourceException"


def test_spot_prices_move_and_stay_what_they_were(setup: RehearsalSetup) -> None:
    week_ago = datetime.now(UTC) - timedelta(days=7)
    asked = {
        "InstanceTypes": ["g4dn.xlarge"],
        "ProductDescriptions": ["Linux/UNIX"],
        "StartTime": week_ago,
    }
    pages = setup.ec2.get_paginator("describe_spot_price_history").paginate(
        **asked, PaginationConfig={"PageSize": 50}
    )
    entries = [entry for page in pages for entry in page["SpotPriceHistory"]]
    assert len(entries) > 100
    zones = {entry["AvailabilityZone"] for entry in entries}
    prices = {float(entry["SpotPrice"]) for entry in entries}
    assert len(zones) > 3
    assert len(prices) > 20
    assert 0.08 * 0.526 <= min(prices) < max(prices) <= 0.526
    again = setup.ec2.describe_spot_price_history(**asked)["SpotPriceHistory"]
    assert {(e["AvailabilityZone"], e["Timestamp"], e["SpotPrice"]) for e in again[:50]} <= {
        (e["AvailabilityZone"], e["Timestamp"], e["SpotPrice"]) for e in entries
    }


def test_a_bid_below_the_price_is_refused(setup: RehearsalSetup) -> None:
    setup.rehearsal.change(spot=Spot(prices={"g4dn.xlarge": 0.3}))
    options = {"MarketType": "spot", "SpotOptions": {"MaxPrice": "0.20"}}
    assert refused(setup.run, InstanceMarketOptions=options) == "SpotMaxPriceTooLow"


def test_placement_scores(setup: RehearsalSetup) -> None:
    setup.rehearsal.change(spot=Spot(scores={"us-east-1a": 9}))
    zones = setup.ec2.describe_availability_zones()["AvailabilityZones"]
    names = {zone["ZoneId"]: zone["ZoneName"] for zone in zones}
    answer = setup.ec2.get_spot_placement_scores(
        InstanceTypes=["g4dn.xlarge"],
        TargetCapacity=1,
        SingleAvailabilityZone=True,
        RegionNames=["us-east-1"],
    )
    scores = {
        names[one["AvailabilityZoneId"]]: one["Score"] for one in answer["SpotPlacementScores"]
    }
    assert scores["us-east-1a"] == 9
    assert all(1 <= score <= 10 for score in scores.values())


def test_the_price_list(setup: RehearsalSetup) -> None:
    pricing = client(setup.rehearsal, "pricing")
    fields = {"instanceType": "g4dn.xlarge", "regionCode": "us-west-2", "operatingSystem": "Linux"}
    filters = [{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in fields.items()]
    pages = pricing.get_paginator("get_products").paginate(ServiceCode="AmazonEC2", Filters=filters)
    listed = [json.loads(text) for page in pages for text in page["PriceList"]]
    (term,) = listed[0]["terms"]["OnDemand"].values()
    (dimension,) = term["priceDimensions"].values()
    assert len(listed) == 1
    assert float(dimension["pricePerUnit"]["USD"]) == 0.526


def test_what_ends_with_an_instance(setup: RehearsalSetup) -> None:
    instance = setup.run()
    own = [{"Name": "attachment.instance-id", "Values": [instance["InstanceId"]]}]
    volumes = setup.ec2.describe_volumes(Filters=own)["Volumes"]
    assert [volume["VolumeType"] for volume in volumes] == ["gp3"]
    nics = [nic["NetworkInterfaceId"] for nic in instance["NetworkInterfaces"]]
    tagged = setup.ec2.describe_network_interfaces(NetworkInterfaceIds=nics)["NetworkInterfaces"]
    assert tagged[0]["TagSet"] == [{"Key": "labctl", "Value": "1"}]
    setup.ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
    setup.rehearsal.wait(instance["InstanceId"], "terminated")
    code = refused(setup.ec2.describe_volumes, VolumeIds=[volumes[0]["VolumeId"]])
    assert code == "InvalidVolume.NotFound"
    code = refused(setup.ec2.describe_network_interfaces, NetworkInterfaceIds=nics)
    assert code == "InvalidNetworkInterfaceID.NotFound"


def test_a_kept_disk_outlives_its_instance(setup: RehearsalSetup) -> None:
    instance_id = setup.run()["InstanceId"]
    setup.ec2.modify_instance_attribute(
        InstanceId=instance_id,
        BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"DeleteOnTermination": False}}],
    )
    volume = setup.described(instance_id)["BlockDeviceMappings"][0]["Ebs"]["VolumeId"]
    setup.ec2.terminate_instances(InstanceIds=[instance_id])
    setup.rehearsal.wait(instance_id, "terminated")
    kept = setup.ec2.describe_volumes(VolumeIds=[volume])["Volumes"][0]
    assert kept["State"] == "available"
    setup.ec2.delete_volume(VolumeId=volume)


def test_a_disk_smaller_than_its_image_is_refused(setup: RehearsalSetup) -> None:
    disk = [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 20}}]
    assert refused(setup.run, BlockDeviceMappings=disk) == "InvalidBlockDeviceMapping"


def test_user_data_has_a_limit(setup: RehearsalSetup) -> None:
    assert refused(setup.run, UserData="x" * 16385) == "InvalidParameterValue"


@pytest.mark.parametrize(
    ("field", "code"),
    [("ImageId", "InvalidAMIID.NotFound"), ("KeyName", "InvalidKeyPair.NotFound")],
)
def test_what_is_not_there(setup: RehearsalSetup, field: str, code: str) -> None:
    assert refused(setup.run, **{field: "ami-00000000000000000"}) == code


def test_a_schedule_fires_and_goes(setup: RehearsalSetup) -> None:
    instance_id = setup.run()["InstanceId"]
    scheduler = client(setup.rehearsal, "scheduler")
    schedule = {
        "Name": "labctl-end",
        "ScheduleExpressionTimezone": "UTC",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "ActionAfterCompletion": "DELETE",
        "Target": {
            "Arn": "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances",
            "RoleArn": "arn:aws:iam::123456789012:role/ends",
            "Input": json.dumps({"InstanceIds": [instance_id]}),
        },
    }
    scheduler.create_schedule(**schedule, ScheduleExpression="at(2099-01-01T00:00:00)")
    due = (datetime.now(UTC) + timedelta(seconds=2)).strftime("%Y-%m-%dT%H:%M:%S")
    scheduler.update_schedule(**schedule, ScheduleExpression=f"at({due})")
    assert setup.rehearsal.instances[instance_id] != "terminated"
    setup.rehearsal.wait(instance_id, "terminated")
    assert scheduler.list_schedules()["Schedules"] == []


def test_spot_instances_are_taken_back(setup: RehearsalSetup) -> None:
    setup.rehearsal.change(spot=Spot(reclaims=(SpotReclaim(after=0.2, notice=0.0, count=1),)))
    ids = [setup.run(**SPOT)["InstanceId"] for _ in range(2)]

    def list_in(state: str) -> list[str]:
        return [one for one in ids if setup.described(one)["State"]["Name"] == state]

    # On a busy machine, the one that was created later may be running first.
    wait_for(lambda: len(list_in("terminated")) == 1)
    reason = setup.described(list_in("terminated")[0])["StateReason"]
    assert reason["Code"] == "Server.SpotInstanceTermination"
    (other,) = list_in("running")
    assert refused(setup.ec2.stop_instances, InstanceIds=[other]) == "UnsupportedOperation"


def test_stop_and_start(setup: RehearsalSetup) -> None:
    instance_id = setup.run()["InstanceId"]
    setup.rehearsal.wait(instance_id, "running")
    setup.ec2.stop_instances(InstanceIds=[instance_id])
    setup.rehearsal.wait(instance_id, "stopped")
    assert "PublicIpAddress" not in setup.described(instance_id)
    setup.ec2.start_instances(InstanceIds=[instance_id])
    setup.rehearsal.wait(instance_id, "running")


def test_regions_are_those_of_the_scenario(setup: RehearsalSetup) -> None:
    told = setup.ec2.describe_regions(AllRegions=True)["Regions"]
    assert {region["RegionName"] for region in told} == {"us-east-1", "us-west-2"}
    instance_id = setup.run()["InstanceId"]
    west = client(setup.rehearsal, region="us-west-2")
    code = refused(west.describe_instances, InstanceIds=[instance_id])
    assert code == "InvalidInstanceID.NotFound"
    paris = client(setup.rehearsal, region="eu-west-3")
    assert refused(paris.describe_instances) == "OptInRequired"


def test_the_callers_address_and_the_count_of_calls(setup: RehearsalSetup) -> None:
    with urllib.request.urlopen(f"{setup.rehearsal.url}/checkip") as answer:
        assert answer.read() == b"127.0.0.1\n"
    before = setup.rehearsal.calls.get("DescribeKeyPairs", 0)
    setup.ec2.describe_key_pairs()
    assert setup.rehearsal.calls["DescribeKeyPairs"] == before + 1


def test_control_from_another_process_needs_its_header(setup: RehearsalSetup) -> None:
    instance_id = setup.run(**SPOT)["InstanceId"]
    said = json.dumps({"instance": instance_id, "notice_s": 0}).encode()
    url = f"{setup.rehearsal.url}/rehearsal/reclaim"
    with pytest.raises(HTTPError) as caught:
        urllib.request.urlopen(url, data=said)
    caught.value.close()
    assert caught.value.code == 404
    request = urllib.request.Request(url, data=said, headers={"X-Labctl-Rehearsal": "1"})
    with urllib.request.urlopen(request) as answer:
        assert instance_id in json.load(answer)["instances"]
    setup.rehearsal.wait(instance_id, "terminated")


def test_two_rehearsals_know_nothing_of_each_other(setup: RehearsalSetup) -> None:
    setup.run()
    with Rehearsal(Scenario(boot="none", regions=("eu-central-1",))) as other:
        ec2 = client(other, region="eu-central-1")
        assert ec2.describe_instances()["Reservations"] == []
        assert other.environment["AWS_REGION"] == "eu-central-1"


def create_group(setup: RehearsalSetup, name: str = "close", strategy: str = "cluster") -> Any:
    tags = [{"ResourceType": "placement-group", "Tags": [{"Key": "labctl", "Value": "1"}]}]
    reply = setup.ec2.create_placement_group(
        GroupName=name, Strategy=strategy, TagSpecifications=tags
    )
    return reply["PlacementGroup"]


def test_a_placement_group_from_its_creation_to_its_end(setup: RehearsalSetup) -> None:
    ec2, placed = setup.ec2, {"Placement": {"GroupName": "close"}}
    assert refused(setup.run, **placed) == "InvalidPlacementGroup.Unknown"
    assert refused(create_group, setup, strategy="near") == "InvalidParameterValue"
    assert refused(ec2.create_placement_group, Strategy="cluster") == "MissingParameter"
    assert refused(ec2.delete_placement_group, GroupName="close", DryRun=True) == "DryRunOperation"
    group = create_group(setup)
    assert (group["State"], group["Strategy"]) == ("available", "cluster")
    assert group["Tags"] == [{"Key": "labctl", "Value": "1"}]
    assert refused(create_group, setup) == "InvalidPlacementGroup.Duplicate"
    assert ec2.describe_placement_groups(GroupNames=["close"])["PlacementGroups"] == [group]
    ours, theirs = ({"Name": "tag:labctl", "Values": [value]} for value in ("1", "2"))
    assert ec2.describe_placement_groups(Filters=[ours])["PlacementGroups"] == [group]
    assert ec2.describe_placement_groups(Filters=[theirs])["PlacementGroups"] == []
    instance = setup.run(**placed)
    assert instance["Placement"]["GroupName"] == "close"
    assert refused(ec2.delete_placement_group, GroupName="close") == "InvalidPlacementGroup.InUse"
    setup.rehearsal.change(delays=Delays(terminate=0.4))
    ec2.terminate_instances(InstanceIds=[instance["InstanceId"]])
    assert refused(ec2.delete_placement_group, GroupName="close") == "InvalidPlacementGroup.InUse"
    setup.rehearsal.wait(instance["InstanceId"], "terminated")
    ec2.delete_placement_group(GroupName="close")
    assert ec2.describe_placement_groups()["PlacementGroups"][0]["State"] == "deleting"
    assert refused(create_group, setup) == "InvalidPlacementGroup.Duplicate"
    assert refused(setup.run, **placed) == "InvalidPlacementGroup.Unknown"
    wait_for(lambda: not ec2.describe_placement_groups()["PlacementGroups"])
    unknown = refused(ec2.describe_placement_groups, GroupNames=["close"])
    assert unknown == "InvalidPlacementGroup.Unknown"
    assert refused(ec2.delete_placement_group, GroupName="close") == unknown


def test_a_type_without_cluster_placement_or_efa_is_refused(setup: RehearsalSetup) -> None:
    create_group(setup)
    wrong = {"InstanceType": "t3.micro", "Placement": {"GroupName": "close"}}
    assert refused(setup.run, **wrong) == "InvalidParameterCombination"
    efa = {"DeviceIndex": 0, "InterfaceType": "efa"}
    assert refused(setup.run, NetworkInterfaces=[efa]) == "UnsupportedOperation"
    fast = setup.run(InstanceType="g4dn.8xlarge", NetworkInterfaces=[efa])
    assert fast["NetworkInterfaces"][0]["InterfaceType"] == "efa"
    setup.ec2.delete_placement_group(GroupName="close")


def test_the_fields_of_a_placement_group_are_those_of_the_model(setup: RehearsalSetup) -> None:
    """boto3 drops a field that AWS's model does not know, so each must have come through."""
    group = create_group(setup)
    assert set(group) == {"GroupName", "State", "Strategy", "GroupId", "Tags", "GroupArn"}
    other = client(setup.rehearsal, region="us-west-2")
    assert other.describe_placement_groups()["PlacementGroups"] == []
    setup.ec2.delete_placement_group(GroupName="close")
