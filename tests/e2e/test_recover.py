"""`labctl run --recover`: a run goes on when its server is gone, from what was brought here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lab_directory import LabDirectory, make_lab
from lab_servers import wait_for

from labctl.providers.local import engine
from labctl.providers.local.container import LAB_ID_LABEL

pytestmark = pytest.mark.engine

# Shell: a checkpoint a step, until the data set says go on and forty are made.
TRAIN = """\
cd /lab/run
step=$(ls checkpoints | tail -n 1 | tr -dc 0-9 | sed 's/^0*//')
echo "{version} begins at ${{step:-0}}"
step=${{step:-0}}
while [ "$step" -lt 40 ] || [ ! -e /lab/data/go/on ]; do
  step=$((step + 1))
  name=checkpoints/step-$(printf %08d "$step")
  mkdir ".new-$step"
  echo "$step" > ".new-$step/model"
  size=$(wc -c < ".new-$step/model")
  printf '{{"step": %d, "files": {{"model": {{"size": %d}}}}}}' "$step" "$size" \\
    > ".new-$step/manifest.json"
  mv ".new-$step" "$name"
  echo "step $step"
  [ ! -e /lab/data/go/on ] || [ "$step" -lt 40 ] || break
  sleep 0.2
done
echo "{version} ends"
"""


@pytest.fixture(scope="module")
def lab(
    tmp_path_factory: pytest.TempPathFactory, base_image: str, server_image: str
) -> Iterator[LabDirectory]:
    made = make_lab(tmp_path_factory.mktemp("recover"), "again", base_image)
    (made.root / "go").mkdir()
    (made.root / "go" / "nothing").touch()
    with (made.root / "lab.yaml").open("a") as file:
        file.write("data: {go: ./go}\n")
    (made.root / "train.sh").write_text(TRAIN.format(version="first"))
    try:
        made.server_id = made.json("up", "--yes")["server"]["id"]
        yield made
    finally:
        made.labctl("down", "--yes", "--discard")


@pytest.mark.long
def test_a_run_whose_server_is_gone_goes_on_with_its_own_code(lab: LabDirectory) -> None:
    process = lab.start("run", "--recover", "--yes", "--id", "night")
    process.said("step 2\n")
    # What is edited meanwhile is for later runs.
    (lab.root / "train.sh").write_text(TRAIN.format(version="second"))
    wait_for(lambda: len(list((lab.root / "runs" / "night").glob("checkpoints/*"))) > 1)
    (lab.root / "go" / "on").touch()
    with engine.connect() as docker:
        docker.containers.get(lab.server_id).remove(force=True)
    process.end(0)
    said = process.stdout
    begun = [line for line in said.splitlines() if "begins at" in line]
    assert begun[0] == "first begins at 0"
    assert begun[1].startswith("first begins at ")
    step = int(begun[1].rpartition(" ")[2])
    assert step >= 2
    assert "resuming here (attempt 2) ---" in said
    after = said.partition("(attempt 2) ---\n")[2].splitlines()
    assert after[1:-1] == [f"step {number}" for number in range(step + 1, 41)]
    assert after[-1] == "first ends"
    assert lab.seen("night")["exit_code"] == 0
    lab.server_id = lab.json("status")["server"]["id"]
    # The log there is one: what was before the gap, the gap, and what came after it.
    log = lab.log("night")
    assert log.count("begins at 0") == 1
    assert log.endswith("first ends\n")


@pytest.mark.long
def test_two_who_watch_one_run_recover_it_once(lab: LabDirectory) -> None:
    (lab.root / "train.sh").write_text(TRAIN.format(version="twice"))
    (lab.root / "go" / "on").unlink(missing_ok=True)
    words = ("run", "--recover", "--yes", "--id", "twice")
    one = lab.start(*words)
    one.said("step 2\n")
    other = lab.start(*words)
    other.said("step 2\n")
    wait_for(lambda: len(list((lab.root / "runs" / "twice").glob("checkpoints/*"))) > 1)
    (lab.root / "go" / "on").touch()
    before = lab.server_id
    with engine.connect() as docker:
        docker.containers.get(before).remove(force=True)
    one.end(0)
    other.end(0)
    lab.server_id = lab.json("status")["server"]["id"]
    assert lab.server_id != before
    for said in (one.stdout, other.stdout):
        assert said.count("resuming here (attempt 2) ---") == 1
        assert said.endswith("twice ends\n")
    assert "attempt 3" not in lab.log("twice")
    with engine.connect() as docker:
        labels = docker.containers.get(lab.server_id).labels
        labeled = {"label": f"{LAB_ID_LABEL}={labels[LAB_ID_LABEL]}"}
        servers = [
            one.name
            for one in docker.containers.list(all=True, ignore_removed=True, filters=labeled)
        ]
    assert servers == [lab.server_id]


def test_a_run_that_ended_by_itself_is_not_recovered(lab: LabDirectory) -> None:
    done = lab.labctl("run", "--recover", "--yes", "--", "sh", "-c", "echo no; exit 3", code=3)
    assert done.stdout.count("no\n") == 1
    assert "failed with exit code 3" in done.stderr


def test_what_recover_cannot_go_with_is_said(lab: LabDirectory) -> None:
    done = lab.labctl("run", "--recover", "--detach", code=255)
    assert "--recover cannot be combined with --detach" in done.stderr


def test_a_server_that_its_owner_ended_is_not_replaced(lab: LabDirectory) -> None:
    (lab.root / "go" / "on").unlink(missing_ok=True)
    (lab.root / "train.sh").write_text(TRAIN.format(version="third"))
    process = lab.start("run", "--recover", "--yes", "--id", "third")
    process.said("step 2\n")
    lab.labctl("down", "--yes", "--discard")
    process.end(255)
    assert "was removed by `labctl down`" in process.stderr
    assert lab.json("status")["server"] is None
