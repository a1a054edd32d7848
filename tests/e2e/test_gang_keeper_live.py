"""A run on two servers while the laptop is off: the keeper ends, restarts and recovers it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_bed import KeeperBox, keeper_box, needs_sshd
from lab_directory import LabDirectory, make_lab
from lab_servers import wait_for
from test_gang import LAB_YAML, TRAIN, list_servers

pytestmark = [pytest.mark.engine, pytest.mark.long, needs_sshd]


COUNT_PARTS = ("sh", "-c", "ls -d ~/labctl/.attempts/*-night-* | wc -l")
SHOW_RECORD = ("sh", "-c", "cat ~/labctl/kept*/runs/night/.labctl/record.json")
HOPELESS = "[ $RANK = 1 ] || exec sleep 600; sleep 5; exit 9"


@pytest.fixture
def lab(tmp_path: Path, base_image: str, server_image: str) -> Iterator[LabDirectory]:
    made = make_lab(tmp_path, "kept", base_image)
    (made.root / "Dockerfile").unlink()
    (made.root / "lab.yaml").write_text(LAB_YAML.replace("lab: two", "lab: kept"))
    (made.root / "train.py").write_text(TRAIN)
    try:
        made.labctl("up", "--yes")
        yield made
    finally:
        made.labctl("down", "--yes", "--discard")


@pytest.fixture
def box(lab: LabDirectory, tmp_path: Path) -> Iterator[KeeperBox]:
    """The keeper's machine has a home of its own, and the engine of this one."""
    around = {name: value for name, value in lab.environ.items() if not name.startswith("E2E_")}
    with keeper_box(tmp_path / "keeper", around) as made:
        made.known_to(lab.environ)
        made.start()
        yield made


# The worker of the keeper that has this kills the keeper and itself, once, when the first part of a
# restarted run is created and the second is not.
KILL_BETWEEN_PARTS = """\
import os, pathlib, signal, sys

mark = pathlib.Path(__file__).with_name("killed")
if "--attend" in sys.orig_argv and not mark.exists():
    from labctl.lifecycle import gang_restart

    resume = gang_restart._resume

    def resume_one(*words):
        resume(*words)
        mark.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    gang_restart._resume = resume_one
"""


def test_a_restart_in_which_the_keeper_is_killed_is_completed_by_the_next_one(
    lab: LabDirectory, box: KeeperBox
) -> None:
    faults = box.folder / "faults"
    faults.mkdir()
    (faults / "sitecustomize.py").write_text(KILL_BETWEEN_PARTS)
    assert box.stop() == 0
    box.environ["PYTHONPATH"] = str(faults)
    box.start()
    words = ("run", "--recover", "--keeper", box.host, "--detach", "--id", "night", "--yes")
    lab.labctl(*words, "--", "python3", "train.py", "300")
    terminal = lab.start("logs", "-f", "night")
    terminal.said("step 40\n")
    lab.labctl("ssh", "--server", "1", "--", "touch", "/tmp/fail")
    assert box.keeper is not None
    assert box.keeper.wait(120) == -signal.SIGKILL
    assert (faults / "killed").exists()
    assert box.said.count("kept-1: failed with exit code 7; starting night again") == 1
    parts = [lab.labctl("ssh", "--server", rank, "--", *COUNT_PARTS).stdout for rank in "01"]
    assert [int(text) for text in parts] == [2, 1]

    box.start()
    box.heard("starting night again: done")
    log = terminal.end().stdout
    starts = re.findall(r"rank 0 of 2 over eth0 from step (\d+)\n", log)
    assert len(starts) == 2
    assert 40 <= int(starts[1]) < 300
    assert log.endswith("step 300\n")
    assert log.count("step 300\n") == 1
    other = lab.labctl("logs", "night", "--rank", "1").stdout
    assert re.findall(r"rank 1 of 2 over eth0 from step (\d+)\n", other) == starts
    assert box.said.count("starting night again: done") == 1
    for rank in ("0", "1"):
        records = lab.labctl("ssh", "--server", rank, "--", *SHOW_RECORD).stdout
        assert json.loads(records)["exit_code"] == 0


def test_the_keeper_restarts_and_recovers_while_the_laptop_is_off(
    lab: LabDirectory, box: KeeperBox
) -> None:
    words = ("run", "--recover", "--keeper", box.host, "--detach", "--id", "night", "--yes")
    said = lab.labctl(*words, "--", "python3", "train.py", "600").stderr
    assert f"The keeper at {box.host} watches over it; you can turn this machine off." in said
    first, second = list_servers(lab)
    (kept,) = box.listed()["labs"]
    assert [server["id"] for server in kept["servers"]] == [first, second]

    terminal = lab.start("logs", "-f", "night")
    terminal.said(f"the keeper at {box.host} watches over night; this only shows its log")

    # A process fails: the keeper ends the other one and starts both from one checkpoint.
    lab.labctl("ssh", "--server", "1", "--", "touch", "/tmp/fail")
    box.heard("kept-1: failed with exit code 7")
    box.heard("starting night again: done")
    terminal.said("rank 0 of 2 over eth0 from step", times=2)

    # A server is lost: the keeper replaces it.
    subprocess.run(["docker", "rm", "-f", "-v", second], capture_output=True, check=True)
    box.heard(f"kept-1: the server {second} is gone")
    wait_for(lambda: box.said.count("starting night again: done") == 2, 300)

    assert lab.json("status")["keeper"] == box.host
    servers = list_servers(lab)
    assert servers[0] == first
    assert servers[1] != second

    # The terminal on the laptop has shown all attempts, and started none.
    log = terminal.end().stdout
    starts = re.findall(r"rank 0 of 2 over eth0 from step (\d+)\n", log)
    assert [len(starts), starts[0]] == [3, "0"]
    assert 0 < int(starts[1]) <= int(starts[2])
    assert "(attempt 2)" in log
    assert "(attempt 3)" in log
    assert log.endswith("step 600\n")
    lab.labctl("pull", "night")
    home = lab.root / "runs" / "night"
    assert (home / "checkpoints" / "step-0600" / "step").read_text() == "600"

    # A run that fails once more than it may ends with the code of what failed, and stays so.
    words = ("run", "--recover", "--keeper", box.host, "--id", "hopeless", "--yes")
    hopeless = lab.labctl(*words, "--", "sh", "-c", HOPELESS, code=9)
    assert "run hopeless: kept-1: failed with exit code 9" in hopeless.stderr
    assert box.said.count("starting hopeless again: done") == 1

    lab.labctl("down", "--yes")
    assert box.listed()["labs"] == []
    status = lab.json("status")
    assert (status["server"], status["servers"], status["keeper"]) == (None, [], "")
    assert box.stop() == 0
    left = subprocess.run(
        ["docker", "ps", "-aq", "--filter", f"label=labctl.lab-id={status['lab_id']}"],
        capture_output=True,
        check=True,
    )
    assert left.stdout == b""
