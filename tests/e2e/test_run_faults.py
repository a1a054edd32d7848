"""What breaks under a run: links, sshd, the engine, the server, its disk. Told truthfully."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from calibration import DEAD_LINK_NOTICED_AMONG_OTHERS_S
from lab_directory import COUNTING, UNTIL_GO, LabDirectory, Process
from lab_servers import wait_for
from sleeping import asleep, has_home

from labctl.providers.local import engine

pytest_plugins = ["lab_fixture"]
pytestmark = pytest.mark.engine

Followed = Callable[..., Process]


def ends_whole(lab: LabDirectory, run: str, process: Process) -> None:
    """Let the run end; its follower has every byte once."""
    lab.let_go(run)
    process.end(0)
    assert process.stdout == lab.log(run)
    assert process.stdout.endswith("last\n")
    rows = process.stdout.splitlines()[:-1]
    assert rows == [f"line {i}" for i in range(len(rows))]


def next_lines(lab: LabDirectory, run: str, process: Process) -> None:
    """Wait until a line that is in the log now has come, and one after it."""
    last = lab.log(run).count("\n")
    process.said(f"line {last + 2}\n")


def test_ssh_sessions_and_sshd_die_and_the_follower_resumes(
    lab: LabDirectory, followed: Followed
) -> None:
    process = followed("sshd")
    process.said("line 3\n")
    before = lab.inspected("sshd")["State"]["Pid"]
    old = lab.sh("pgrep --oldest --exact sshd").strip()
    lab.sh("pkill -9 -x sshd")
    wait_for(lambda: lab.sh("pgrep --oldest --exact sshd", check=False).strip() not in ("", old))
    process.said("reconnecting")
    next_lines(lab, "sshd", process)
    assert lab.inspected("sshd")["State"]["Pid"] == before
    ends_whole(lab, "sshd", process)


@contextmanager
def black_hole(lab: LabDirectory) -> Iterator[None]:
    """Packets of ssh vanish in the server's network namespace.

    A busy engine may have a line run twice: see `inside`.
    """
    rules = ("INPUT -p tcp --dport 22 -j DROP", "OUTPUT -p tcp --sport 22 -j DROP")
    for rule in rules:
        lab.sh(f"iptables -C {rule} 2>/dev/null || iptables -I {rule}")
    try:
        yield
    finally:
        for rule in rules:
            lab.sh(f"! iptables -C {rule} 2>/dev/null || iptables -D {rule}")


@pytest.mark.long
def test_a_black_hole_is_noticed_and_the_follower_resumes(
    lab: LabDirectory, followed: Followed
) -> None:
    process = followed("hole")
    process.said("line 3\n")
    with black_hole(lab):
        process.said("reconnecting", deadline_s=DEAD_LINK_NOTICED_AMONG_OTHERS_S)
    next_lines(lab, "hole", process)
    ends_whole(lab, "hole", process)


@pytest.mark.long
@pytest.mark.parametrize("link", ["kept", "lost"])
def test_a_follower_that_slept_resumes(lab: LabDirectory, followed: Followed, link: str) -> None:
    """Suspended longer than the keep-alives; its network may be gone for as long."""
    run = f"slept-{link}"
    process = followed(run)
    process.said("line 3\n")
    with ExitStack() as stack:
        if link == "lost":
            stack.enter_context(black_hole(lab))
        stack.enter_context(asleep(has_home(lab.environ["HOME"])))
    next_lines(lab, run, process)
    ends_whole(lab, run, process)


def test_a_killed_engine_leaves_the_run_and_the_follower(
    lab: LabDirectory, followed: Followed
) -> None:
    process = followed("engine")
    process.said("line 3\n")
    before = lab.inspected("engine")["State"]["Pid"]
    old = lab.sh("cat /run/docker.pid")
    lab.sh(f"kill -9 {old}")
    seen = lab.seen("engine")
    assert (seen["state"], seen["exit_code"]) == ("running", None)
    wait_for(lambda: lab.sh("cat /run/docker.pid", check=False) not in ("", old))
    wait_for(lambda: lab.student("docker version >/dev/null 2>&1 && echo up", check=False))
    assert lab.inspected("engine")["State"]["Pid"] == before
    next_lines(lab, "engine", process)
    ends_whole(lab, "engine", process)


@pytest.mark.long
def test_a_container_removed_by_hand_is_told(lab: LabDirectory, followed: Followed) -> None:
    process = followed("removed")
    process.said("line 3\n")
    (name,) = lab.containers("removed")
    lab.student(f"docker rm -f {name}")
    process.end(None)
    seen = lab.seen("removed")
    assert seen["state"] in ("lost", "exited")
    assert process.code in (137, 255)
    assert "removed" in seen["told"] or "killed from outside" in seen["told"]
    assert {**lab.seen("removed"), "seen_at": 0} == {**seen, "seen_at": 0}


def test_a_killed_container_is_told_as_killed(lab: LabDirectory, followed: Followed) -> None:
    process = followed("killed")
    process.said("line 3\n")
    lab.student(f"docker kill {lab.containers('killed')[0]}")
    process.end(137)
    assert "killed from outside (SIGKILL)" in process.stderr


def test_what_ended_while_nobody_watched_is_told_later(lab: LabDirectory) -> None:
    line = f"echo begun; {UNTIL_GO}; exit 6"
    done = lab.labctl("run", "--detach", "--id", "alone", "--", "sh", "-c", line)
    assert "labctl logs -f alone" in done.stderr
    name = lab.containers("alone")[0]
    lab.let_go("alone")
    lab.student(f"docker wait {name}")
    lab.student(f"docker rm {name}")
    seen = lab.seen("alone")
    assert (seen["state"], seen["exit_code"]) == ("exited", 6)
    assert seen["told"] == "failed with exit code 6"
    assert lab.labctl("logs", "alone").stdout == "begun\n"


@contextmanager
def small_disk(lab: LabDirectory, size: str) -> Iterator[None]:
    """The lab's runs lie on a disk of their own, a small one."""
    place = f"/home/student/labctl/{lab.name}/runs"
    lab.sh(f"mount -t tmpfs -o size={size},uid=1000,gid=1000,mode=755 tmpfs {place}")
    try:
        yield
    finally:
        lab.sh(f"umount -l {place}")


def test_a_full_disk_is_told_before_a_run_begins(lab: LabDirectory) -> None:
    with lab.holding("weights.txt", "0123456789abcdef" * 2**17), small_disk(lab, "1m"):
        done = lab.run("echo ran", "--id", "no-room", code=255)
        assert "the server's disk is full" in done.stderr
        assert "ran" not in done.stdout
        assert lab.containers("no-room") == []
        assert "no-room" not in lab.student(f"ls -a {lab.place('')}")
    assert lab.run("echo ran", "--id", "no-room").stdout == "ran\n"


def test_a_disk_that_fills_during_a_run_is_survived(lab: LabDirectory) -> None:
    with small_disk(lab, "2m"):
        line = "echo begun; dd if=/dev/zero of=/lab/run/big bs=64k"
        done = lab.run(line, "--id", "fills", code=1)
        assert done.stdout.startswith("begun\n")
        assert "run fills: failed with exit code 1; the server's disk is full" in done.stderr
        seen = lab.seen("fills")
        assert (seen["state"], seen["exit_code"]) == ("exited", 1)
        assert "the server's disk is full" in seen["told"]
        assert lab.run("true", code=255).stderr.count("the server's disk is full") == 1
        lab.student(f"rm {lab.place('fills')}/big")
        assert lab.run("echo room").stdout == "room\n"


@pytest.mark.parametrize("how", [pytest.param("reboot", marks=pytest.mark.long), "power loss"])
def test_a_restarted_server_is_found_again_and_the_run_told_as_lost(
    lab: LabDirectory, followed: Followed, how: str
) -> None:
    run = how.replace(" ", "-")
    process = followed(run, f"echo kept > /lab/run/checkpoints/kept; {COUNTING}")
    process.said("line 3\n")
    port = lab.json("status")["server"]["endpoint"]["port"]
    with engine.connect() as docker:
        box = docker.containers.get(lab.server_id)
        if how == "reboot":
            box.restart(timeout=30)
        else:
            box.kill()
            box.start()
    if how == "power loss":  # at a reboot the run's end may be heard while the server goes down
        process.said("reconnecting")
    process.end(255)
    found = lab.json("up", "--yes")["server"]
    assert found["id"] == lab.server_id
    assert found["endpoint"]["port"] != port
    assert f"run {run}: lost: the server " in process.stderr
    seen = lab.seen(run)
    assert (seen["state"], seen["exit_code"]) == ("lost", None)
    assert process.stdout == lab.log(run)
    lab.labctl("pull", run)
    here = lab.root / "runs" / run
    assert (here / "checkpoints" / "kept").read_text() == "kept\n"
    assert (here / "logs" / "run.log").read_text() == process.stdout
