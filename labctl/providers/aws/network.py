"""The subnet of a server, and the networks that may reach it: one security group for each lab."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from labctl.errors import BusyError, CapacityError, UsageError
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.providers.aws import tags
from labctl.providers.aws.errors import get_code, is_absent, translate_errors
from labctl.providers.caller_network import find_caller_network

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client
    from mypy_boto3_ec2.type_defs import IpPermissionTypeDef, SecurityGroupTypeDef

    from labctl.providers.aws.settings import AwsSettings

with lazy_imports(__name__):
    from botocore import exceptions as boto_errors


class Subnet(Value, frozen=True):
    """A subnet and its network."""

    subnet: str
    vpc: str
    zone: str


def find_subnet(ec2: EC2Client, settings: AwsSettings, zone: str) -> Subnet:
    """Find the configured subnet, else the zone's default subnet. Raises an error without one."""
    with translate_errors():
        try:
            subnets = (
                ec2.describe_subnets(SubnetIds=[settings.subnet])
                if settings.subnet
                else ec2.describe_subnets(
                    Filters=[
                        {"Name": "default-for-az", "Values": ["true"]},
                        {"Name": "availability-zone", "Values": [zone]},
                    ]
                )
            )["Subnets"]
        except boto_errors.ClientError as error:
            if not is_absent(error):
                raise
            subnets = []
    if not subnets:
        raise _make_no_subnet_error(ec2, settings, zone)
    subnet = subnets[0]
    return Subnet(subnet=subnet["SubnetId"], vpc=subnet["VpcId"], zone=subnet["AvailabilityZone"])


def _make_no_subnet_error(
    ec2: EC2Client, settings: AwsSettings, zone: str
) -> UsageError | CapacityError:
    region = ec2.meta.region_name
    if settings.subnet:
        return UsageError(
            f"the subnet {settings.subnet} is not in {region}",
            why="server.aws.subnet names it",
            hint=f"aws ec2 describe-subnets --region {region}",
        )
    with translate_errors():
        default = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    if default:
        return CapacityError(
            f"the default network has no subnet in {zone}",
            why="it was deleted",
            hint=f"aws ec2 create-default-subnet --availability-zone {zone}",
        )
    return UsageError(
        f"there is no default network (VPC) in {region}",
        why="it was deleted, or the account is an old one",
        hint=f"set server.aws.subnet, or:\naws ec2 create-default-vpc --region {region}",
    )


def list_ssh_networks(settings: AwsSettings) -> tuple[str, ...]:
    """List the networks that may reach SSH: those of the settings, else this machine's address."""
    if settings.ssh_from:
        return settings.ssh_from
    return (find_caller_network(settings.address_from, "server.aws.ssh_from"),)


def group_name(lab_id: str) -> str:
    return f"labctl-{lab_id}"


def ensure_group(ec2: EC2Client, vpc: str, lab_tags: dict[str, str]) -> SecurityGroupTypeDef:
    """Return the lab's security group in a network, as AWS describes it; create it if missing."""
    name = group_name(lab_tags[tags.LAB_ID])
    with translate_errors():
        try:
            created = ec2.create_security_group(
                GroupName=name,
                Description=f"SSH to the servers of the lab {lab_tags[tags.LAB]}",
                VpcId=vpc,
                TagSpecifications=[
                    {"ResourceType": "security-group", "Tags": tags.as_pairs(lab_tags)}
                ],
            )
            return {"GroupId": created["GroupId"], "IpPermissions": []}
        except boto_errors.ClientError as error:
            if get_code(error) != "InvalidGroup.Duplicate":
                raise
        groups = ec2.describe_security_groups(
            Filters=[
                {"Name": "group-name", "Values": [name]},
                {"Name": "vpc-id", "Values": [vpc]},
            ]
        )["SecurityGroups"]
    if not groups:
        raise BusyError(
            f"AWS does not list the security group {name} yet",
            why="another process has just created it",
        )
    return groups[0]


def list_our_groups(ec2: EC2Client, group_ids: list[str]) -> list[SecurityGroupTypeDef]:
    """Return those of these groups that have labctl's tag."""
    if not group_ids:
        return []
    with translate_errors():
        reply = ec2.describe_security_groups(
            Filters=tags.make_filters({"Name": "group-id", "Values": group_ids})
        )
    return reply["SecurityGroups"]


def admit_networks(
    ec2: EC2Client, group: SecurityGroupTypeDef, networks: Iterable[str], owner: str
) -> list[str]:
    """Admit exactly these networks of this owner to SSH; return those that are new.

    Other owners' networks stay: their own labctl renews them.
    """
    mark = _owner_mark(owner)
    allowed = set(networks)
    mine, everyone = set(), set()
    for rule in group.get("IpPermissions", ()):
        if rule.get("FromPort") != tags.SSH_PORT:
            continue
        for entry in (*rule.get("IpRanges", ()), *rule.get("Ipv6Ranges", ())):
            network = entry.get("CidrIp") or entry.get("CidrIpv6")
            everyone.add(network)
            if entry.get("Description") == mark:
                mine.add(network)
    new = sorted(allowed - everyone)
    if new:
        rules = [_build_rule(network, mark) for network in new]
        _change_rules(ec2.authorize_security_group_ingress, group, rules)
    if stale := sorted(mine - allowed):
        rules = [_build_rule(network, mark) for network in stale]
        _change_rules(ec2.revoke_security_group_ingress, group, rules)
    return new


def admit_members(ec2: EC2Client, group: SecurityGroupTypeDef, *, efa: bool) -> None:
    """Let the servers of this group reach one another at every port, and nobody else.

    An Elastic Fabric Adapter "requires a security group that allows all inbound and outbound
    traffic to and from the security group itself" (EC2 User Guide, Get started with EFA and NCCL).
    """
    rule: IpPermissionTypeDef = {
        "IpProtocol": "-1",
        "UserIdGroupPairs": [{"GroupId": group["GroupId"], "Description": "labctl gang"}],
    }
    _change_rules(ec2.authorize_security_group_ingress, group, [rule])
    if efa:
        _change_rules(ec2.authorize_security_group_egress, group, [rule])


def _change_rules(
    call: Callable[..., object], group: SecurityGroupTypeDef, rules: list[IpPermissionTypeDef]
) -> None:
    with translate_errors():
        try:
            call(GroupId=group["GroupId"], IpPermissions=rules)
        except boto_errors.ClientError as error:
            # The same owner is doing this in another process at the same time.
            if get_code(error) not in ("InvalidPermission.Duplicate", "InvalidPermission.NotFound"):
                raise


def _owner_mark(owner: str) -> str:
    """Return the description that marks an owner's rules."""
    safe = "".join(c for c in owner if c.isascii() and (c.isalnum() or c in "._-@"))
    return f"labctl {safe}"[:255]


def _build_rule(network: str, mark: str) -> IpPermissionTypeDef:
    rule: IpPermissionTypeDef = {
        "IpProtocol": "tcp",
        "FromPort": tags.SSH_PORT,
        "ToPort": tags.SSH_PORT,
    }
    if ":" in network:
        return {**rule, "Ipv6Ranges": [{"CidrIpv6": network, "Description": mark}]}
    return {**rule, "IpRanges": [{"CidrIp": network, "Description": mark}]}
