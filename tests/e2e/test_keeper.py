"""`run --recover --keeper HOST`: the laptop is gone, the keeper recovers, the laptop comes back."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aws_bed import AwsLab
from keeper_bed import KeeperBox, keeper_box, needs_sshd
from lab_servers import wait_for
from test_reclaim import CLOUD_YAML, DOCKERFILE, PROFILE, TRAIN

pytestmark = [pytest.mark.engine, needs_sshd]
pytest_plugins = ["aws_fixtures"]

BUCKET = "handed"
SAYS = 'echo "token $E2E_TOKEN $(cat /lab/data/set/one)"\n'


@pytest.fixture
def lab(machines: Any, small_image: str) -> Iterator[AwsLab]:
    """A lab on a spot instance, with a store."""
    made = machines.lab(
        "handed", LABCTL_BASE_IMAGE=small_image, LABCTL_SERVER_AWS_INSTANCE_PROFILE=PROFILE
    )
    text = CLOUD_YAML.format(name="handed", bucket=BUCKET).replace("mirror: 1h", "mirror: 5s")
    (made.root / "lab.yaml").write_text(f"{text}secrets: [E2E_TOKEN]\ndata: {{set: ./set}}\n")
    (made.root / "Dockerfile").write_text(DOCKERFILE)
    (made.root / "train.sh").write_text(SAYS + TRAIN)
    (made.root / "set").mkdir()
    (made.root / "set" / "one").write_text("of the data")
    made.environ["E2E_TOKEN"] = "shown-nowhere"
    machines.client("s3").create_bucket(Bucket=BUCKET)
    made.labctl("up", "--yes")
    yield made
    made.labctl("down", "--yes", "--discard")


@pytest.fixture
def box(lab: AwsLab, tmp_path: Path) -> Iterator[KeeperBox]:
    """The keeper's machine: AWS credentials of its own, and nothing that the laptop has set."""
    around = {
        name: value
        for name, value in lab.environ.items()
        if not name.startswith(("LABCTL_", "E2E_")) or name == "LABCTL_SERVER_AWS_ADDRESS_FROM"
    }
    with keeper_box(tmp_path / "keeper", around) as made:
        made.known_to(lab.environ)
        yield made


def stored(lab: AwsLab, text: str) -> bool:
    listed = lab.bed.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", [])
    return any(text in one["Key"] for one in listed)


def run_of(box: KeeperBox) -> dict[str, Any]:
    (one,) = box.listed()["labs"]
    found: dict[str, Any] = one["runs"][0]
    return found


def taken(lab: AwsLab, server: str) -> None:
    """AWS has ended it, and gave no notice."""
    instance = server.partition(".")[0]
    lab.bed.client("ec2").terminate_instances(InstanceIds=[instance])
    lab.bed.rehearsal.wait(instance, "terminated")


def ended_amid_a_recovery(lab: AwsLab, box: KeeperBox, server: str) -> None:
    """A keeper that is told to end while it makes a server ends at once; the next one goes on."""
    assert box.stop(signal.SIGINT) == 0
    taken(lab, server)
    begun = box.said.count("creating a server")
    box.start()
    wait_for(lambda: box.said.count("creating a server") > begun)
    before = time.monotonic()
    assert box.stop() == 0
    assert time.monotonic() - before < 45
    recovered = box.said.count("resuming night: done")
    box.start()
    wait_for(lambda: box.said.count("resuming night: done") > recovered)
    assert len(lab.bed.living()) == 1


@pytest.mark.long
def test_the_keeper_recovers_while_the_laptop_is_gone(lab: AwsLab, box: KeeperBox) -> None:
    box.start()
    first = lab.json("status")["server"]["id"]
    laptop = lab.start("run", "--recover", "--keeper", box.host, "--id", "night", "--yes")
    wait_for(lambda: "from 0" in laptop.said or laptop.done.is_set())
    laptop.kill()
    assert laptop.wait() == -signal.SIGKILL, laptop.said
    checkpoint = "runs/night/files/checkpoints/step-00000025/manifest.json"
    wait_for(lambda: stored(lab, checkpoint) and stored(lab, "night/index.json"))

    taken(lab, first)
    box.heard("resuming night: done")
    assert box.rss_bytes() < 60e6

    # The laptop is back, and asks nobody but itself to be asked.
    said = lab.json("status")
    assert said["keeper"] == box.host
    assert said["server"]["id"] != first
    assert said["runs"][0]["state"] == "running"
    assert said["runs"][0]["server_id"] == said["server"]["id"]
    lab.labctl("status")
    costs = lab.json("cost")["costs"]["servers"]
    assert [one["server_id"] for one in costs] == [first, said["server"]["id"]]
    assert [one["running"] for one in costs] == [False, True]
    log = lab.labctl("logs", "night")
    assert log.count("token shown-nowhere of the data") == 2
    assert "resuming here (attempt 2) ---" in log

    ended_amid_a_recovery(lab, box, said["server"]["id"])

    lab.labctl("down", "--yes")
    assert box.listed()["labs"] == []
    home = lab.root / "runs" / "night"
    assert (home / "checkpoints" / "step-00000025" / "manifest.json").exists()
    assert lab.json("status")["server"] is None
    begun = time.monotonic()
    assert box.stop() == 0
    assert time.monotonic() - begun < 45
    secret = subprocess.run(["grep", "-rl", "shown-nowhere", str(box.home)], capture_output=True)
    assert secret.stdout == b"", "a lab that was dropped leaves its secrets nowhere"
    assert json.loads(lab.labctl("status", "--json"))["keeper"] == ""
