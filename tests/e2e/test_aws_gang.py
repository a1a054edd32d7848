"""A lab with several servers at AWS: placed close together, and nothing of it is left.

Instances run and refuse connections. Every test must leave the account empty (see `bed`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from aws_bed import (
    DOWN,
    MADE_BY_GANG,
    ORPHANS,
    SSH_DEADLINE,
    TAKEN_OF_GANG,
    UP,
    AwsLab,
    Bed,
)

from labctl.rehearsal.aws.scenario import Capacity, Delays
from labctl.rehearsal.core.scenario import Loss

pytest_plugins = ["aws_fixtures"]

QUICK = {SSH_DEADLINE: 0.1}


@pytest.fixture
def gang(bed: Bed) -> AwsLab:
    lab = bed.lab()
    lab.become_gang()
    return lab


def up_both(lab: AwsLab) -> str:
    """`up` until both servers are on record, then kill -9, as nobody answers; what it said."""
    said = lab.up_until_ssh()
    assert len(lab.bed.living()) == 2, said
    return said


def gang_of_other_types(bed: Bed, tmp_path: Path) -> AwsLab:
    """A gang that does not share the list of types of the other labs."""
    lab = bed.lab(XDG_CACHE_HOME=str(tmp_path / "cache"))
    lab.become_gang()
    return lab


def groups(bed: Bed) -> list[str]:
    described = bed.client("ec2").describe_placement_groups()["PlacementGroups"]
    return [group["GroupName"] for group in described]


def test_servers_share_a_placement_group_that_down_removes(bed: Bed, gang: AwsLab) -> None:
    with bed.changes() as made:
        said = gang.labctl(*UP, code=75, settings=QUICK)
    assert "the servers are placed close together, with a placement group" in said
    # Each effect is in the lists, and one placement group is for both servers.
    assert set(made) == {*MADE_BY_GANG, *TAKEN_OF_GANG}
    assert (made["CreatePlacementGroup"], made["DeletePlacementGroup"]) == (1, 1)
    assert bed.left() == []


def test_without_room_for_both_the_next_zone(bed: Bed, gang: AwsLab) -> None:
    first_zone = gang.json("offers")["offers"][0]["zone"]
    with bed.set(capacity=(Capacity(zone=first_zone, left=1),)):
        up_both(gang)
    (name,) = set(bed.placed().values())
    assert name.startswith(f"labctl-{gang.id}-us-east-1")
    assert name != f"labctl-{gang.id}-{first_zone}"
    gang.labctl(*DOWN)


@pytest.mark.long
def test_zones_with_room_for_three_of_four_leave_nothing(bed: Bed) -> None:
    gang = bed.lab()
    gang.become_gang(4)
    zones = {offer["zone"] for offer in gang.json("offers")["offers"]}
    rooms = tuple(Capacity(zone=zone, left=3) for zone in sorted(zones))
    with bed.set(capacity=rooms), bed.changes() as made:
        said = " ".join(gang.labctl(*UP, code=75).split())
    assert "aws has no zone with room for 4 servers of digits" in said
    assert "not 4 x g4dn.xlarge in us-east-1" in said
    assert "labctl up --gpu MODEL" in said
    # The first servers of a zone are created before it has no room left.
    assert made["RunInstances"] > made["CreatePlacementGroup"] > 1
    assert bed.left() == []


def test_orphans_find_the_group_of_a_lab_whose_state_is_gone(bed: Bed, gang: AwsLab) -> None:
    bed.killed_at(gang, UP, "lost", "CreatePlacementGroup")
    (name,) = groups(bed)
    gang.forget()
    listed = gang.labctl("orphans")
    assert f"placement-group {name}.us-east-1: free, unused" in " ".join(listed.split())
    gang.labctl(*ORPHANS)
    assert bed.left() == []


@pytest.mark.parametrize("kind", ["lost", pytest.param("dropped", marks=pytest.mark.long)])
def test_a_lost_reply_leads_to_no_second_group(bed: Bed, gang: AwsLab, kind: str) -> None:
    losses = tuple(Loss(action=a) for a in ("CreatePlacementGroup", "DeletePlacementGroup"))
    with bed.set(**{kind: losses}), bed.changes() as made:
        gang.labctl(*UP, code=75, settings=QUICK)
    assert (made["CreatePlacementGroup"], made["DeletePlacementGroup"]) == (2, 2)
    assert made["RunInstances"] == 2
    assert bed.left() == []


@pytest.mark.long
def test_the_group_is_removed_after_slow_ends_and_made_anew(bed: Bed, gang: AwsLab) -> None:
    """AWS refuses to delete a group whose instances are ending, and lists it as deleting."""
    with bed.set(delays=Delays(terminate=1.0)):
        up_both(gang)
        gang.labctl(*DOWN)
        # The same name again, while the first group is still being deleted.
        up_both(gang)
        assert len(set(bed.placed().values())) == 1
        gang.labctl(*DOWN)


@pytest.mark.long
def test_a_type_that_cannot_be_placed_together_goes_without(bed: Bed, tmp_path: Path) -> None:
    gang = gang_of_other_types(bed, tmp_path)
    with bed.set(types=("m7i-flex.large",)), bed.changes() as made:
        said = gang.labctl(*UP, "--gpu", "none", code=75, settings=QUICK)
    assert "m7i-flex.large cannot be placed close together: the servers only share a zone" in said
    assert not made["CreatePlacementGroup"]


@pytest.mark.long
def test_a_type_with_efa_gets_it_and_an_open_security_group(bed: Bed, tmp_path: Path) -> None:
    gang = gang_of_other_types(bed, tmp_path)
    with bed.set(types=("g4dn.8xlarge",)):
        said = up_both(gang)
        assert "with a placement group and the fast network EFA" in said
        ec2 = bed.client("ec2")
        interfaces = ec2.describe_network_interfaces()["NetworkInterfaces"]
        assert [one["InterfaceType"] for one in interfaces] == ["efa", "efa"]
        filters = [{"Name": "group-name", "Values": [f"labctl-{gang.id}"]}]
        (group,) = ec2.describe_security_groups(Filters=filters)["SecurityGroups"]
        for rules in (group["IpPermissions"], group["IpPermissionsEgress"]):
            pairs = [pair["GroupId"] for rule in rules for pair in rule["UserIdGroupPairs"]]
            assert pairs == [group["GroupId"]]
        gang.labctl(*DOWN)


@pytest.mark.long
def test_a_missing_permission_is_named_and_leaves_nothing(bed: Bed, gang: AwsLab) -> None:
    with bed.set(denied=("CreatePlacementGroup",)):
        said = gang.labctl(*UP, code=1)
    assert "have CreatePlacementGroup allowed" in said
    assert bed.left() == []


# Of the effects of one server, test_aws_kills.py kills at each.
CUTS = [
    *[(kind, "CreatePlacementGroup", 0) for kind in ("dropped", "lost")],
    *[("lost", "RunInstances", skip) for skip in (0, 1)],
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "action", "skip"), CUTS)
@pytest.mark.parametrize("ending", [DOWN, ORPHANS, UP])
def test_killed_at_each_effect(
    bed: Bed, gang: AwsLab, kind: str, action: str, skip: int, ending: tuple[str, ...]
) -> None:
    bed.killed_at(gang, UP, kind, action, skip)
    if ending == ORPHANS:
        gang.forget()
    if ending == UP:
        up_both(gang)
        assert len(set(bed.placed().values())) == 1
        ending = DOWN
    gang.labctl(*ending)
    assert bed.left() == []


@pytest.mark.long
@pytest.mark.parametrize("action", ["TerminateInstances", "DeletePlacementGroup"])
@pytest.mark.parametrize("kind", ["dropped", "lost"])
def test_a_down_that_was_killed_goes_on(bed: Bed, gang: AwsLab, kind: str, action: str) -> None:
    up_both(gang)
    bed.killed_at(gang, DOWN, kind, action)
    gang.labctl(*DOWN)
    assert bed.left() == []
