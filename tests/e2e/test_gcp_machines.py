"""A lab at a rehearsed Google Cloud: preemption, a machine that hangs, and kills at every call."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gcp_lab import GcpLab
from lab_servers import wait_for

from labctl.rehearsal.core.images import Building
from labctl.rehearsal.gcp import GcpRehearsal, GcpScenario

pytestmark = [pytest.mark.engine, pytest.mark.long]

ROOT = Path(__file__).parents[2]
UP = ("up", "--yes")
DOWN = ("down", "--yes", "--discard")
KEPT_TOO = ("orphans", "--terminate", "--kept-too", "--yes")
# Every call of `up` that changes something, in their order.
MADE = (
    "firewalls.insert",
    "instances.insert",
    "instances.setMetadata",
    "disks.setLabels",
    "instances.setDiskAutoDelete",
)
TAKEN = ("instances.delete", "firewalls.delete")


@pytest.fixture(scope="module")
def cloud() -> Iterator[GcpRehearsal]:
    building = Building(
        data_dir=ROOT,
        base_image=os.environ.get("LABCTL_BASE_IMAGE", ""),
        progress=lambda text, done, total: None,
    )
    with GcpRehearsal(GcpScenario(), building) as rehearsal:
        yield rehearsal


@pytest.fixture
def lab(cloud: GcpRehearsal, tmp_path: Path) -> Iterator[GcpLab]:
    made = GcpLab.create(cloud, tmp_path)
    yield made
    cloud.scenario = GcpScenario()
    cloud.change()
    made.labctl(*DOWN, code=None)
    made.labctl(*KEPT_TOO, code=None)
    assert made.list_alive() == []
    assert cloud.project.disks == {}
    assert set(cloud.project.firewalls) == {"default-allow-ssh"}


def test_a_run_survives_the_preemption_of_its_machine(lab: GcpLab) -> None:
    lab.labctl(*UP)
    [first] = lab.list_alive()
    keys = "cut -d' ' -f1,2 /etc/ssh/ssh_host_*_key.pub"
    code, presented = lab.cloud.execute(first, keys)
    record = lab.json("status")["server"]["endpoint"]["host_key"]
    assert (code, presented.split()) == (0, record.split()), "the first key is gone"
    following = lab.start("run", "--recover", "--yes")
    try:
        wait_for(lambda: lab.json("status", "--refresh")["runs"], 60)
        time.sleep(3)
        lab.cloud.reclaim(first, 30)
        second = wait_for(lambda: _find_successor(lab, first), 200)
        find = "find /home -name '*.txt' -path '*checkpoints*' | sort | tail -1"
        saved = wait_for(lambda: lab.cloud.execute(second, find)[1].strip(), 120)
        step = int(re.findall(r"(\d+)\.txt", saved)[0])
        assert step > 10, "it was told in time, and saved a checkpoint"
        progress = "cat $(find /home -name progress.json | tail -1)"
        wait_for(lambda: _read_step(lab.cloud.execute(second, progress)[1]) > step, 60)
    finally:
        os.killpg(following.pid, signal.SIGKILL)
        following.communicate()


def _find_successor(lab: GcpLab, first: str) -> str:
    running = [name for name, state in lab.cloud.instances.items() if state == "running"]
    return next((name for name in running if name != first), "")


def _read_step(text: str) -> int:
    found = re.search(r"\d+", text)
    return int(found[0]) if found else 0


def test_googles_timer_ends_a_machine_that_hangs_and_its_disk(lab: GcpLab) -> None:
    lab.cloud.change(run_limit=60.0)
    lab.labctl("up", "--yes", "--ttl", "30m")
    [name] = lab.list_alive()
    lab.labctl("ssh", "--", "true")
    lab.cloud.freeze(name)
    wait_for(lambda: lab.list_alive() == [], 120)
    assert lab.cloud.find_instance(name).reason == "timer"
    assert "no server" in lab.labctl("status", "--refresh", code=None)


def test_a_machine_that_powers_itself_off_is_stopped_and_comes_back(lab: GcpLab) -> None:
    lab.labctl(*UP)
    [name] = lab.list_alive()
    lab.cloud.execute(name, "poweroff")
    wait_for(lambda: lab.cloud.instances[name] == "stopped", 60)
    status = lab.labctl("status", "--refresh", code=None)
    assert "stopped" in status
    lab.labctl(*UP)
    assert lab.cloud.instances[name] == "running"


def test_state_that_was_deleted_is_found_again_by_labels(lab: GcpLab) -> None:
    lab.labctl(*UP)
    [name] = lab.list_alive()
    lab.forget()
    assert name in lab.labctl("orphans", "--provider", "gcp", code=1)
    lab.labctl("orphans", "--provider", "gcp", "--terminate", "--kept-too", "--yes")
    assert lab.list_alive() == []


def test_other_credentials_change_nothing(lab: GcpLab) -> None:
    lab.labctl(*UP)
    lab.environ["GOOGLE_CLOUD_PROJECT"] = "another-project"
    output = lab.labctl("down", "--yes", code=3)
    assert "gcp account rehearsal-project" in output
    assert len(lab.list_alive()) == 1
    lab.environ["GOOGLE_CLOUD_PROJECT"] = "rehearsal-project"


@pytest.mark.parametrize("kind", ["dropped", "lost"])
def test_a_kill_at_every_call_leaves_one_machine_and_then_nothing(lab: GcpLab, kind: str) -> None:
    for action in MADE:
        lab.kill_at(kind, action, *UP)
        assert len(lab.list_alive()) <= 1, action
        for name in lab.list_alive():
            assert name in lab.labctl("orphans", "--provider", "gcp", "--json", code=None), action
    lab.labctl(*UP)
    assert len(lab.list_alive()) == 1
    for action in TAKEN:
        lab.kill_at(kind, action, *DOWN)
    lab.labctl(*DOWN)
    assert lab.list_alive() == []
