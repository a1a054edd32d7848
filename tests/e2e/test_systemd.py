"""What a real systemd does to a lab: logouts that end processes, units that crash."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab_directory import LabDirectory
from lab_servers import wait_for
from sshd_container import Sshd
from systemd_machine import build_image, lab_on, load_image, machine

from labctl.courses.bake import CLEAN_SCRIPT
from labctl.servers.agent import AgentClient
from labctl.servers.connections import Connections
from labctl.transports.openssh import OpenSshTransport
from labctl.wire.watchdog import (
    GUARD,
    WATCH,
    EndingRecord,
    GuardLimits,
    GuardRequest,
    WatchRequest,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def box(
    server_image: str, small_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sshd]:
    with machine(build_image(server_image), tmp_path_factory.mktemp("systemd")) as made:
        load_image(made, small_image, tmp_path_factory.mktemp("image"))
        made.sh("loginctl enable-linger student")  # as labctl's playbook does
        yield made


@pytest.fixture(scope="module")
def lab(
    box: Sshd, small_image: str, base_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LabDirectory]:
    with lab_on(box, tmp_path_factory.mktemp("lab"), base_image, small_image) as made:
        yield made


def log_out(box: Sshd) -> None:
    """End every session of the student's, and wait until logind has ended what they began."""
    box.sh("pkill -u student -x sshd || true")
    wait_for(lambda: "student" not in box.sh("loginctl list-sessions --no-legend || true"))
    wait_for(lambda: not box.sh("find /run/systemd/transient -name 'session-*.scope' || true"))


def list_guards(box: Sshd) -> dict[str, list[str]]:
    """The process ids of the watchdog, of the recorder of telemetry and of tmux."""
    patterns = {
        "watchdog": "[w]atchdog /var/tmp",
        "recorder": "python3 .* [t]elemetry$",  # of the run, or of the watchdog
        "tmux": "[t]mux new-session -d -s labctl-night",
    }
    return {
        name: box.sh(f"pgrep -u student -f '{pattern}' || true").split()
        for name, pattern in patterns.items()
    }


@contextmanager
def slow_scopes(box: Sshd) -> Iterator[None]:
    """Let systemd-run take two seconds to move a process, as it may on a busy machine."""
    box.sh("mv /usr/bin/systemd-run /usr/bin/systemd-run.real")
    script = '#!/bin/sh\nsleep 2\nexec systemd-run.real "$@"\n'
    box.sh(f"printf %s {shlex.quote(script)} >/usr/bin/systemd-run; chmod +x /usr/bin/systemd-run")
    try:
        yield
    finally:
        box.sh("mv /usr/bin/systemd-run.real /usr/bin/systemd-run")


def test_a_logout_that_ends_a_sessions_processes_leaves_the_run_and_its_guards(
    box: Sshd, lab: LabDirectory
) -> None:
    loop = "while :; do echo on; sleep 0.2; done"
    with slow_scopes(box):
        lab.labctl("run", "--detach", "--id", "night", "--", "sh", "-c", loop)
        log_out(box)

    def has_guards() -> bool:
        guards = list_guards(box)
        print(guards)  # a failure shows which one is missing
        return all(guards.values())

    wait_for(has_guards)
    status = lab.json("status", "--refresh")
    assert status["runs"][0]["state"] == "running"
    assert "on" in lab.labctl("logs", "night").stdout
    box.sh("su student -c 'tmux has-session -t =labctl-night'")
    lab.labctl("cancel", "night")


@pytest.mark.long
def test_a_watchdog_that_keeps_crashing_is_started_again(box: Sshd, tmp_path: Path) -> None:
    """More often than systemd's default limit of five starts within ten seconds allows."""
    server = box.server()
    path = Connections(tmp_path / "ssh", None).write(server)
    remote = AgentClient(OpenSshTransport(path, server.id, server.endpoint, master=False))
    lab_id = "77aa5500ee12"
    ending = EndingRecord("poweroff", "stays", grace_s=10)
    remote.call(
        GUARD, GuardRequest("crashes", lab_id, "crashes", GuardLimits(ttl_s=3600.0), ending)
    )
    seen = {"0"}

    def is_started_again() -> bool:
        pid = box.sh("systemctl show -P MainPID labctl-watchdog").strip()
        if pid in seen:
            return False
        seen.add(pid)
        box.sh(f"kill -9 {pid}")
        return True

    for _ in range(7):
        wait_for(is_started_again, 60)

    def is_alive() -> bool:
        watch = remote.call(WATCH, WatchRequest(lab_id)).watch
        return watch is not None and watch.alive

    wait_for(is_alive)
    box.sh("systemctl disable --now labctl-watchdog")


def test_what_cleans_a_machine_for_an_image_leaves_no_key_and_an_end(
    server_image: str, tmp_path: Path
) -> None:
    """Many servers boot from its disk. It powers off by itself, whatever becomes of labctl."""
    with machine(build_image(server_image), tmp_path) as box:
        box.sh("su student -c 'mkdir -p ~/labctl/ml/data && echo one > ~/labctl/ml/data/one'")
        box.sh("su student -c 'echo secret > ~/.bash_history'")
        box.sh(f"sh -c {shlex.quote(CLEAN_SCRIPT)} sh /home/student ml /var/lib/labctl/data")
        gone = "/home/student/.ssh/authorized_keys /home/student/.bash_history /home/student/labctl"
        box.sh(f"for each in {gone} /etc/ssh/ssh_host_*; do [ ! -e $each ] || exit 1; done")
        assert box.sh("cat /var/lib/labctl/data/one") == "one\n"
        assert "MODE=poweroff" in box.sh("cat /run/systemd/shutdown/scheduled")
