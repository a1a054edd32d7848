"""A new version of the watchdog takes over from an earlier one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from labctl.agent.watchdog import install
from labctl.agent.watchdog.state_files import Lock

# Holds the lock as a watchdog does, and nothing else.
PROGRAM = """
import fcntl, os, sys, time
lock = os.open(sys.argv[2] + "/lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
os.pwrite(lock, str(os.getpid()).encode(), 0)
time.sleep(60)
"""


def wait_for_holder(lock: Lock) -> int:
    deadline = time.monotonic() + 20
    while not (pid := lock.holder()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return pid


def test_the_earlier_start_script_does_not_restart_it_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "remote-old", tmp_path / "remote-new"
    for program in (old, new):
        program.mkdir()
        (program / "__main__.py").write_text(PROGRAM)
    script = tmp_path / "start"
    script.write_text(install.start_script(tmp_path, old))
    supervisor = subprocess.Popen(["sh", str(script)])
    lock = Lock(tmp_path)
    restarted: list[int] = []

    def spawn_slowly(directory: Path, program: Path) -> None:
        time.sleep(2.5)  # longer than the second after which the script restarts its program
        restarted.append(lock.holder())

    monkeypatch.setattr(install, "_spawn", spawn_slowly)
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    wait_for_holder(lock)
    try:
        assert install._ensure_watchdog(tmp_path, new)
        assert restarted == [0]
        assert supervisor.wait(20) == 0
        assert (new / "__main__.py").exists()
    finally:
        supervisor.kill()
        supervisor.wait()
        if pid := lock.holder():
            os.kill(pid, signal.SIGKILL)
