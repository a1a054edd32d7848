"""A server that is a directory of this machine: its program, rsync and tar are the real ones."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from shared_agent import link_agent, run_line

from labctl.commands import rsync
from labctl.model import Endpoint
from labctl.transports import Execution, RemoteShell, Transport, iterate_blocks

if TYPE_CHECKING:
    from paramiko import SFTPClient

# As ssh does: what follows the host's name is a line for a shell there.
SHELL = """#!/bin/sh
export HOME={home}
{prelude}
shift
exec sh -c "$*"
"""

# Who ends a transfer's program, and how: both sides and both signals. The other pairs with --long.
KILLED_PROGRAMS = pytest.mark.parametrize(
    ("side", "number"),
    [
        ("here", signal.SIGKILL),
        pytest.param("there", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("here", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("there", signal.SIGKILL, marks=pytest.mark.long),
    ],
)


class DirectoryServer(Transport):
    """A transport whose server is `home`. Without `has_rsync`, there is none on the server.

    `prelude` is what its login shell does first; `on_line` hears each line before it runs, and
    `before_transfer` that one begins: they may raise what becomes of the link.
    """

    def __init__(self, home: Path, *, has_rsync: bool = True, prelude: str = "") -> None:
        self.endpoint = Endpoint(host="here.example")
        self.home = home
        self.prelude = prelude
        self.lines: list[str] = []
        self.shells = 0
        self.on_line: Callable[[str], None] = lambda line: None
        self.before_transfer: Callable[[], None] = lambda: None
        link_agent(home)
        self.path = os.environ["PATH"] if has_rsync else str(_programs_without_rsync(home))

    def _execute(self, execution: Execution) -> tuple[int, bytes]:
        line = str(execution.line)
        if line.startswith("exec tar "):
            self.before_transfer()
        self.lines.append(line)
        self.on_line(line)
        stdin = b"".join(iterate_blocks(execution.stdin))
        done = run_line(line, stdin, {"PATH": self.path, "HOME": str(self.home)})
        for start in range(0, len(done.stdout), 65_537):
            execution.on_stdout(done.stdout[start : start + 65_537])
        execution.on_stderr(done.stderr)
        return done.returncode, b""

    def remote_shell(self) -> RemoteShell | None:
        self.shells += 1
        self.before_transfer()
        script = self.home.parent / "remote shell's"
        script.write_text(SHELL.format(home=shlex.quote(str(self.home)), prelude=self.prelude))
        script.chmod(0o755)
        return RemoteShell(words=(str(script),), host="here")

    def open_sftp(self) -> AbstractContextManager[SFTPClient]:
        raise AssertionError("this server has no SFTP")

    def close(self) -> None:
        pass

    @property
    def verbs(self) -> list[str]:
        """What the program on the server was asked, in turn."""
        return [line.split()[-1] for line in self.lines if "__main__.py" in line]


def _programs_without_rsync(home: Path) -> Path:
    programs = home.parent / "programs"
    programs.mkdir(exist_ok=True)
    for name in ("sh", "tar", "cat", "mkdir", "find", "rm", "mv"):
        found = subprocess.run(["which", name], capture_output=True, text=True, check=True)
        (programs / name).symlink_to(found.stdout.strip())
    (programs / "python3").symlink_to(sys.executable)
    return programs


def rsyncs(*, is_server: bool | None = None) -> list[int]:
    """The rsyncs that this process has begun: those that stand for the server, or the others."""
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()]
    family = {os.getpid()}
    for _ in rows:
        family |= {int(row[0]) for row in rows if int(row[1]) in family}
    return [
        int(pid)
        for pid, _, line in rows
        if int(pid) in family
        and line.startswith("rsync")
        and is_server in (None, "--server" in line)
    ]


def wait_until(is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_over():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """rsync at 8 MiB/s, so that it can be met in the middle of a file."""
    argv = rsync.transfer_argv

    def slowed(program: rsync.RsyncProgram, transfer: rsync.Transfer) -> list[str]:
        first, *rest = argv(program, transfer)
        return [first, "--bwlimit=8192", *rest]

    monkeypatch.setattr(rsync, "transfer_argv", slowed)
