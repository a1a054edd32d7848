"""`labctl move`: the same run goes on at another server, and the old one ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lab_directory import LabDirectory, make_lab

from labctl.providers.local import engine
from labctl.providers.local.container import LAB_ID_LABEL

pytestmark = [pytest.mark.engine, pytest.mark.long]

# Shell: a checkpoint a step until the data set says go on and forty are made; SIGTERM saves one.
TRAIN = """\
cd /lab/run
step=$(ls checkpoints | tail -n 1 | tr -dc 0-9 | sed 's/^0*//')
step=${{step:-0}}
[ ! -x /lab/code/helper.sh ] || echo "helper is executable"
echo "{version} begins at $step"
save() {{
  mkdir ".new-$step"
  echo "$step" > ".new-$step/model"
  size=$(wc -c < ".new-$step/model")
  printf '{{"step": %d, "files": {{"model": {{"size": %d}}}}}}' "$step" "$size" \\
    > ".new-$step/manifest.json"
  mv ".new-$step" checkpoints/step-$(printf %08d "$step")
}}
trap 'step=$((step + 1)); save; echo "{version} saved $step at SIGTERM"; exit 0' TERM
while [ "$step" -lt 40 ] || [ ! -e /lab/data/go/on ]; do
  step=$((step + 1))
  save
  echo "step $step"
  sleep 0.2
done
echo "{version} ends"
"""


@pytest.fixture
def lab(
    tmp_path_factory: pytest.TempPathFactory, base_image: str, server_image: str
) -> Iterator[LabDirectory]:
    made = make_lab(tmp_path_factory.mktemp("move"), "mover", base_image)
    (made.root / "go").mkdir()
    (made.root / "go" / "nothing").touch()
    with (made.root / "lab.yaml").open("a") as file:
        file.write("data: {go: ./go}\n")
    (made.root / "train.sh").write_text(TRAIN.format(version="first"))
    (made.root / "helper.sh").write_text("#!/bin/sh\n")
    (made.root / "helper.sh").chmod(0o755)
    try:
        made.server_id = made.json("up", "--yes")["server"]["id"]
        yield made
    finally:
        made.labctl("down", "--yes", "--discard")


def _list_containers(lab: LabDirectory) -> list[str]:
    lab_id = lab.json("status")["lab_id"]
    with engine.connect() as docker:
        found = docker.containers.list(all=True, filters={"label": f"{LAB_ID_LABEL}={lab_id}"})
        return sorted(str(one.name) for one in found)


def test_a_run_moves_with_its_code_its_checkpoints_and_its_follower(lab: LabDirectory) -> None:
    lab.run("echo ended > /lab/run/checkpoints/kept", "--id", "before")
    follower = lab.start("run", "--recover", "--yes", "--id", "night")
    follower.said("step 2\n")
    lab.labctl("run", "--id", "day", "--detach")
    (lab.root / "train.sh").write_text(TRAIN.format(version="second"))
    result = lab.json("move", "--provider", "local", "--yes")
    new_id = result["server"]["id"]
    assert new_id != lab.server_id
    assert sorted(result["resumed"]) == ["day", "night"]
    assert _list_containers(lab) == [new_id], "the old server is gone"
    status = lab.json("status")
    assert status["server"]["id"] == new_id
    assert status["moving"] == []
    assert status["server"]["alias"] == "mover", "ssh knows it by the name of the old one"
    (lab.root / "go" / "on").touch()
    lab.labctl("push")
    lab.server_id = new_id
    follower.end(0)
    said = follower.stdout
    begun = [line for line in said.splitlines() if "begins at" in line]
    assert begun[0] == "first begins at 0"
    saved = next(line for line in said.splitlines() if "at SIGTERM" in line).split()[2]
    assert begun[1] == f"first begins at {saved}", "no step is lost, and its own code goes on"
    assert "moved from local container; resuming here (attempt 2) ---" in said
    assert said.rstrip().endswith("first ends")
    lab.labctl("logs", "-f", "day")
    assert lab.seen("day")["exit_code"] == 0
    assert "first begins at 0" in lab.log("day")
    assert lab.log("day").count("helper is executable") == 2
    assert (lab.root / "runs" / "before" / "checkpoints" / "kept").read_text() == "ended\n"
    assert "before" in lab.labctl("pull", "before").stdout
