"""Place the servers of a gang close to each other: a cluster placement group for each zone.

A cluster placement group is in one zone as long as it has instances, which AWS may list for a
while after their end. With a group for each zone, the next zone never waits for the one before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labctl.errors import BusyError
from labctl.lazy import lazy_imports
from labctl.model import Offer
from labctl.providers.aws import tags
from labctl.providers.aws.errors import get_code, is_absent, translate_errors

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

with lazy_imports(__name__):
    from botocore import exceptions as boto_errors

# States in which a group accepts no instances anymore, and its name is not free yet.
ENDING = ("deleting", "deleted")


def placement_group_name(lab_id: str, zone: str) -> str:
    return f"labctl-{lab_id}-{zone}"


def ensure_placement_group(ec2: EC2Client, zone: str, lab_tags: dict[str, str]) -> str:
    """Return the name of the gang's placement group in a zone; create it if missing.

    BusyError while AWS is still deleting the group of an earlier `up`, or does not list it yet.
    """
    name = placement_group_name(lab_tags[tags.LAB_ID], zone)
    with translate_errors():
        try:
            ec2.create_placement_group(
                GroupName=name,
                Strategy="cluster",
                TagSpecifications=[
                    {"ResourceType": "placement-group", "Tags": tags.as_pairs(lab_tags)}
                ],
            )
            return name
        except boto_errors.ClientError as error:
            if get_code(error) != "InvalidPlacementGroup.Duplicate":
                raise
    if _get_state(ec2, name) not in ("pending", "available"):
        raise BusyError(
            f"AWS has the placement group {name}, but it cannot be used yet",
            why="AWS is still deleting it, or does not list it yet",
        )
    return name


def _get_state(ec2: EC2Client, name: str) -> str:
    """Return the state of a placement group, "" if AWS does not list it."""
    with translate_errors():
        try:
            groups = ec2.describe_placement_groups(GroupNames=[name])["PlacementGroups"]
        except boto_errors.ClientError as error:
            if not is_absent(error):
                raise
            return ""
    return str(groups[0].get("State", "")) if groups else ""


def describe_gang(offer: Offer) -> str:
    """Say in one line, before they are created, how servers of this type are connected."""
    if not offer.cluster_placement:
        return f"{offer.type} cannot be placed close together: the servers only share a zone"
    network = " and the fast network EFA" if offer.rdma else ""
    return f"the servers are placed close together, with a placement group{network}"
