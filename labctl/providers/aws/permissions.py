"""Find out the permissions of the credentials without side effects, by EC2's DryRun."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from labctl.providers.aws.errors import DENIED, get_code, translate_errors

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

INSTANCE = "i-00000000000000000"
GROUP = "sg-00000000000000000"
IMAGE = "ami-00000000000000000"
SOME_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFRaSd4ggqnoCXfoeoYLdFMIOKfuu+umL/Zr5GkuWNP4 doctor"

# The actions that labctl needs. For ids that do not exist AWS replies "not found", which is not a
# denial.
_DRY: dict[str, dict[str, Any]] = {
    "CreateSecurityGroup": {"GroupName": "labctl-doctor", "Description": "never made"},
    "AuthorizeSecurityGroupIngress": {
        "GroupId": GROUP,
        "IpPermissions": [{"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22}],
    },
    "ImportKeyPair": {"KeyName": "labctl-doctor", "PublicKeyMaterial": SOME_KEY.encode()},
    "CreateTags": {"Resources": [INSTANCE], "Tags": [{"Key": "labctl", "Value": "1"}]},
    "ModifyInstanceAttribute": {
        "InstanceId": INSTANCE,
        "BlockDeviceMappings": [
            {"DeviceName": "/dev/sda1", "Ebs": {"DeleteOnTermination": False}},
        ],
    },
    "TerminateInstances": {"InstanceIds": [INSTANCE]},
    "DescribeInstances": {},
    "DescribeImages": {"ImageIds": [IMAGE]},
    "DescribeSubnets": {},
    "DescribeSecurityGroups": {},
    "DescribeVolumes": {},
    "DescribeNetworkInterfaces": {},
    "DescribeKeyPairs": {},
}


def list_denied_actions(ec2: Any) -> list[str]:
    """List the actions that these credentials may not do, by their IAM names."""
    with ThreadPoolExecutor(len(_DRY)) as threads:
        answers = threads.map(lambda action: _is_denied(ec2, action), _DRY)
        return [f"ec2:{action}" for action, denied in zip(_DRY, answers, strict=True) if denied]


def count_actions() -> int:
    """Return the number of actions that `list_denied_actions` and `require_run_permission` try."""
    return len(_DRY) + 1


def require_run_permission(ec2: Any, ami: str, instance_type: str, subnet: str) -> None:
    """Raise DeniedError if these credentials may not launch such a machine."""
    from botocore.exceptions import ClientError

    with translate_errors():
        try:
            ec2.run_instances(
                DryRun=True,
                ImageId=ami,
                InstanceType=instance_type,
                SubnetId=subnet,
                MinCount=1,
                MaxCount=1,
            )
        except ClientError as error:
            if get_code(error) != "DryRunOperation":
                raise


def _is_denied(ec2: Any, action: str) -> bool:
    from botocore import xform_name
    from botocore.exceptions import ClientError

    with translate_errors():
        try:
            getattr(ec2, xform_name(action))(DryRun=True, **_DRY[action])
        except ClientError as error:
            if _is_other_trouble(error):
                raise
            return get_code(error) in DENIED
    return False


def _is_other_trouble(error: ClientError) -> bool:
    """Whether the error concerns neither the permission nor the made-up arguments."""
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) or 0)
    return status >= 500 or status == 401
