"""kill -9 of `up` at a simulated cloud whose machines answer nobody, so that it never succeeds."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab_directory import LabDirectory, make_lab
from lab_servers import wait_for

from labctl.rehearsal.core.scenario import Loss
from labctl.rehearsal.core.simulation import CloudRehearsal

# Typed consent needs a terminal; the Python API takes it as a policy.
UP = """\
from labctl import Lab
from labctl.events import AGREE_TO_ALL, PolicyReporter
Lab.load(".", reporter=PolicyReporter(print, AGREE_TO_ALL)).up()
"""
KILLS = int(os.environ.get("LABCTL_KILLS", "3"))
HOLD_S = 60.0
POLL_S = 0.01
DOWN = ("down", "--yes", "--discard")
ORPHANS = ("orphans", "--terminate", "--yes")
Cloud = CloudRehearsal[Any, Any]


@contextmanager
def open_lab(
    cloud: Cloud, directory: Path, lab_yaml: str, list_left: Callable[[], list[str]]
) -> Iterator[LabDirectory]:
    """A lab in a home of its own; nothing of it may be left in the end."""
    made = make_lab(directory, "digits", "unused")
    made.environ.update(cloud.environment)
    (made.root / "lab.yaml").write_text(lab_yaml)
    yield made
    cloud.change(lost=(), dropped=(), expired=False)
    left = list_left()
    made.labctl(*ORPHANS, code=None)
    assert left == []


def list_living(cloud: Cloud) -> list[str]:
    return [one for one, state in cloud.instances.items() if state not in ("ending", "ended")]


def find_home(lab: LabDirectory) -> Path:
    return Path(lab.environ["HOME"])


def start_up(lab: LabDirectory) -> subprocess.Popen[bytes]:
    with (find_home(lab) / "up.txt").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-c", UP],
            cwd=lab.root,
            env=lab.environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def require_running(lab: LabDirectory, process: subprocess.Popen[bytes]) -> None:
    assert process.poll() is None, (find_home(lab) / "up.txt").read_text()


def kill_up_at(lab: LabDirectory, cloud: Cloud, kind: str, action: str) -> None:
    """Kill `up` while it waits for the reply to this call; a "lost" one had its effect."""
    cloud.change(**{kind: (Loss(action=action, hold=HOLD_S),)})
    before = cloud.held_calls.get(action, 0)
    process = start_up(lab)
    try:
        wait_for(lambda: cloud.held_calls.get(action, 0) > before or process.poll() is not None)
    finally:
        kill(process)
    wait_for(lambda: cloud.under_way == 0)
    cloud.change(lost=(), dropped=())
    assert cloud.held_calls.get(action, 0) > before


def continue_up(lab: LabDirectory) -> None:
    """Run `up` until it waits for sshd, which nothing answers, and kill it."""
    process = start_up(lab)
    try:
        wait_for(lambda: is_at_ssh(lab) or process.poll() is not None)
        require_running(lab, process)
    finally:
        kill(process)


def is_at_ssh(lab: LabDirectory) -> bool:
    """Whether `up` has described a server to ssh."""
    return (find_home(lab) / ".ssh" / "config").exists()


def forget_state(lab: LabDirectory) -> None:
    shutil.rmtree(find_home(lab) / ".local" / "state" / "labctl", ignore_errors=True)


def kill_at_random(lab: LabDirectory, cloud: Cloud, list_left: Callable[[], list[str]]) -> None:
    """Kill `up` LABCTL_KILLS times, each time at another moment; one command ends whatever it made.

    That command is in turn `down`, and `orphans` on a machine that has lost all records.
    """
    seed = random.randrange(10**6)
    moments = random.Random(seed)
    span_s = measure_up(lab, cloud)
    reached: Counter[str] = Counter()
    for number in range(KILLS):
        process = start_up(lab)
        before = count_calls(cloud)
        # `up` first imports much: its calls are what matters.
        wait_for(lambda: count_calls(cloud) > before or process.poll() is not None)  # noqa: B023
        time.sleep(moments.uniform(0, 1.2 * span_s))
        require_running(lab, process)
        kill(process)
        wait_for(lambda: cloud.under_way == 0)
        living = list_living(cloud)
        assert len(living) <= 1, f"kill {number} of seed {seed}"
        reached["a server" if living else "parts of one" if list_left() else "nothing"] += 1
        if number % 2:
            forget_state(lab)
            lab.labctl(*ORPHANS)
        else:
            lab.labctl(*DOWN)
        assert list_left() == [], f"kill {number} of seed {seed}"
    print(f"seed {seed}, {KILLS} kills, what each left: {dict(reached)}")


def measure_up(lab: LabDirectory, cloud: Cloud) -> float:
    """Return the seconds of an `up` from its first call until it waits for sshd, and end it."""
    before = count_calls(cloud)
    process = start_up(lab)
    try:
        while count_calls(cloud) == before:
            require_running(lab, process)
            time.sleep(POLL_S)
        began = time.monotonic()
        while not is_at_ssh(lab):
            require_running(lab, process)
            time.sleep(POLL_S)
        return time.monotonic() - began
    finally:
        kill(process)
        wait_for(lambda: cloud.under_way == 0)
        lab.labctl(*DOWN)


def count_calls(cloud: Cloud) -> int:
    return sum(cloud.calls.values())
