"""Starting a container on a ready server: labctl compared with `ssh HOST docker run`.

labctl's side does more: it claims the run's id, makes its directories and a snapshot of the code,
and opens a tmux session beside the container.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Call, NotDoneError, Row, environment
from benchmarks.startup import LABCTL

BASELINE = "ssh HOST docker run"
TARGET = 0.6
PAUSE_S = 0.7
SDK_WORK = """
import sys, docker
client = docker.DockerClient.from_env(use_ssh_client=True)
client.containers.run(sys.argv[1], ["echo", "done"], detach=True)
client.close()
"""


@dataclass(frozen=True)
class Ready:
    """A lab with a server that has the image. `ssh` is the argv up to the remote command."""

    home: Path
    root: Path
    image: str
    ssh: tuple[str, ...] = ()
    user: str = ""
    host: str = ""

    def labctl(self, *words: str) -> str:
        done = subprocess.run(
            [LABCTL, *words],
            cwd=self.root,
            env=environment(self.home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode != 0:
            raise NotDoneError(f"labctl {' '.join(words)} ended with {done.returncode}")
        return done.stdout


@contextmanager
def ready(home: Path, image: str) -> Iterator[Ready]:
    """Run a lab and its server, and remove both at the end."""
    root = home / "bench"
    root.mkdir(parents=True)
    (root / "lab.yaml").write_text(f"lab: bench\nimage: {image}\nrun: echo done\n")
    lab = Ready(home, root, image)
    try:
        print("starting a lab server", file=sys.stderr)
        server = json.loads(lab.labctl("up", "--yes", "--json"))["server"]
        lab.labctl("run", "--id", "warm", "--json")
        place = server["endpoint"]
        yield Ready(home, root, image, _ssh(home, server), place["user"], place["host"])
    finally:
        lab.labctl("down", "--yes", "--discard")


def _ssh(home: Path, server: dict[str, dict[str, str]]) -> tuple[str, ...]:
    """Return ssh as a person uses it: defaults, a known host, no shared connection."""
    endpoint = server["endpoint"]
    known = home / "known_hosts"
    place = f"[{endpoint['host']}]:{endpoint['port']}"
    known.write_text(f"{place} {endpoint['host_key']}\n")
    return (
        *("ssh", "-F", "none", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes"),
        *("-o", f"UserKnownHostsFile={known}", "-i", endpoint["identity"]),
        *("-p", str(endpoint["port"]), f"{endpoint['user']}@{endpoint['host']}"),
    )


def rows(lab: Ready) -> list[Row]:
    """The first row is the baseline."""

    def row(name: str, *argv: str, expects: str = "", target: float | None = None) -> Row:
        return Row("container start", name, Call(argv, lab.home, lab.root, expects), target)

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
        Row("container start", "Lab.run, in process", _InProcess(lab)),
        row("docker run -d, DOCKER_HOST=ssh://", *far, *detached.split()),
        row("docker SDK over ssh://", *far, sys.executable, "-c", SDK_WORK, lab.image),
    ]


def _over_ssh(lab: Ready) -> tuple[str, ...]:
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


class _InProcess:
    """Call `Lab.run` without starting an interpreter, over the same shared connection."""

    def __init__(self, lab: Ready) -> None:
        from labctl import Lab

        self.lab = Lab.load(lab.root, environ=environment(lab.home))

    def __call__(self, number: int) -> None:
        run = self.lab.run(["echo", "done"], id=f"inner-{number}", push=False)
        if run.last_known.state not in ("running", "exited"):
            raise NotDoneError(f"{run.id} is {run.last_known.state}")


def check(lab: Ready, rounds: int) -> None:
    """Check that every timed run is on the server, exited with 0 and printed its line."""
    runs = {run["id"]: run for run in json.loads(lab.labctl("status", "-r", "--json"))["runs"]}
    for number in range(rounds + 1):
        for name in (f"bench-{number}", f"inner-{number}"):
            if runs.get(name, {}).get("exit_code") != 0:
                raise NotDoneError(f"{name}: {runs.get(name)}")
    if "done" not in lab.labctl("logs", f"bench-{rounds}"):
        raise NotDoneError(f"bench-{rounds} printed nothing")
