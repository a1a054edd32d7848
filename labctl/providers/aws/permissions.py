"""Find out the permissions of the credentials without side effects, by EC2's DryRun."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

from labctl.lazy import lazy_imports
from labctl.providers.aws.errors import DENIED, get_code, translate_errors

if TYPE_CHECKING:
    from botocore.exceptions import ClientError
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.literals import InstanceTypeType

with lazy_imports(__name__):
    from botocore import exceptions as boto_errors

INSTANCE = "i-00000000000000000"
GROUP = "sg-00000000000000000"
IMAGE = "ami-00000000000000000"
SOME_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFRaSd4ggqnoCXfoeoYLdFMIOKfuu+umL/Zr5GkuWNP4 doctor"

# The actions that labctl needs, tried without effect. For ids that do not exist AWS replies "not
# found", which is not a denial.
_DRY: dict[str, Callable[[EC2Client], object]] = {
    "CreateSecurityGroup": lambda ec2: ec2.create_security_group(
        DryRun=True, GroupName="labctl-doctor", Description="never made"
    ),
    "AuthorizeSecurityGroupIngress": lambda ec2: ec2.authorize_security_group_ingress(
        DryRun=True,
        GroupId=GROUP,
        IpPermissions=[{"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22}],
    ),
    "AuthorizeSecurityGroupEgress": lambda ec2: ec2.authorize_security_group_egress(
        DryRun=True, GroupId=GROUP, IpPermissions=[{"IpProtocol": "-1"}]
    ),
    "CreatePlacementGroup": lambda ec2: ec2.create_placement_group(
        DryRun=True, GroupName="labctl-doctor", Strategy="cluster"
    ),
    "DeletePlacementGroup": lambda ec2: ec2.delete_placement_group(
        DryRun=True, GroupName="labctl-doctor"
    ),
    "ImportKeyPair": lambda ec2: ec2.import_key_pair(
        DryRun=True, KeyName="labctl-doctor", PublicKeyMaterial=SOME_KEY.encode()
    ),
    "CreateTags": lambda ec2: ec2.create_tags(
        DryRun=True, Resources=[INSTANCE], Tags=[{"Key": "labctl", "Value": "1"}]
    ),
    "ModifyInstanceAttribute": lambda ec2: ec2.modify_instance_attribute(
        DryRun=True,
        InstanceId=INSTANCE,
        BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"DeleteOnTermination": False}}],
    ),
    "TerminateInstances": lambda ec2: ec2.terminate_instances(DryRun=True, InstanceIds=[INSTANCE]),
    "DescribeInstances": lambda ec2: ec2.describe_instances(DryRun=True),
    "DescribeImages": lambda ec2: ec2.describe_images(DryRun=True, ImageIds=[IMAGE]),
    "DescribeSubnets": lambda ec2: ec2.describe_subnets(DryRun=True),
    "DescribeSecurityGroups": lambda ec2: ec2.describe_security_groups(DryRun=True),
    "DescribeVolumes": lambda ec2: ec2.describe_volumes(DryRun=True),
    "DescribeNetworkInterfaces": lambda ec2: ec2.describe_network_interfaces(DryRun=True),
    "DescribePlacementGroups": lambda ec2: ec2.describe_placement_groups(DryRun=True),
    "DescribeKeyPairs": lambda ec2: ec2.describe_key_pairs(DryRun=True),
}


def list_denied_actions(ec2: EC2Client) -> list[str]:
    """List the actions that these credentials may not do, by their IAM names."""
    with ThreadPoolExecutor(len(_DRY)) as threads:
        answers = threads.map(lambda action: _is_dry_run_denied(ec2, action), _DRY)
        return [f"ec2:{action}" for action, denied in zip(_DRY, answers, strict=True) if denied]


def count_checked_actions() -> int:
    """Return the number of actions that `list_denied_actions` and `require_run_permission` try."""
    return len(_DRY) + 1


def require_run_permission(ec2: EC2Client, ami: str, instance_type: str, subnet: str) -> None:
    """Raise DeniedError if these credentials may not launch such a machine."""
    with translate_errors():
        try:
            ec2.run_instances(
                DryRun=True,
                ImageId=ami,
                InstanceType=cast("InstanceTypeType", instance_type),
                SubnetId=subnet,
                MinCount=1,
                MaxCount=1,
            )
        except boto_errors.ClientError as error:
            if get_code(error) != "DryRunOperation":
                raise


def _is_dry_run_denied(ec2: EC2Client, action: str) -> bool:
    with translate_errors():
        try:
            _DRY[action](ec2)
        except boto_errors.ClientError as error:
            if _is_other_trouble(error):
                raise
            return get_code(error) in DENIED
    return False


def _is_other_trouble(error: ClientError) -> bool:
    """Whether the error concerns neither the permission nor the made-up arguments."""
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) or 0)
    return status >= 500 or status == 401
