"""From nothing to the first line of a training run, and a whole job in one command.

The sample project on new servers of the provider `local`.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

from benchmarks import cloud_image
from benchmarks.measure import Comparison, Row
from benchmarks.settings import Settings
from benchmarks.timed_lab import OWNER, TimedLab, make_small_lab
from labctl.providers.local.cache import LABEL

TARGET, SECOND_LAB_LIMIT_S, JOB_LIMIT_S = 1.25, 15.0, 2.0
EXTRA = "what the one command takes longer"
# One epoch: the rest of the training is not measured.
TRAINING = ("python", "train.py", "--epochs", "1")


def compare(settings: Settings) -> Generator[Comparison]:
    """Compare `up` and `run` with their longest part, second labs, and one command for a job."""
    rounds = settings.sizes.few
    home = settings.home / "first-line"
    home.mkdir()
    make = _make_sample if settings.sizes.has_training else make_small_lab
    first, second = make(home, "first"), make(home, "second")
    start = _Start(first)

    def remove_images(number: int) -> None:
        shutil.rmtree(home / ".cache" / "labctl" / "images", ignore_errors=True)
        _remove_free_volumes()

    longest, both = "the longest part", "labctl up, labctl run"
    rows = [
        Row(longest, start.measure_longest, before=remove_images),
        Row(both, lambda _: start.total_s, TARGET),
    ]
    yield Comparison("from nothing to the first line", rows, 1)
    # Without a build no part is long, so this ratio has no target.
    rows = [Row(longest, start.measure_longest), Row(both, lambda _: start.total_s)]
    yield Comparison("the same on a new server that has the image", rows, rounds)
    job = _Job(first)
    rows = [
        Row("labctl up, run, pull, down", job.measure_commands),
        Row("labctl run --up --down", job.measure_one_command, ours=True),
        Row(EXTRA, job.compute_extra, limit=JOB_LIMIT_S, against=EXTRA),
    ]
    yield Comparison("one command for a job", rows, rounds)
    yield _compare_second_labs(first, second, rounds)
    if settings.sizes.has_training:  # --quick has no time for servers of a cloud
        yield from cloud_image.compare(home / "cloud", rounds)


def _compare_second_labs(first: TimedLab, second: TimedLab, rounds: int) -> Comparison:
    """Measure the time from `labctl run` to its first line in a lab with the same Dockerfile."""

    def run_after_down(number: int) -> float:
        return second.run_on_new_server(f"after-{number}")

    def run_beside(number: int) -> float:
        _remove_free_volumes()
        return second.run_on_new_server(f"beside-{number}")

    def run_beside_with_free_volume(number: int) -> float:
        _remove_free_volumes()
        _add_empty_volume()
        return second.run_on_new_server(f"free-{number}")

    def end_second(number: int) -> None:
        second.end_server()

    def start_first(number: int) -> None:
        end_second(number)
        first.labctl("up", "--yes")

    def end_both(number: int) -> None:
        end_second(number)
        first.end_server()

    after, beside = "after `down` of the first", "beside the first, right after `up`"
    free = "beside the first, and a free volume lacks the image"
    limit = SECOND_LAB_LIMIT_S
    rows = [
        Row(after, run_after_down, limit=limit, against=after, after=end_second),
        *(
            Row(name, measure, limit=limit, against=name, before=start_first, after=end_both)
            for name, measure in ((beside, run_beside), (free, run_beside_with_free_volume))
        ),
    ]
    return Comparison("a second lab with the same Dockerfile", rows, rounds)


def _make_sample(home: Path, name: str) -> TimedLab:
    TimedLab(home, home, ()).labctl("init", name, "--provider", "local")
    return TimedLab(home, home / name, TRAINING)


class _Start:
    """`up` and `run` on a server that did not exist before."""

    def __init__(self, lab: TimedLab) -> None:
        self._lab = lab
        self.total_s = 0.0

    def measure_longest(self, number: int) -> float:
        """Start and remove a server; return the seconds of the part that took longest."""
        try:
            up = self._lab.read_timings("up", "--yes")
            run = self._lab.run(f"first-{number}")
        finally:
            self._lab.end_server()
        self.total_s = up["total_s"] + run["total_s"]
        seconds: dict[str, float] = {}
        for part in (*up["parts"], *run["parts"]):
            seconds[part["name"]] = seconds.get(part["name"], 0.0) + part["duration_s"]
        return max(seconds.values())


class _Job:
    """The same job as four commands, and as one."""

    def __init__(self, lab: TimedLab) -> None:
        self._lab = lab
        self._commands_s = self._one_command_s = 0.0

    def measure_commands(self, number: int) -> float:
        name = f"commands-{number}"
        begun = time.monotonic()
        self._lab.labctl("up", "--yes")
        self._lab.labctl("run", "--id", name, "--", "true")
        self._lab.labctl("pull", name)
        self._lab.labctl("down", "--yes")
        self._commands_s = time.monotonic() - begun
        return self._commands_s

    def measure_one_command(self, number: int) -> float:
        begun = time.monotonic()
        self._lab.labctl("run", "--up", "--down", "--id", f"job-{number}", "--", "true")
        self._one_command_s = time.monotonic() - begun
        return self._one_command_s

    def compute_extra(self, number: int) -> float:
        return self._one_command_s - self._commands_s


def _add_empty_volume() -> None:
    name = f"labctl-cache-{secrets.token_hex(4)}"
    command = ["docker", "volume", "create", "--label", f"{LABEL}={OWNER}", name]
    subprocess.run(command, capture_output=True, check=True)


def _remove_free_volumes() -> None:
    """Remove the layers of ended servers, so that a new one begins without any."""
    selected = ("--filter", f"label={LABEL}={OWNER}", "--filter", "dangling=true")
    listed = subprocess.run(
        ["docker", "volume", "ls", "-q", *selected], capture_output=True, text=True, check=True
    )
    for volume in listed.stdout.split():
        subprocess.run(["docker", "volume", "rm", volume], capture_output=True, check=True)
