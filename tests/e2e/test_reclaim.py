"""A server that is taken back: the watchdog on a rehearsed spot instance, and drills on local."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aws_bed import AwsLab, Bed
from lab_directory import LabDirectory, make_lab
from lab_servers import wait_for

pytestmark = pytest.mark.engine
pytest_plugins = ["aws_fixtures"]

PLACE = "/var/lib/labctl/watchdog"
PROFILE = "labctl-server"
EVERY = 25
DOCKERFILE = "ARG BASE=debian:bookworm-slim\nFROM ${BASE}\n"
CLOUD_YAML = """\
lab: {name}
server: {{provider: aws, gpu: auto, spot: only, ttl: 2h, budget: 5}}
image: {{build: .}}
run: sh train.sh
store: s3://{bucket}/labs
mirror: 1h
"""
LOCAL_YAML = (
    "lab: {name}\nserver: {{provider: local, gpu: none}}\nimage: {{build: .}}\nrun: sh train.sh\n"
)
# Shell: twenty steps a second, a checkpoint every EVERY, and one a step on when asked to end.
TRAIN = f"""\
cd /lab/run
step=$(ls checkpoints | tail -n 1 | tr -dc 0-9 | sed 's/^0*//')
step=${{step:-0}}
keep() {{
  name=step-$(printf %08d "$step")
  [ -d "checkpoints/$name" ] && return
  partial=checkpoints/.$name.partial
  mkdir -p "$partial"
  echo "weights of $step" > "$partial/model"
  size=$(wc -c < "$partial/model")
  sum=$(sha256sum < "$partial/model" | cut -d ' ' -f 1)
  printf '{{"step": %d, "files": {{"model": {{"size": %d, "sha256": "%s"}}}}}}' \\
    "$step" "$size" "$sum" > "$partial/manifest.json"
  mv "$partial" "checkpoints/$name"
}}
trap 'sleep 0.5; step=$((step + 1)); keep; echo "stopped at $step"; exit 143' TERM
echo "from $step"
while :; do
  step=$((step + 1))
  echo "{{\\"step\\": $step}}" > logs/.progress && mv logs/.progress logs/progress.json
  [ $((step % {EVERY})) -ne 0 ] || keep
  sleep 0.05
done
"""


def write_lab(root: Path, lab_yaml: str) -> None:
    (root / "lab.yaml").write_text(lab_yaml)
    (root / "Dockerfile").write_text(DOCKERFILE)
    (root / "train.sh").write_text(TRAIN)


# The watchdog on a spot instance


@pytest.fixture
def spot(machines: Bed, small_image: str) -> Iterator[AwsLab]:
    """A lab that trains on a spot instance whose profile may write the lab's bucket."""
    lab = machines.lab(
        "spotted", LABCTL_BASE_IMAGE=small_image, LABCTL_SERVER_AWS_INSTANCE_PROFILE=PROFILE
    )
    write_lab(lab.root, CLOUD_YAML.format(name="spotted", bucket="reclaimed"))
    machines.client("s3").create_bucket(Bucket="reclaimed")
    lab.labctl("up", "--yes")
    yield lab
    lab.labctl("down", "--yes", "--discard")


def decisions(bed: Bed, instance: str) -> dict[str, dict[str, Any]]:
    """What the watchdog has decided, by what it was; the last of each."""
    _, text = bed.rehearsal.execute(instance, f"cat {PLACE}/decisions.jsonl")
    return {row["what"]: row for row in map(json.loads, text.splitlines())}


def decided(bed: Bed, instance: str, what: str) -> dict[str, Any]:
    """Wait until the watchdog has decided `what`."""
    found: dict[str, Any] = wait_for(lambda: decisions(bed, instance).get(what), 120)
    return found


def stored(bed: Bed) -> list[str]:
    found = bed.client("s3").list_objects_v2(Bucket="reclaimed")
    return [one["Key"] for one in found.get("Contents", [])]


@pytest.mark.long
def test_a_recommendation_is_mirrored_and_a_drill_s_notice_ends_the_run_in_time(
    spot: AwsLab,
) -> None:
    bed = spot.bed
    server = spot.json("status")["server"]["id"]
    instance = server.partition(".")[0]
    spot.labctl("run", "--detach", "--id", "taken")
    decided(bed, instance, "watching for reclaim")
    place = "/home/ubuntu/labctl/spotted/runs/taken"
    first = f"checkpoints/step-{EVERY:08d}/manifest.json"
    wait_for(lambda: bed.rehearsal.execute(instance, f"cat {place}/{first}")[0] == 0)

    bed.rehearsal.reclaim(instance, notice_s=120, rebalance_s=3600)
    decided(bed, instance, "rebalance recommended")
    wait_for(lambda: any(key.endswith(f"runs/taken/files/{first}") for key in stored(bed)))
    assert spot.json("status", "--refresh")["runs"][0]["state"] == "running"

    drill = spot.start("rehearse", "reclaim", "--notice", "25s", "--yes", "--json")
    taken = decided(bed, instance, "reclaim notice")
    assert taken["why"].startswith("IMDS says: terminate in")
    decided(bed, instance, "ready for reclaim")
    body = json.loads(bed.rehearsal.execute(instance, f"cat {place}/.labctl/reclaim.json")[1])
    notice, whole = body["notice"], body["whole"]
    assert (notice["kind"], notice["action"]) == ("interruption", "terminate")
    moments = [
        *(notice["heard_at"], body["sigterm_at"], whole["at"], body["ended_at"]),
        *(body["mirrored_at"], notice["ends_at"]),
    ]
    assert moments == sorted(moments), body
    assert body["step"] <= whole["step"]

    assert drill.wait() == 0, drill.said
    done = json.loads(drill.said[drill.said.index("{\n") :])["drill"]
    assert done["announced"]
    assert done["server_id"] == server
    assert done["new_server_id"] not in ("", server)
    assert done["checkpoint"] == whole["checkpoint"]
    assert done["mirrored_at"] < done["gone_at"] < done["first_step_at"]
    assert done["first_step_after"] > whole["step"]
    assert done["lost_steps"] == 0
    assert done["cost_usd"] > 0
    log = spot.labctl("logs", "taken")
    assert "the provider may reclaim this server soon" in log
    assert "the provider reclaims this server in" in log
    assert f"stopped at {whole['step']}" in log
    assert f"from {whole['step']}" in log


# Drills


@pytest.fixture(scope="module")
def drilled(
    tmp_path_factory: pytest.TempPathFactory, base_image: str, server_image: str
) -> Iterator[LabDirectory]:
    lab = make_lab(tmp_path_factory.mktemp("drills"), "drilled", base_image)
    write_lab(lab.root, LOCAL_YAML.format(name="drilled"))
    try:
        lab.server_id = lab.json("up", "--yes")["server"]["id"]
        yield lab
    finally:
        lab.labctl("down", "--yes", "--discard")


@pytest.mark.long
def test_what_could_not_go_on_is_not_killed(drilled: LabDirectory) -> None:
    assert "no run is active" in drilled.labctl("rehearse", "reclaim", "--yes", code=4).stderr
    drilled.labctl("run", "--detach", "--id", "unsaved")
    said = drilled.labctl("rehearse", "reclaim", "unsaved", "--yes", code=4).stderr
    assert "nothing of run unsaved was saved" in said
    drilled.labctl("cancel", "unsaved")


def recoverable(lab: LabDirectory, run: str) -> None:
    """A run that nobody follows any more, and whose first checkpoint at least was pulled.

    A file counts as whole once it has stood still for two seconds.
    """
    process = lab.start("run", "--recover", "--id", run)
    checkpoint = f"{lab.place(run)}/checkpoints/step-{3 * EVERY:08d}"
    wait_for(lambda: "yes" in lab.student(f"[ -d {checkpoint} ] && echo yes", check=False))
    process.popen.send_signal(signal.SIGINT)
    process.end(None)
    lab.labctl("pull", run)


@pytest.mark.long
def test_drills_ask_first_and_tell_what_they_cost(drilled: LabDirectory) -> None:
    recoverable(drilled, "killed")
    refused = drilled.labctl("rehearse", "reclaim", code=3)
    assert "120 s after a notice, its disk is deleted?" in refused.stderr
    assert "killed is running there at step" in refused.stderr
    assert drilled.seen("killed")["state"] == "running"

    done = drilled.json("rehearse", "reclaim", "--without-notice", "--yes")["drill"]
    drilled.server_id = done["new_server_id"]
    assert done["new_server_id"] != done["server_id"]
    assert done["first_step_after"] > EVERY
    assert done["last_step_before"] >= done["first_step_after"]
    assert done["lost_s"] == pytest.approx(done["lost_steps"] / done["steps_per_s"])
    assert done["gone_at"] < done["first_step_at"]
    assert done["recover_s"] == done["first_step_at"] - done["gone_at"]
    assert done["cost_usd"] == 0
    assert done["notice_at"] is None

    said = drilled.labctl("rehearse", "reclaim", "killed", "--notice", "12s", "--yes").stdout
    rows = {line[:16].strip(): line[16:] for line in said.splitlines()}
    assert "12 s before the end; sent to the watchdog" in rows["notice"]
    assert "checkpoints/step-" in rows["checkpoint"]
    assert "lost: " in said
    drilled.server_id = drilled.json("status")["server"]["id"]
    log = drilled.log("killed")
    assert "its server was reclaimed (drill); resuming here (attempt 3)" in log
    drilled.labctl("cancel", "killed")
