"""Where a server stands in the network, and who may reach it: one security group for each lab."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from labctl.errors import BusyError, CapacityError, ConnectError, UsageError
from labctl.model import Value
from labctl.providers.aws import tags
from labctl.providers.aws.errors import code_of, is_absent, told

if TYPE_CHECKING:
    from labctl.providers.aws.settings import AwsSettings

ADDRESS_TIMEOUT_S = 5.0
LONGEST_ADDRESS = 64


class Place(Value, frozen=True):
    """A subnet and its network."""

    subnet: str
    vpc: str
    zone: str


def place(ec2: Any, settings: AwsSettings, zone: str) -> Place:
    """The given subnet, else the default one of the zone."""
    from botocore.exceptions import ClientError

    with told():
        try:
            found = (
                ec2.describe_subnets(SubnetIds=[settings.subnet])
                if settings.subnet
                else ec2.describe_subnets(
                    Filters=[
                        {"Name": "default-for-az", "Values": ["true"]},
                        {"Name": "availability-zone", "Values": [zone]},
                    ]
                )
            )["Subnets"]
        except ClientError as error:
            if not is_absent(error):
                raise
            found = []
    if not found:
        raise _no_subnet(ec2, settings, zone)
    one = found[0]
    return Place(subnet=one["SubnetId"], vpc=one["VpcId"], zone=one["AvailabilityZone"])


def _no_subnet(ec2: Any, settings: AwsSettings, zone: str) -> UsageError | CapacityError:
    region = ec2.meta.region_name
    if settings.subnet:
        return UsageError(
            f"the subnet {settings.subnet} is not in {region}",
            why="server.aws.subnet names it",
            hint=f"aws ec2 describe-subnets --region {region}",
        )
    with told():
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
        hint=f"aws ec2 create-default-vpc --region {region}   # or set server.aws.subnet",
    )


def caller_network(settings: AwsSettings) -> str:
    """This machine's own address as the world sees it, as a network of one."""
    from http.client import HTTPException
    from ipaddress import ip_address
    from urllib.request import Request, urlopen

    asked = Request(settings.address_from, headers={"User-Agent": "labctl"})
    try:
        with urlopen(asked, timeout=ADDRESS_TIMEOUT_S) as answer:
            text = answer.read(LONGEST_ADDRESS).decode("ascii").strip()
        address = ip_address(text)
    except (OSError, HTTPException, ValueError) as error:
        raise ConnectError(
            "this machine's own address could not be found",
            why=f"{settings.address_from}: {error}",
            hint="try again, or set server.aws.ssh_from to the networks that may reach SSH",
        ) from error
    return f"{address}/{address.max_prefixlen}"


def group_name(lab_id: str) -> str:
    return f"labctl-{lab_id}"


def ensure_group(ec2: Any, vpc: str, bears: dict[str, str]) -> dict[str, Any]:
    """The lab's security group in a network, as described; made where there is none yet."""
    from botocore.exceptions import ClientError

    name = group_name(bears[tags.LAB_ID])
    with told():
        try:
            made = ec2.create_security_group(
                GroupName=name,
                Description=f"SSH to the servers of the lab {bears[tags.LAB]}",
                VpcId=vpc,
                TagSpecifications=[{"ResourceType": "security-group", "Tags": tags.pairs(bears)}],
            )
            return {"GroupId": made["GroupId"], "IpPermissions": []}
        except ClientError as error:
            if code_of(error) != "InvalidGroup.Duplicate":
                raise
        found = ec2.describe_security_groups(
            Filters=[
                {"Name": "group-name", "Values": [name]},
                {"Name": "vpc-id", "Values": [vpc]},
            ]
        )["SecurityGroups"]
    if not found:
        raise BusyError(f"the security group {name} is not shown yet", why="somebody just made it")
    return dict(found[0])


def groups_of(ec2: Any, group_ids: list[str]) -> list[dict[str, Any]]:
    """Those of these groups that are ours."""
    if not group_ids:
        return []
    with told():
        found = ec2.describe_security_groups(
            Filters=tags.ours({"Name": "group-id", "Values": group_ids})
        )
    return list(found["SecurityGroups"])


def open_to(ec2: Any, group: dict[str, Any], networks: Iterable[str], owner: str) -> list[str]:
    """Let exactly these networks of this owner's reach SSH; returns those that were news.

    Another owner's networks stay: the one who works from there renews them.
    """
    mark = _mark(owner)
    wanted = set(networks)
    mine, everyone = set(), set()
    for rule in group.get("IpPermissions", ()):
        if rule.get("FromPort") != tags.SSH_PORT:
            continue
        for entry in (*rule.get("IpRanges", ()), *rule.get("Ipv6Ranges", ())):
            network = entry.get("CidrIp") or entry.get("CidrIpv6")
            everyone.add(network)
            if entry.get("Description") == mark:
                mine.add(network)
    news = sorted(wanted - everyone)
    if news:
        _change(ec2.authorize_security_group_ingress, group, [_rule(n, mark) for n in news])
    if stale := sorted(mine - wanted):
        _change(ec2.revoke_security_group_ingress, group, [_rule(n, mark) for n in stale])
    return news


def _change(call: Any, group: dict[str, Any], rules: list[dict[str, Any]]) -> None:
    from botocore.exceptions import ClientError

    with told():
        try:
            call(GroupId=group["GroupId"], IpPermissions=rules)
        except ClientError as error:
            # The same caller, twice at once.
            if code_of(error) not in ("InvalidPermission.Duplicate", "InvalidPermission.NotFound"):
                raise


def _mark(owner: str) -> str:
    kept = "".join(c for c in owner if c.isascii() and (c.isalnum() or c in "._-@"))
    return f"labctl {kept}"[:255]


def _rule(network: str, mark: str) -> dict[str, Any]:
    rule: dict[str, Any] = {
        "IpProtocol": "tcp",
        "FromPort": tags.SSH_PORT,
        "ToPort": tags.SSH_PORT,
    }
    if ":" in network:
        return rule | {"Ipv6Ranges": [{"CidrIpv6": network, "Description": mark}]}
    return rule | {"IpRanges": [{"CidrIp": network, "Description": mark}]}
