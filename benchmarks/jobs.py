"""Jobs on a ready server: a container compared with `ssh HOST docker run`, and a tmux session.

labctl's side of the container does more: it claims the run's id, makes its directories and a
snapshot of the code, and opens a tmux session beside the container.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Generator

from benchmarks.lab_server import ReadyLab, start_lab
from benchmarks.measure import Call, Comparison, NotDoneError, Row, environment
from benchmarks.settings import Settings
from benchmarks.startup import LABCTL
from labctl import Lab
from labctl.config import find_paths
from labctl.servers.connections import Connections
from labctl.transports import Transport

BASELINE = "ssh HOST docker run"
TARGET, SESSION_TARGET = 0.6, 0.1
PAUSE_S = 0.7
SDK_WORK = """
import sys, docker
client = docker.DockerClient.from_env(use_ssh_client=True)
client.containers.run(sys.argv[1], ["echo", "done"], detach=True)
client.close()
"""


def compare(settings: Settings) -> Generator[Comparison]:
    """Compare the start of a container, and of a tmux session, on one server."""
    sizes = settings.sizes
    with start_lab(settings.home / "jobs", settings.image) as lab:
        yield Comparison(
            "a container on a ready server",
            _list_container_rows(lab),
            sizes.rounds,
            PAUSE_S,
            finish=lambda number: _check_runs(lab, number),
        )
        yield Comparison("a tmux session made and read", _list_session_rows(lab), sizes.rounds)


def _list_container_rows(lab: ReadyLab) -> list[Row]:
    """Return the rows; the first is the baseline."""

    def row(name: str, *argv: str, expects: str = "", target: float | None = None) -> Row:
        return Row(name, Call(argv, lab.home, lab.root, expects), target)

    shared = (
        *lab.ssh[:1],
        *("-o", "ControlMaster=auto", "-o", f"ControlPath={lab.home}/cm"),
        *("-o", "ControlPersist=60", *lab.ssh[1:]),
    )
    run = f"docker run {lab.image} echo done"
    detached = f"docker run -d {lab.image} echo done"
    far = _over_ssh(lab)
    detach = ("run", "--detach", "--no-push", "--id", "bench-{n}", "--", "echo", "done")
    return [
        row(BASELINE, *lab.ssh, run, expects="done"),
        row("ssh HOST docker run -d", *lab.ssh, detached),
        row("ssh through a master, docker run -d", *shared, detached),
        row("labctl run --detach", LABCTL, *detach, target=TARGET),
        Row("Lab.run, in process", _RunInProcess(lab), ours=True),
        row("docker run -d, DOCKER_HOST=ssh://", *far, *detached.split()),
        row("docker SDK over ssh://", *far, sys.executable, "-c", SDK_WORK, lab.image),
    ]


def _over_ssh(lab: ReadyLab) -> tuple[str, ...]:
    """Return the words before a program that uses DOCKER_HOST, with ssh on its PATH.

    Both docker clients call `ssh HOST`, which reads the config of the user's real home: here a
    program of that name says where the server is.
    """
    folder = lab.home / "bin"
    folder.mkdir(exist_ok=True)
    *options, _ = lab.ssh[1:]
    words = shlex.join([str(shutil.which("ssh")), *options, "-o", f"HostName={lab.host}"])
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    (folder / "ssh").chmod(0o755)
    path = f"PATH={folder}:{os.environ['PATH']}"
    return ("env", path, f"DOCKER_HOST=ssh://{lab.user}@server")


class _RunInProcess:
    """Call `Lab.run` without starting an interpreter, over the same shared connection."""

    def __init__(self, lab: ReadyLab) -> None:
        self.lab = Lab.load(lab.root, environ=environment(lab.home))

    def __call__(self, number: int) -> None:
        run = self.lab.run(["echo", "done"], id=f"inner-{number}", push=False)
        if run.last_known.state not in ("running", "exited"):
            raise NotDoneError(f"{run.id} is {run.last_known.state}")


def _check_runs(lab: ReadyLab, last: int) -> None:
    """Check that every timed run is on the server, exited with 0 and printed its line."""
    runs = {run["id"]: run for run in json.loads(lab.labctl("status", "-r", "--json"))["runs"]}
    for number in range(last + 1):
        for name in (f"bench-{number}", f"inner-{number}"):
            if runs.get(name, {}).get("exit_code") != 0:
                raise NotDoneError(f"{name}: {runs.get(name)}")
    if "done" not in lab.labctl("logs", f"bench-{last}"):
        raise NotDoneError(f"bench-{last} printed nothing")


def _list_session_rows(lab: ReadyLab) -> list[Row]:
    """Return two rows: two fresh ssh, and one line over the shared connection.

    The baseline is what a script does that knows of neither compound commands nor masters.
    """
    make = "tmux new-session -d -s bench 'echo done; exec cat'"
    read = "tmux capture-pane -p -t bench"
    ssh = shlex.join(lab.ssh)
    twice = f"{ssh} {shlex.quote(make)} && {ssh} {shlex.quote(read)}"
    transport = _connect_in_process(lab)
    rows = [
        Row("two ssh", Call(("sh", "-c", twice), lab.home, lab.home)),
        Row(
            "labctl in process, one line",
            _RunLine(transport, f"{make} && {read}"),
            target=SESSION_TARGET,
        ),
    ]
    for row in rows:
        row.before = lambda number: _end_session(transport)
        row.after = lambda number: _check_session(transport)
    return rows


def _connect_in_process(lab: ReadyLab) -> Transport:
    """Return a connection as programs have them: over fabric, inside this process."""
    paths = find_paths({"HOME": str(lab.home)})
    connections = Connections(paths.ssh_dir, paths.user_ssh_config, in_process=True)
    context = Lab.load(lab.root, environ=environment(lab.home)).context
    return connections.open(context.get_server())


class _RunLine:
    def __init__(self, transport: Transport, line: str) -> None:
        self.transport = transport
        self.line = line

    def __call__(self, number: int) -> None:
        self.transport.run(self.line)


def _end_session(transport: Transport) -> None:
    transport.run("tmux kill-session -t bench 2>&- || true")


def _check_session(transport: Transport) -> None:
    read = "for i in 1 2 3 4 5; do tmux capture-pane -p -t bench; sleep 0.1; done"
    if "done" not in transport.run(read).stdout:
        raise NotDoneError("the session printed nothing")
