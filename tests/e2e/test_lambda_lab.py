"""A student's hour at Lambda, on a rehearsed cloud whose machine boots: typed into a terminal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab_directory import LabDirectory, make_lab
from lab_servers import ROOT, wait_for

from labctl.rehearsal.core.images import Building
from labctl.rehearsal.lambda_cloud import LambdaRehearsal, LambdaScenario

pytestmark = [pytest.mark.engine, pytest.mark.long]

LAB_YAML = """\
lab: digits
server: {provider: lambda, gpu: auto, ttl: 2h, executor: process,
  lambda: {settle: 1s}}
run: sh -c 'mkdir -p $LABCTL_CHECKPOINT_DIR && date > $LABCTL_CHECKPOINT_DIR/model.txt'
"""
UP_S = 240.0
PRICE_USD_PER_HOUR = 0.5
# A trial of a sweep: all of them take as long.
TRIAL_S = 20.0
TRIAL = f"""\
import json, os, sys, time
time.sleep({TRIAL_S})
with open(os.path.join(os.environ["LABCTL_LOG_DIR"], "progress.json"), "w") as file:
    json.dump({{"step": 1, "loss": float(sys.argv[-1])}}, file)
"""


@dataclass
class Student:
    """A student's lab, and the cloud where it gets its server."""

    lab: LabDirectory
    cloud: LambdaRehearsal

    @property
    def alive(self) -> list[str]:
        states = self.cloud.instances
        return [one for one, state in states.items() if state not in ("ending", "ended")]

    def up(self) -> None:
        """`labctl up` in a terminal, where the cost is typed."""
        with self.lab.in_terminal("up", "--yes") as terminal:
            terminal.said("to start it anyway, type", UP_S)
            terminal.type("360.00\n")
            terminal.said("is ready", UP_S)


@pytest.fixture
def student(tmp_path: Path, base_image: str) -> Iterator[Student]:
    building = Building(
        data_dir=ROOT, base_image=base_image, progress=lambda text, done, total: None
    )
    with LambdaRehearsal(LambdaScenario(), building) as cloud:
        lab = make_lab(tmp_path, "unused", base_image)
        lab.environ.update(cloud.environment)
        (lab.root / "lab.yaml").write_text(LAB_YAML)
        try:
            yield Student(lab, cloud)
        finally:
            cloud.change(expired=False, lost=())
            lab.labctl("down", "--yes", "--discard", code=None)


def test_up_run_pull_down_and_what_is_left(student: Student) -> None:
    lab, cloud = student.lab, student.cloud
    refused = lab.labctl("up", "--yes", code=3).stderr
    assert "no guard at lambda stops these costs: $12.00 a day, $360.00 a month" in refused
    assert "if you run labctl down by the deadline, in 2 h: $1.00" in refused
    assert cloud.instances == {}

    student.up()
    [instance] = student.alive
    record = cloud.find_instance(instance)
    assert ".key." in record.name, "the first host key was replaced, and the name has the new one"

    lab.labctl("run", "--id", "first")
    lab.labctl("pull")
    assert (lab.root / "runs" / "first" / "checkpoints" / "model.txt").read_text()

    assert instance in json.dumps(lab.json("orphans", code=1))

    lab.labctl("down", "--yes")
    cloud.wait(instance, "ended")
    wait_for(lambda: not cloud.api.storage.keys)
    assert lab.json("orphans")["billing"] is False
    assert cloud.violations == []


def test_without_any_state_the_server_is_found_and_ended(student: Student) -> None:
    lab = student.lab
    student.up()
    [instance] = student.alive
    shutil.rmtree(Path(lab.environ["HOME"]) / ".local" / "state" / "labctl")
    lab.labctl("orphans", "--terminate", "--yes")
    student.cloud.wait(instance, "ended")
    assert student.cloud.api.storage.keys == {}


def test_a_sweep_on_a_paid_server_ends_within_its_budget(student: Student) -> None:
    lab = student.lab
    (lab.root / "trial.py").write_text(TRIAL)
    student.up()
    trial_usd = TRIAL_S / 3600 * PRICE_USD_PER_HOUR
    budget_usd = 3.5 * trial_usd
    words = (
        "--param",
        "lr=0.1,0.2",
        "--metric",
        "loss",
        "--direction",
        "minimize",
        "--json",
        "--yes",
    )
    budget = ("--budget", f"{budget_usd:.6f}")
    done = lab.labctl("sweep", *words, *budget, "--", "python3", "trial.py")
    result = json.loads(done.stdout)["sweep"]

    # A slow machine starts fewer trials; only the last one may take longer than expected.
    assert 1 <= len(result["trials"]) <= 3
    assert "budget" in result["stopped"]
    cost, ended = result["cost"], [one["seconds"] for one in result["trials"]]
    assert cost["is_free"] is False
    assert cost["spent_usd"] == pytest.approx(sum(ended) / 3600 * PRICE_USD_PER_HOUR, rel=0.01)
    assert cost["spent_usd"] <= budget_usd
    assert cost["spent_usd"] + cost["dearest_usd"] > budget_usd

    # The budget of the study is that of all its trials: no other call starts one.
    again = lab.labctl("sweep", *words, *budget, "--", "python3", "trial.py")
    assert json.loads(again.stdout)["sweep"]["cost"]["spent_usd"] == cost["spent_usd"]
    assert [one["state"] for one in result["trials"]] == ["complete"] * len(ended)
