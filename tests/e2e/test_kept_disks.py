"""Results that could be sent nowhere outlive their server on its disk, and come back from there.

On a rehearsed EC2 whose machines boot. Without an instance profile labctl has EC2 keep the disk
from the start; with one the server asks for it at its end.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from aws_bed import AwsLab, Bed
from lab_servers import wait_for

from labctl.rehearsal.aws.scenario import Capacity, Spot

pytest_plugins = ["aws_fixtures"]
pytestmark = pytest.mark.engine

IMAGE = "shell:1"
# The server's own shell as an image: sending one there takes longer than all the rest.
IMPORT = """\
programs="/bin/bash /bin/sh /bin/sleep /bin/mkdir /bin/head /bin/cat /usr/bin/env /usr/bin/id"
tar -chP $programs $(ldd $programs | grep -o '/lib[^ ]*' | sort -u) | docker import - shell:1"""
TRAIN = """\
cd /lab/run/checkpoints; mkdir first; head -c 300000 /dev/urandom > first/model
trap 'mkdir last; echo weights > last/model; echo {} > last/manifest.json; exit 3' TERM
echo begun; while :; do sleep 0.1; done"""


@pytest.fixture
def lab(machines: Bed) -> AwsLab:
    return written(machines.lab())


@pytest.fixture
def lab_with_profile(machines: Bed) -> AwsLab:
    return written(machines.lab(LABCTL_SERVER_AWS_INSTANCE_PROFILE="labctl-server"))


def written(lab: AwsLab) -> AwsLab:
    """The lab with its lab.yaml and a file of code."""
    run = json.dumps(["bash", "-c", TRAIN])
    server = "{provider: aws, gpu: auto, spot: only}"
    (lab.root / "lab.yaml").write_text(
        f"lab: digits\nimage: {IMAGE}\nrun: {run}\nserver: {server}\n"
    )
    (lab.root / "train.py").write_text("steps = 1\n")
    return lab


def sh(lab: AwsLab, line: str) -> str:
    """A line on the lab's server, as its account."""
    alias = lab.json("status")["server"]["alias"]
    words = ["ssh", "-F", str(lab.home / ".ssh" / "config"), alias, line]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def instance(lab: AwsLab) -> str:
    return str(lab.json("status")["server"]["id"]).partition(".")[0]


def zone(lab: AwsLab) -> str:
    return str(lab.json("status")["server"]["offer"]["zone"])


def trained(lab: AwsLab) -> str:
    """A server with a run that has written a checkpoint and goes on, and code edited there."""
    said = lab.labctl("up", "--yes", "--ttl", "2h")
    assert "its disk is kept for 14 days" in said
    assert " a month; labctl down removes the server and the disk" in said
    sh(lab, IMPORT)
    lab.labctl("run", "--detach", "--id", "night")
    place = "labctl/digits/runs/night/checkpoints/first"
    wait_for(lambda: "300000" in sh(lab, f"stat -c %s {place}/model || true"))
    sh(lab, "echo 'steps = 2' > labctl/digits/code/train.py")
    return sh(lab, f"sha256sum {place}/model").split()[0]


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.long
def test_results_that_are_nowhere_else_outlive_the_server_and_come_home(
    lab: AwsLab, machines: Bed
) -> None:
    sha256 = trained(lab)
    first, there = instance(lab), zone(lab)
    assert "kept disk" not in lab.labctl("orphans", code=1), "it is a part of the server"
    assert lab.json("status", "--refresh")["server"]["state"] == "running"
    lab.labctl("up", "--yes", "--budget", "0.001")
    machines.rehearsal.wait(first, "terminated", 300)

    said = lab.labctl("status", "--refresh")
    assert "no server" in said
    assert "kept disk vol-" in said
    assert " a month, kept until 20" in said
    assert " a month, kept until 20" in lab.labctl("cost")
    assert "kept disk vol-" in lab.labctl("orphans", code=1)
    said = lab.labctl("pull", code=4)
    assert "its results are on vol-" in said
    assert "next: labctl up\n        labctl pull" in said
    # Neither ends it: its time is not over, and what is on it is nowhere else.
    assert "kept disk vol-" in lab.labctl("orphans", "--terminate", "--yes", code=1)
    assert "left: volume vol-" in lab.labctl("down", "--yes", code=1)

    other = next(f"us-east-1{letter}" for letter in "abcd" if f"us-east-1{letter}" != there)
    prices = {f"{kind}/{other}": 0.01 for kind in ("g4dn.xlarge", "g5.xlarge")}
    with machines.set(spot=Spot(prices=prices)):
        said = lab.labctl("up", "--yes")
    assert f"holds earlier results: trying {there} first" in said
    assert "1 run with" in said
    assert "1 edited file" in said
    assert zone(lab) == there

    # The same again, with the state lost and after a kill in the middle of another run's copy.
    runs = "labctl/digits/runs"
    sh(lab, f"rm -r {runs}/night && mkdir -p {runs}/.restoring-night/code && touch {runs}/own")
    lab.forget()
    assert "1 run with" in lab.labctl("up", "--yes")
    assert sh(lab, f"ls -A {runs}").split() == ["night", "own"]
    assert sh(lab, f"find {runs} labctl/digits/code ! -user ubuntu") == ""
    assert sh(lab, "grep labctl-kept /proc/mounts || true") == ""
    sh(lab, f"rm {runs}/own")

    lab.labctl("pull", "night")
    home = lab.root / "runs" / "night" / "checkpoints"
    assert hash_of(home / "first" / "model") == sha256
    assert (home / "last" / "model").read_text() == "weights\n", "the end waited for it"
    [run] = lab.json("status", "--refresh")["runs"]
    assert (run["state"], run["stopped_by"], run["exit_code"]) == ("lost", "budget", 3)
    assert "train.py" in lab.labctl("pull", "--code")
    assert (lab.root / "train.py").read_text() == "steps = 2\n"
    said = lab.labctl("down", "--yes")
    assert "Nothing is left running or billing" in said
    assert machines.left() == []
    assert "kept disk" not in lab.labctl("cost")


@pytest.mark.long
def test_what_cannot_be_had_stays_and_is_told_until_its_time_is_over(
    lab_with_profile: AwsLab, machines: Bed
) -> None:
    lab = lab_with_profile
    lab.labctl("up", "--yes")
    lab.labctl("push")
    there, first = zone(lab), instance(lab)
    run = "labctl/digits/runs/day"
    sh(lab, f"mkdir -p {run}/checkpoints {run}/.labctl && echo weights > {run}/checkpoints/model")
    sh(lab, f"""echo '{{"outputs": ["checkpoints"]}}' > {run}/.labctl/spec.json""")
    [volume] = machines.client("ec2").describe_volumes()["Volumes"]
    lab.labctl("up", "--yes", "--budget", "0.001")
    machines.rehearsal.wait(first, "terminated", 300)
    with machines.set(capacity=(Capacity(zone=there),)):
        said = lab.labctl("up", "--yes")
    assert zone(lab) != there
    assert f"cannot restore the files on {volume['VolumeId']}" in said
    assert f"it is in {there}, the server in {zone(lab)}" in said
    assert "the disk is kept: " in said
    over = [{"Key": "labctl:expires", "Value": "1700000000"}]
    machines.client("ec2").create_tags(Resources=[volume["VolumeId"]], Tags=over)
    said = lab.labctl("down", "--yes")
    assert f"removed the kept disk {volume['VolumeId']}: expired on 2023-11-1" in said
    assert machines.left() == []
