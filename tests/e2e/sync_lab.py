"""A small server for transfers: sshd, python3, and a disk of a chosen size.

Fixtures of sshd_fixtures.py start it: `pytest_plugins = ["sshd_fixtures"]` in a test module.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from sshd_container import IMAGE, Sshd, build, docker

from labctl.events import Event, Note, Progress, Question
from labctl.servers.agent import AgentClient
from labctl.servers.connections import Connections
from labctl.transports.openssh import OpenSshTransport

LAB = "digits"
LAB_ID = "0f1e2d3c4b5a"
HOME = f"/home/student/labctl/{LAB}"
SYNC_IMAGE = "labctl-test-sync"
DOCKERFILE = f"""
ARG BASE
FROM {IMAGE}
RUN apt-get update \\
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \\
       python3 openssl rsync tmux \\
    && rm -rf /var/lib/apt/lists/*
"""


class Recorder:
    """A Reporter that keeps what it was told and answers every question with `answer`."""

    def __init__(self, answer: bool = True) -> None:
        self.answer = answer
        self.events: list[Event] = []
        self.asked: list[Question] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def confirm(self, decision: Question) -> bool:
        self.asked.append(decision)
        return self.answer

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]

    def progress(self, name: str) -> list[Progress]:
        return [e for e in self.events if isinstance(e, Progress) and e.name == name]


def build_image() -> str:
    """Stands on the image of `sshd_container`, which must be there."""
    return build(SYNC_IMAGE, DOCKERFILE)


class Box:
    """One user's way to a container, with what the actions need."""

    def __init__(self, sshd: Sshd, connections: Connections, user: str = "student") -> None:
        self.sshd = sshd
        self.user = user
        server = sshd.server(f"{user}-1", f"{user}-digits", user=user)
        config = connections.write(server)
        self.transport = OpenSshTransport(config, server.id, server.endpoint)
        self.remote = AgentClient(self.transport)

    def sh(self, line: str) -> str:
        return self.sshd.sh(line, user=self.user)

    def put(self, path: str, content: bytes) -> None:
        """Write a file of the lab on the server, as if a run or a person had."""
        place = f"{HOME}/{path}"
        text = base64.b64encode(content).decode()
        docker(
            *("exec", "-i", "-u", self.user, self.sshd.name, "sh", "-c"),
            f'mkdir -p "$(dirname "{place}")" && base64 -d > "{place}"',
            stdin=text,
        )

    def make_run(self, run: str, *, ended: bool = True) -> None:
        """A run directory as the server's program leaves it."""
        self.put(f"runs/{run}/.labctl/spec.json", b'{"outputs":["checkpoints","logs"]}')
        self.put(f"runs/{run}/logs/run.log", b"epoch 1\n")
        if ended:
            self.put(f"runs/{run}/.labctl/record.json", b'{"id":"r1","state":"exited"}')

    def hashes(self, path: str) -> dict[str, str]:
        """sha256 of each file below `path` of the lab."""
        said = self.sh(f'cd ~/labctl/{LAB}/"{path}" && find . -type f -exec sha256sum {{}} +')
        pairs = (line.split("  ", 1) for line in said.splitlines())
        return {name.removeprefix("./"): sha256 for sha256, name in pairs}


def local_hashes(root: Path, *, without: tuple[str, ...] = (".labctl",)) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file() and path.relative_to(root).parts[0] not in without
    }
