"""Clocks that differ, or jump: on the server, and on the machine that labctl runs on.

A small library (tests/clock-standin), loaded before the C library, shifts the time of day that
programs read by as many seconds as a file says. Monotonic clocks stay the kernel's. On the server
every Python program loads it; here one labctl does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab_directory import LabDirectory
from lab_servers import LabServer, build_clock_image, wait_for
from watch_lab import CHECKPOINT, FOREVER, WatchLab

from labctl.providers.local import LocalSettings

pytest_plugins = ["lab_fixture"]
pytestmark = [pytest.mark.engine, pytest.mark.long]

DAY_S = 86400
LONG_S = 3600.0
# For tests of 10 seconds or more: a clock that goes back only with --long.
SHIFTS = pytest.mark.parametrize(
    "shift_s",
    [3 * DAY_S, pytest.param(-3 * DAY_S)],
    ids=["ahead", "behind"],
)


@pytest.fixture(scope="module")
def clock_image(server_image: str) -> str:
    return build_clock_image(server_image)


@pytest.fixture(scope="module")
def shiftable(
    start_lab_server: Callable[..., LabServer],
    clock_image: str,
    base_image: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> WatchLab:
    """A server whose programs read a clock that a test can set."""
    server = start_lab_server("shiftable", LocalSettings(image=clock_image))
    server.load(base_image)
    return WatchLab(server, tmp_path_factory.mktemp("clocks"), base_image)


@contextmanager
def clock_shifted_by(lab: WatchLab, shift_s: int) -> Iterator[None]:
    """The server's time of day is another one for a while."""
    lab.server.sh(f"echo {shift_s} > /etc/clock-shift")
    try:
        yield
    finally:
        lab.server.sh("echo 0 > /etc/clock-shift")


def read_server_clock(lab: WatchLab) -> float:
    return float(lab.server.ssh("python3 -c 'import time; print(time.time())'").stdout)


@SHIFTS
def test_a_jump_of_the_servers_clock_moves_no_limit(shiftable: WatchLab, shift_s: int) -> None:
    before = shiftable.guard(f"jump{shift_s}", ttl_s=LONG_S, idle_s=LONG_S, elapsed_s=100.0)
    real_s = read_server_clock(shiftable)
    with clock_shifted_by(shiftable, shift_s):
        moved_s = read_server_clock(shiftable) - real_s
        assert moved_s == pytest.approx(shift_s, abs=120)
        ticks = shiftable.watch(0).elapsed_s
        during = wait_for(lambda: w if (w := shiftable.watch()).elapsed_s > ticks + 2 else None)
        extended = shiftable.extend(600)
    after = shiftable.watch()
    for watch in (during, after):
        assert watch.alive
        assert 100 <= watch.elapsed_s < 400
        assert watch.idle_for_s < 400
        assert not watch.ending
    assert during.ttl_left_s == pytest.approx(before.ttl_left_s, abs=300)
    assert extended.ttl_left_s == pytest.approx((before.ttl_left_s or 0) + 600, abs=300)


@SHIFTS
def test_a_terminal_at_rest_is_no_work_after_a_jump(shiftable: WatchLab, shift_s: int) -> None:
    """Somebody typed before the clock was set back: that does not keep a server for three days."""
    shiftable.guard(f"rests{shift_s}", idle_s=40.0, ttl_s=LONG_S)
    with shiftable.terminal("tmux new-session -s rests"), shiftable.terminal("sleep 600"):
        wait_for(lambda: shiftable.server.ssh("tmux list-clients", check=False).stdout)
        with clock_shifted_by(shiftable, shift_s):
            wait_for(lambda: shiftable.watch(0).idle_for_s > 9, 60)
    shiftable.server.ssh("tmux kill-server")


@SHIFTS
def test_a_watchdog_that_starts_after_a_jump_goes_on_counting(
    shiftable: WatchLab, shift_s: int
) -> None:
    before = shiftable.guard(f"again{shift_s}", ttl_s=LONG_S, elapsed_s=100.0)
    with clock_shifted_by(shiftable, shift_s):
        shiftable.server.sh(f"kill -9 {before.pid}")
        after = wait_for(lambda: w if (w := shiftable.watch()).pid != before.pid else None)
        assert 100 <= after.elapsed_s < 400
        assert after.ttl_left_s == pytest.approx(before.ttl_left_s, abs=300)


@SHIFTS
def test_a_ttl_that_runs_out_after_a_jump_saves_first(shiftable: WatchLab, shift_s: int) -> None:
    """The run's checkpoint is whole, though its files are days older or younger than the clock."""
    run = "jumped-ahead" if shift_s > 0 else "jumped-behind"
    shiftable.start(run, CHECKPOINT)
    wait_for(lambda: "begun" in shiftable.log(run))
    with clock_shifted_by(shiftable, shift_s):
        shiftable.guard(f"ends{shift_s}", ttl_s=20)
        shiftable.wait_for_power_off()
        decisions = "\n".join(shiftable.decisions())
        shiftable.boot()
    assert "ending (ttl): its time is up (20 s)" in decisions
    assert f"run stopped: {run} ended" in decisions
    shiftable.server.ssh(f"test -s labctl/watched/runs/{run}/checkpoints/last/manifest.json")


@SHIFTS
def test_a_run_on_a_server_whose_clock_jumps_is_seen_as_it_is(
    shiftable: WatchLab, shift_s: int
) -> None:
    shiftable.guard("seen", ttl_s=LONG_S)
    run = "seen-ahead" if shift_s > 0 else "seen-behind"
    shiftable.start(run, FOREVER)

    def state() -> str:
        return shiftable.find_run(run).state

    with clock_shifted_by(shiftable, shift_s):
        assert state() == "running"
        shiftable.cancel(run)
        assert state() in ("exited", "cancelled")


# The clock here


@pytest.fixture(scope="module")
def clock_library(clock_image: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, taken from the image: it needs nothing but a C library."""
    path = tmp_path_factory.mktemp("clock") / "clock.so"
    copy = ["docker", "run", "--rm", "--entrypoint", "cat", clock_image, "/usr/local/lib/clock.so"]
    path.write_bytes(subprocess.run(copy, capture_output=True, check=True).stdout)
    return path


@pytest.fixture(params=[3 * DAY_S, pytest.param(-3 * DAY_S)], ids=["ahead", "behind"])
def laptop(
    lab: LabDirectory, clock_library: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> LabDirectory:
    """The lab, used from a machine whose clock is days off."""
    shift = tmp_path / "shift"
    shift.write_text(str(request.param))
    shifted = {"LD_PRELOAD": str(clock_library), "CLOCK_SHIFT": str(shift)}
    return LabDirectory(lab.root, lab.name, {**lab.environ, **shifted}, lab.server_id)


def test_a_laptop_whose_clock_is_off_runs_edits_and_pulls(
    laptop: LabDirectory, request: pytest.FixtureRequest
) -> None:
    name = "ahead" if "ahead" in request.node.name else "behind"
    for number in (1, 2):
        script = f"echo edit {number} {name}; echo {number} > /lab/run/logs/note.txt\n"
        with laptop.holding("train.sh", script):
            done = laptop.labctl("run", "--yes", "--id", f"{name}{number}", "--", "sh", "train.sh")
        assert f"edit {number} {name}\n" in done.stdout
    run = laptop.seen(f"{name}2")
    assert (run["state"], run["exit_code"]) == ("exited", 0)
    assert -1 <= run["ended_at"] - run["started_at"] < 300
    laptop.labctl("pull", f"{name}2")
    assert (laptop.root / "runs" / f"{name}2" / "logs" / "note.txt").read_text() == "2\n"
    assert laptop.json("status")["server"]["state"] == "running"
