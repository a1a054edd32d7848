"""What AWS, the network and the person do wrong: each error as a person sees it, and what is left.

Instances run and refuse connections. Every test must leave the account empty (see `bed`).
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from aws_bed import DOWN, GONE_DEADLINE, MADE, ORPHANS, REGION, SSH_DEADLINE, TAKEN, UP, Bed
from lab_servers import wait_for

from labctl.lab import Lab
from labctl.rehearsal.aws.scenario import Capacity, Delays, VcpuQuotas
from labctl.rehearsal.core.scenario import Loss, Throttle
from labctl.servers.adoption import adopt
from labctl.state import State

pytest_plugins = ["aws_fixtures"]

PAGE = 4096
QUICK = {SSH_DEADLINE: 0.1}


def told(said: str, *parts: str) -> None:
    """The message has these parts in this order: what failed, why, and what to type next."""
    place = said.find("labctl: ")
    for part in parts:
        place = said.find(part, place)
        assert place >= 0, f"no {part!r} in its place:\n{said}"


# Before anything is made.


@pytest.mark.parametrize(
    "command",
    [
        ("up", "--yes"),
        ("down", "--yes"),
        pytest.param(("offers",), marks=pytest.mark.long),
        pytest.param(("orphans",), marks=pytest.mark.long),
    ],
)
def test_no_credentials(bed: Bed, command: tuple[str, ...]) -> None:
    lab = bed.lab(AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
    said = lab.labctl(*command, code=1)
    told(said, "no AWS credentials were found", "next: aws sso login")


def test_expired_credentials(bed: Bed) -> None:
    with bed.set(expired=True), bed.changes() as made:
        said = bed.lab().labctl(*UP, code=1)
    told(said, "the AWS credentials have expired", "(ExpiredToken)", "next: aws sso login")
    assert not made


@pytest.mark.parametrize("action", ["DescribeInstances", "RunInstances"])
def test_a_missing_permission(bed: Bed, action: str) -> None:
    with bed.set(denied=(action,)):
        said = bed.lab().labctl(*UP, code=1)
    told(said, f"the account may not do {action}", "not authorized", f"have {action} allowed")
    assert bed.left() == []


def test_a_deadline_that_is_not_permitted_is_told_and_not_missed(bed: Bed) -> None:
    lab = bed.lab()
    with bed.set(denied=("scheduler:*",)):
        said = lab.labctl(*UP, code=75, settings=QUICK)
    assert "nothing at aws ends the server if it hangs: the account may not do Create" in said


@pytest.mark.parametrize(
    ("setting", "value", "code", "parts"),
    [
        ("AMI", "ami-0123456789abcdef0", 2, ("ami-0123456789abcdef0 is not in us-east-1", "ami")),
        ("AMI", "/aws/service/none", 2, ("/aws/service/none is not in us-east-1", "not found")),
        ("REGIONS", "eu-west-1", 1, ("may not use this region", "OptIn", "labctl config")),
        ("SUBNET", "subnet-0123456789abcdef0", 2, ("is not in us-east-1", "describe-subnets")),
    ],
)
def test_a_wrong_setting(
    bed: Bed, setting: str, value: str, code: int, parts: tuple[str, ...]
) -> None:
    lab = bed.lab(**{f"LABCTL_SERVER_AWS_{setting}": value})
    with bed.changes() as made:
        told(lab.labctl(*UP, code=code), *parts)
    assert not made


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (("--gpu", "H100"), 4, ("no machine in us-east-1 that fits", "gpu H100", "labctl offers")),
        (("--max-price", "0.01"), 4, ("max_price 0.01 rules out", "the cheapest is g4dn.xlarge")),
        (
            ("--budget", "0.05"),
            3,
            ("has $0.05 left; one hour costs", "does not pay for one hour", "labctl cost"),
        ),
        (("--ttl", "9h"), 2, ("server.ttl: is longer than max_ttl (8h)", "labctl up --help")),
        (("--ttl", "0h"), 2, ("server.ttl: '0h' is out of range", "labctl up --help")),
    ],
)
def test_a_need_that_cannot_be_met(
    bed: Bed, words: tuple[str, ...], code: int, parts: tuple[str, ...]
) -> None:
    with bed.changes() as made:
        told(bed.lab().labctl(*UP, *words, code=code), *parts)
    assert not made


# While it is made.


def test_a_quota_of_zero_fails_at_once_and_leaves_nothing(bed: Bed) -> None:
    with bed.set(quotas=VcpuQuotas(g=0, spot_g=0)), bed.changes() as made:
        said = bed.lab().labctl(*UP, code=1)
    told(said, "All G and VT Spot Instance Requests", "it needs 4 vCPUs", "quotas/L-3819A6DF")
    assert made["RunInstances"] == 1
    assert bed.left() == []


def test_without_capacity_the_next_zone_then_type_then_on_demand(bed: Bed) -> None:
    lab = bed.lab()
    full = (Capacity(market="spot"), Capacity(type="g4dn.*"))
    with bed.set(capacity=full), bed.changes() as made:
        said = lab.labctl(*UP, code=75, settings=QUICK)
    tried = [
        line.split(": aws ")[1].split(" (")[0] for line in said.splitlines() if "  creating" in line
    ]
    assert tried == list(dict.fromkeys(tried)), "one zone was asked twice"
    order = list(dict.fromkeys((words.split()[0], words.split(None, 3)[3]) for words in tried))
    assert order == [
        ("g4dn.xlarge", "spot"),
        ("g5.xlarge", "spot"),
        ("g4dn.xlarge", "on demand"),
        ("g5.xlarge", "on demand"),
    ]
    # One call for each attempt: AWS's own library repeats none.
    assert made["RunInstances"] == len(tried)
    with State(lab.state / "labctl.db", read_only=True) as state:
        tokens = [line.detail["token"] for line in state.list_events(lab_id=lab.id, kind="attempt")]
    assert len(set(tokens)) == len(tried)


def test_no_capacity_at_all(bed: Bed) -> None:
    with bed.set(capacity=(Capacity(),)):
        said = bed.lab().labctl(*UP, code=75)
    told(said, "aws has no machine left", "no g4dn.xlarge spot in us-east-1", "next: labctl offers")
    assert bed.left() == []


@pytest.mark.long
def test_no_capacity_for_all_servers_of_a_lab_leaves_nothing(bed: Bed) -> None:
    lab = bed.lab()
    lab.become_gang()
    with bed.set(capacity=(Capacity(left=1),)):
        said = lab.labctl(*UP, code=75)
    told(
        said,
        "aws has no zone with room for 2 servers of digits",
        "not 2 x g4dn.xlarge in us-",
        "next: labctl offers",
        "labctl up --gpu MODEL",
        "(another type; or lower",
    )
    assert bed.left() == []


@pytest.mark.parametrize("kind", ["lost", "dropped"])
def test_every_call_loses_its_reply_once(bed: Bed, kind: str) -> None:
    losses = tuple(Loss(action=action) for action in (*MADE, *TAKEN))
    before = len(bed.rehearsal.instances)
    with bed.set(**{kind: losses}), bed.changes() as made:
        bed.lab().labctl(*UP, code=75, settings=QUICK)
    # Two calls for each effect, and one server: the token is replayed.
    assert len(bed.rehearsal.instances) == before + 1
    made.pop("UpdateSchedule", None)
    assert made == dict.fromkeys((*MADE, *TAKEN), 2)
    assert bed.left() == []


@pytest.mark.long
def test_throttled_all_the_way(bed: Bed) -> None:
    with bed.set(throttle=(Throttle(action="ec2:*", rate=8, burst=3),)), bed.changes() as made:
        bed.lab().labctl(*UP, code=75, settings=QUICK)
    assert made["CreateSchedule"] == 1
    assert bed.left() == []


def test_describe_lags_create(bed: Bed) -> None:
    lab = bed.lab(LABCTL_SERVER_AWS_SETTLE="10s")
    with bed.set(delays=Delays(visible=1.5)):
        bed.killed_at(lab, UP, "lost", "RunInstances")
        lab.up_until_ssh()
    assert len(bed.living()) == 1
    lab.labctl(*DOWN)


@pytest.mark.parametrize("command", [DOWN, pytest.param(ORPHANS, marks=pytest.mark.long)])
def test_what_is_not_shown_yet_is_waited_for(bed: Bed, command: tuple[str, ...]) -> None:
    lab = bed.lab(LABCTL_SERVER_AWS_SETTLE="3s")
    with bed.set(delays=Delays(visible=2.0)):
        bed.killed_at(lab, UP, "lost", "RunInstances")
        lab.labctl(*command)
    assert bed.left() == []


def test_two_at_once_give_one_server(bed: Bed) -> None:
    lab = bed.lab()
    both = [lab.start(*UP), lab.start(*UP)]
    wait_for(lambda: any("connecting over SSH" in one.said for one in both))
    first = next(one for one in both if "connecting over SSH" in one.said)
    first.kill()
    second = both[1 - both.index(first)]
    wait_for(lambda: "connecting over SSH" in second.said)
    assert "creating a server" not in second.said
    second.kill()
    assert len(bed.living()) == 1
    lab.labctl(*DOWN)


def test_ssh_never_opens(bed: Bed) -> None:
    said = bed.lab().labctl(*UP, code=75, settings=QUICK)
    told(said, "could not log in to digits within 0.1 s", "was removed again", "next: labctl up")
    assert "the server's console is empty" in said
    assert bed.left() == []


# While it ends.


@pytest.mark.long
def test_a_termination_that_is_not_confirmed(bed: Bed) -> None:
    lab = bed.lab()
    lab.up_until_ssh()
    (instance,) = bed.living()
    with bed.set(delays=Delays(terminate=8.0)):
        for _ in range(2):
            said = lab.labctl(*DOWN, code=75, settings={GONE_DEADLINE: 0.5})
            told(
                said,
                f"has not confirmed that {instance}",
                "its last state is: ending",
                "next: labctl down",
            )
            assert lab.json("status")["server"]["state"] == "ending"
        assert "Nothing is left running or billing" in lab.labctl(*DOWN)
    assert lab.json("status")["server"] is None


@pytest.mark.long
def test_down_killed_at_every_effect_goes_on(bed: Bed) -> None:
    lab = bed.lab()
    lab.up_until_ssh()
    for action in TAKEN:
        for kind in ("dropped", "lost"):
            bed.killed_at(lab, DOWN, kind, action)
    lab.labctl(*DOWN)
    assert bed.left() == []


@pytest.mark.parametrize(
    "command",
    [
        ("down", "--yes"),
        UP,
        pytest.param(("status", "-r"), marks=pytest.mark.long),
        pytest.param(("orphans",), marks=pytest.mark.long),
    ],
)
def test_credentials_expire_midway(bed: Bed, command: tuple[str, ...]) -> None:
    lab = bed.lab()
    lab.up_until_ssh()
    (instance,) = bed.living()
    with bed.set(expired=True):
        said = lab.labctl(*command, code=1)
        told(
            said,
            "credentials have expired",
            f"{instance}.us-east-1 is still running",
            "/h until labctl down",
        )
        assert lab.json("status")["server"]["id"] == f"{instance}.us-east-1"
    lab.labctl(*DOWN)


def test_a_lost_reply_and_then_no_credentials_is_no_refusal(bed: Bed) -> None:
    """The attempt stays open: the first call may have made the server, and it had."""
    lab = bed.lab()
    with bed.set(lost=(Loss(action="RunInstances", hold=0.5),), expired=False):
        held = bed.rehearsal.held_calls.get("RunInstances", 0)
        command = lab.start(*UP)
        wait_for(lambda: bed.rehearsal.held_calls.get("RunInstances", 0) > held)
        bed.rehearsal.change(expired=True)
        assert command.wait() == 1
    told(command.said, "have expired", "may have created a", "/h")
    with State(lab.state / "labctl.db", read_only=True) as state:
        assert len(state.list_open_attempts(lab.id)) == 1
    lab.up_until_ssh()
    assert len(bed.living()) == 1
    lab.labctl(*DOWN)


# What is on this machine.


@pytest.mark.long
def test_two_labs_of_one_name_leave_each_other_alone(bed: Bed) -> None:
    mine, theirs = bed.lab(), bed.lab()
    theirs.up_until_ssh()
    (other,) = bed.living()
    mine.up_until_ssh()
    assert len(bed.living()) == 2
    mine.forget()
    mine.labctl("status", "-r")
    assert mine.json("status")["server"]["id"] != f"{other}.us-east-1"
    mine.labctl(*DOWN)
    assert bed.living() == [other]
    assert "had no server" in mine.labctl(*DOWN)
    assert bed.living() == [other]
    theirs.labctl(*DOWN)


@pytest.mark.long
def test_a_record_cut_anywhere_is_rebuilt_from_the_tags(
    bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = bed.lab()
    lab.up_until_ssh()
    server_id = lab.json("status")["server"]["id"]
    record = lab.state / "labctl.db"
    whole = record.read_bytes()
    for name, value in lab.environ.items():
        monkeypatch.setenv(name, value)
    context = Lab.load(lab.root).context
    for length in {*range(0, len(whole), 997), *range(1, len(whole), PAGE), len(whole) - 1}:
        place = tmp_path / f"{length}" / "labctl.db"
        place.parent.mkdir()
        place.write_bytes(whole[:length])
        with State(place) as state:
            assert state.was_rebuilt, length
            fresh = msgspec.structs.replace(context, state=state)
            fresh.__dict__.update(provider=context.provider, connections=context.connections)
            found = adopt(fresh)
            assert found is not None, length
            assert found.id == server_id
            assert state.get_lab_server(lab.id) == found
    context.state.close()
    record.write_bytes(whole[: len(whole) // 2])
    said = lab.labctl("status", "-r")
    assert "record on this machine was rebuilt: the database was" in said
    assert "NOT REACHABLE, aws g4dn.xlarge" in said
    lab.labctl(*DOWN)


# What outlived its server.


@pytest.mark.long
def test_an_expired_kept_disk_goes_with_the_next_command_of_its_lab(bed: Bed) -> None:
    lab, others = bed.lab(), bed.lab("letters")
    lab.labctl("config")
    ec2, over_at = bed.client("ec2"), time.time() + 4
    volumes = {}
    for name, one in {"digits": lab, "letters": others}.items():
        one.labctl("offers")  # its lab's id is made
        kept = {"labctl": "1", "labctl:lab": name, "labctl:lab-id": one.id}
        kept["labctl:expires"] = f"{over_at:.0f}"
        pairs = [{"Key": key, "Value": value} for key, value in kept.items()]
        tags = [{"ResourceType": "volume", "Tags": pairs}]
        made = ec2.create_volume(AvailabilityZone=f"{REGION}a", Size=8, TagSpecifications=tags)
        volumes[name] = made["VolumeId"]
    assert f"kept disk {volumes['digits']}" in lab.labctl("status", "-r")
    wait_for(lambda: time.time() > over_at + 1)
    said = lab.labctl("offers")
    assert f"removed the kept disk {volumes['digits']}: expired on" in said
    assert bed.left() == [f"volume {volumes['letters']}"]
    assert "removed" not in lab.labctl("offers")
    others.labctl(*ORPHANS)
