"""Bare machines as accounts reach them, for tests of `prepare`; and what a person types."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from sshd_container import Sshd

from labctl.commands import ansible
from labctl.events import Event, Question
from labctl.model import Endpoint, Server, ServerFacts
from labctl.servers.connections import Connections
from labctl.servers.prepare import playbook_hash, prepare
from labctl.shell import Command
from labctl.transports import RemoteShell, Result, Transport

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOKS = ROOT / "playbooks"
T = TypeVar("T", bound=Event)


@dataclass
class Recorded:
    """A Reporter that keeps what it is told."""

    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def confirm(self, decision: Question) -> bool:
        return decision.default

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]


class Counted:
    """A transport that counts round trips."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.endpoint: Endpoint = inner.endpoint
        self.round_trips = 0

    def run(
        self,
        line: Command | str,
        *,
        stdin: bytes = b"",
        timeout_s: float | None = 60.0,
        check: bool = True,
    ) -> Result:
        self.round_trips += 1
        return self.inner.run(line, stdin=stdin, timeout_s=timeout_s, check=check)

    def stream(
        self,
        line: Command | str,
        *,
        stdin: bytes = b"",
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        self.round_trips += 1
        return self.inner.stream(
            line, stdin=stdin, on_stdout=on_stdout, on_stderr=on_stderr, timeout_s=timeout_s
        )

    def remote_shell(self) -> RemoteShell | None:
        return self.inner.remote_shell()

    def close(self) -> None:
        self.inner.close()


@dataclass
class Bench:
    """One bare machine as one account reaches it."""

    box: Sshd
    connections: Connections
    server: Server
    transport: Counted
    reporter: Recorded

    @property
    def ssh_config(self) -> Path:
        return self.connections.config_path(self.server.id)

    def prepare(self, facts: ServerFacts | None = None, *, boto3: bool = False) -> ServerFacts:
        return prepare(
            self.transport,
            self.server,
            facts,
            playbooks_dir=PLAYBOOKS,
            ssh_config=self.ssh_config,
            reporter=self.reporter,
            boto3=boto3,
        )


def bench(box: Sshd, folder: Path, user: str) -> Bench:
    connections = Connections(folder / user, None)
    server = box.server(f"{user}-1", f"{user}s-lab", user=user)
    transport = Counted(connections.open(server))
    return Bench(box, connections, server, transport, Recorded())


def by_hand(inventory: Path, *words: str) -> tuple[str, int]:
    """What a person types. Its output, and how many tasks changed something."""
    playbook = str(Path(sys.executable).with_name("ansible-playbook"))
    done = subprocess.run(
        ["env", "LC_ALL=C.UTF-8", playbook, "-i", str(inventory), "playbooks/server.yml", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    changed = re.search(r"changed=(\d+)", done.stdout)
    assert changed, done.stdout + done.stderr
    return done.stdout + done.stderr, int(changed.group(1)) if done.returncode == 0 else -1


def inventory_of(*benches: Bench, folder: Path) -> Path:
    hosts = [
        ansible.Host(
            alias=one.server.alias,
            ssh_config=one.ssh_config,
            user=one.server.endpoint.user,
            stamp=playbook_hash(PLAYBOOKS),
        )
        for one in benches
    ]
    path = folder / "hosts"
    path.write_text(ansible.build_inventory(hosts))
    return path
