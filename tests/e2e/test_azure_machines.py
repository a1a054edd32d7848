"""A lab at a rehearsed Azure: an eviction, a machine that hangs, lost state, another account."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gcp_lab import ALIVE, COMMAND_S, LAB_YAML, TRAIN
from lab_servers import wait_for

from labctl.rehearsal.azure import AzureRehearsal, AzureScenario
from labctl.rehearsal.core.images import Building

pytestmark = [pytest.mark.engine, pytest.mark.long]

ROOT = Path(__file__).parents[2]
UP = ("up", "--yes")
DOWN = ("down", "--yes", "--discard")


@dataclass
class AzureLab:
    """One person's lab: a directory and a home, and `labctl` in it."""

    cloud: AzureRehearsal
    root: Path
    environ: dict[str, str]

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "labctl", *words],
            cwd=self.root,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def labctl(self, *words: str, code: int | None = 0) -> str:
        """What it printed, once it has ended with `code` (None: any)."""
        process = self.start(*words)
        output, _ = process.communicate(timeout=COMMAND_S)
        assert code in (None, process.returncode), output
        return output

    def read_status(self) -> Any:
        words = [sys.executable, "-m", "labctl", "status", "--refresh", "--json"]
        done = subprocess.run(
            words, cwd=self.root, env=self.environ, capture_output=True, text=True, check=False
        )
        return json.loads(done.stdout)

    def list_alive(self) -> list[str]:
        return [name for name, state in self.cloud.instances.items() if state in ALIVE]


@pytest.fixture(scope="module")
def cloud() -> Iterator[AzureRehearsal]:
    building = Building(
        data_dir=ROOT,
        base_image=os.environ.get("LABCTL_BASE_IMAGE", ""),
        progress=lambda text, done, total: None,
    )
    with AzureRehearsal(AzureScenario(), building) as rehearsal:
        yield rehearsal


@pytest.fixture
def lab(cloud: AzureRehearsal, tmp_path: Path) -> Iterator[AzureLab]:
    (tmp_path / "home").mkdir()
    root = tmp_path / "lab"
    root.mkdir()
    (root / "lab.yaml").write_text(LAB_YAML.replace("gcp", "azure"))
    (root / "train.py").write_text(TRAIN)
    others = ("AZURE_", "IDENTITY_", "AWS_", "XDG_")
    plain = {name: text for name, text in os.environ.items() if not name.startswith(others)}
    environ = {**plain, **cloud.environment, "HOME": str(tmp_path / "home")}
    made = AzureLab(cloud, root, environ)
    yield made
    cloud.scenario = AzureScenario()
    cloud.change()
    made.labctl(*DOWN, code=None)
    made.labctl("orphans", "--provider", "azure", "--terminate", "--yes", code=None)
    assert made.list_alive() == []
    assert cloud.account.resources == {}


def test_a_run_survives_the_eviction_of_its_machine(lab: AzureLab) -> None:
    lab.labctl(*UP)
    [first] = lab.list_alive()
    keys = "cut -d' ' -f1,2 /etc/ssh/ssh_host_*_key.pub"
    code, presented = lab.cloud.execute(first, keys)
    record = lab.read_status()["server"]["endpoint"]["host_key"]
    assert (code, presented.split()) == (0, record.split()), "the first key is gone"
    following = lab.start("run", "--recover", "--yes")
    try:
        wait_for(lambda: lab.read_status()["runs"], 60)
        time.sleep(3)
        lab.cloud.reclaim(first, 30)
        wait_for(lambda: lab.list_alive() not in ([first], []), 200)
        [second] = lab.list_alive()
        wait_for(lambda: lab.cloud.instances[second] == "running", 60)
        find = "find /home -name '*.txt' -path '*checkpoints*' | sort | tail -1"
        saved = wait_for(lambda: lab.cloud.execute(second, find)[1].strip(), 120)
        assert int(re.findall(r"(\d+)\.txt", saved)[0]) > 10, "it was told in time"
    finally:
        os.killpg(following.pid, signal.SIGKILL)
        following.communicate()


def test_azures_timer_deallocates_a_machine_that_hangs(lab: AzureLab) -> None:
    lab.cloud.change(timer=90.0)
    lab.labctl("up", "--yes", "--ttl", "30m")
    [name] = lab.list_alive()
    lab.labctl("ssh", "--", "true")
    lab.cloud.freeze(name)
    wait_for(lambda: lab.cloud.instances[name] == "stopped", 200)
    assert lab.cloud.find_instance(name).reason == "timer"
    assert "stopped" in lab.labctl("status", "--refresh", code=None)


def test_state_that_was_deleted_is_found_again_and_others_change_nothing(lab: AzureLab) -> None:
    lab.labctl(*UP)
    [name] = lab.list_alive()
    subscription = lab.environ["AZURE_SUBSCRIPTION_ID"]
    lab.environ["AZURE_SUBSCRIPTION_ID"] = "11111111-1111-2222-3333-444444444444"
    assert f"azure account {subscription}" in lab.labctl("down", "--yes", code=3)
    lab.environ["AZURE_SUBSCRIPTION_ID"] = subscription
    subprocess.run(["rm", "-rf", str(lab.root.parent / "home" / ".local")], check=True)
    assert name in lab.labctl("orphans", "--provider", "azure", code=1)
    lab.labctl("orphans", "--provider", "azure", "--terminate", "--yes")
    assert lab.list_alive() == []
