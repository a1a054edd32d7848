"""A run over two clouds: its spot server is taken back, it resumes at the other, and moves back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab_directory import LabDirectory, make_lab
from lab_servers import ROOT, wait_for

from labctl.rehearsal.azure import AzureRehearsal, AzureScenario
from labctl.rehearsal.core.images import Building
from labctl.rehearsal.core.scenario import CloudCapacity
from labctl.rehearsal.gcp import GcpRehearsal, GcpScenario

pytestmark = [pytest.mark.engine, pytest.mark.long]

LAB_YAML = """\
lab: digits
run: [python3, train.py]
data: {go: ./go}
server:
  provider: auto
  gpu: T4
  spot: only
  executor: process
  ttl: 2h
"""
# A step each 0.1 s, a checkpoint when it is asked to end, until the data set says go on.
TRAIN = """\
import json, os, pathlib, signal, sys, time
checkpoints = pathlib.Path(os.environ["LABCTL_CHECKPOINT_DIR"])
go_on = pathlib.Path(os.environ["LABCTL_DATA_DIR"], "go", "on")
saved = sorted(checkpoints.glob("*.txt"))
step = int(saved[-1].stem) if saved else 0
print(f"begins at {step}", flush=True)
def save(*_):
    (checkpoints / f"{step:08}.txt").write_text("saved")
    print(f"saved {step}", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
while not go_on.exists():
    step += 1
    if step % 20 == 0:
        print(f"step {step}", flush=True)
    time.sleep(0.1)
print(f"ends at {step}", flush=True)
"""
NOTICE_S = 30


@dataclass
class Market:
    lab: LabDirectory
    azure: AzureRehearsal
    gcp: GcpRehearsal

    @property
    def alive(self) -> list[tuple[str, str]]:
        every = (("azure", self.azure.instances), ("gcp", self.gcp.instances))
        return [
            (name, instance)
            for name, instances in every
            for instance, state in instances.items()
            if state != "ended"
        ]


@pytest.fixture
def market(tmp_path: Path, base_image: str, gpu_image: str) -> Iterator[Market]:
    building = Building(
        data_dir=ROOT, base_image=base_image, progress=lambda text, done, total: None
    )
    with ExitStack() as stack:
        azure = stack.enter_context(AzureRehearsal(AzureScenario(image=gpu_image), building))
        gcp = stack.enter_context(GcpRehearsal(GcpScenario(image=gpu_image), building))
        lab = make_lab(tmp_path, "digits", base_image)
        lab.environ |= {**azure.environment, **gcp.environment}
        (lab.root / "lab.yaml").write_text(LAB_YAML)
        (lab.root / "train.py").write_text(TRAIN)
        (lab.root / "go").mkdir()
        (lab.root / "go" / "nothing").touch()
        try:
            yield Market(lab, azure, gcp)
        finally:
            lab.labctl("down", "--yes", "--discard", code=None)


def test_a_run_resumes_at_another_cloud_and_moves_back(market: Market) -> None:
    lab, azure, gcp = market.lab, market.azure, market.gcp
    assert lab.json("up", "--yes")["server"]["provider"] == "azure", "the cheapest T4"
    [(_, first)] = market.alive
    follower = lab.start("run", "--recover", "--yes", "--id", "night")
    follower.said("step 20\n")
    azure.change(capacity=(CloudCapacity(),))
    azure.reclaim(first, NOTICE_S)
    follower.said("begins at", 2)
    assert [name for name, _ in market.alive] == ["gcp"], "it has left the first cloud"
    status = lab.json("status")
    assert status["server"]["provider"] == "gcp"
    assert [run["id"] for run in status["runs"]] == ["night"]

    azure.change(capacity=())
    moved = lab.json("move", "--provider", "azure", "--yes")
    assert (moved["server"]["provider"], moved["resumed"]) == ("azure", ["night"])
    follower.said("begins at", 3)
    assert [name for name, _ in market.alive] == ["azure"]
    (lab.root / "go" / "on").touch()
    lab.labctl("push")
    follower.end(0)

    text = follower.stdout
    saved = [int(step) for step in re.findall(r"^saved (\d+)", text, re.MULTILINE)]
    begun = [int(step) for step in re.findall(r"^begins at (\d+)", text, re.MULTILINE)]
    assert len(saved) == 2
    assert begun == [0, *saved], "no step is lost or done twice"
    assert re.findall(r"resuming here \(attempt (\d+)\)", text) == ["2", "3"]
    lab.labctl("pull", "night")
    assert len(list((lab.root / "runs" / "night" / "checkpoints").iterdir())) == 2
    assert [run["id"] for run in lab.json("status")["runs"]] == ["night"]

    lab.labctl("down", "--yes")
    listed = json.loads(lab.labctl("orphans", "--provider", "auto", "--json").stdout)
    assert {"azure", "gcp"} <= {*listed["orphans"]["asked"]}
    assert (listed["billing"], listed["orphans"]["resources"]) == (False, [])
    wait_for(lambda: not market.alive, 60)
    assert azure.account.resources == {}
    assert gcp.project.disks == {}
    assert set(gcp.project.firewalls) == {"default-allow-ssh"}
    assert azure.violations + gcp.violations == []
