"""A shared server for tests: the product's image with two stand-in GPUs, shared by its playbook.

Two students have accounts there, and log in over SSH with keys of their own, as they would.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from lab_servers import LabServer
from prepare_bench import PLAYBOOKS, Recorded

from labctl.actions.connections import Connections
from labctl.actions.host_keys import make_key
from labctl.actions.remote import Remote
from labctl.actions.shared_server import Account, Sharing, share
from labctl.model import Endpoint, Server

BROKER = "/run/labctl/broker.sock"
NAMES = ("lab-alice", "lab-bob")
SHARING = Sharing(places=4, gpus=1, gpu_lease_s=3600)
IMAGE = "labctl-test-small:1"


@dataclass
class Person:
    """One account of the server, as its owner uses it."""

    name: str
    server: Server
    connections: Connections

    @property
    def remote(self) -> Remote:
        """labctl's program there, over the person's own connection."""
        return Remote(self.connections.open(self.server))

    @property
    def ssh_config(self) -> Path:
        return self.connections.config_path(self.server.id)

    def ssh(self, line: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        config = str(self.connections.write(self.server))
        words = ["ssh", "-F", config, self.server.id, "--", line]
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done

    def said(self, line: str) -> str:
        return self.ssh(line).stdout.strip()

    def refused(self, line: str) -> str:
        """What a line says that must fail."""
        done = self.ssh(line, check=False)
        assert done.returncode != 0, f"{line} was let through: {done.stdout}"
        return done.stdout + done.stderr

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """What the broker answers to a request of any kind: (status, JSON)."""
        script = ASK.replace("REQUEST", repr((method, path, body)))
        answer = self.said(f"python3 -c {_quoted(script)}")
        status, _, text = answer.partition("\n")
        return int(status), json.loads(text or "null")

    def spec(self, run: str, shell: str, **more: Any) -> dict[str, Any]:
        """What labctl sends to have a run started."""
        spec = {
            "id": run,
            "lab": "hw3",
            "lab_id": f"{self.server.lab_id}",
            "command": ["sh", "-c", shell],
            "image": IMAGE,
            "env": {},
            "secrets": [],
            "outputs": ["checkpoints", "logs"],
            "gpus": "",
            "memory_bytes": 0,
            "cpus": 0.0,
            "shm_bytes": 0,
            "tty": False,
        }
        return {"spec": {**spec, **more}, "secrets": {}}

    def run(self, run: str, shell: str, **more: Any) -> tuple[str, dict[str, Any]]:
        """Start a run and follow it to its end: (its log, what became of it)."""
        log = bytearray()
        closing = self.remote.stream(
            "run", self.spec(run, shell, **more), on_reply=lambda _: None, on_bytes=log.extend
        )
        return log.decode(), closing["run"]

    def start(self, run: str, shell: str, **more: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.remote.call("start", self.spec(run, shell, **more))["run"]
        return found

    def about(self, run: str) -> dict[str, Any]:
        return {"lab": "hw3", "lab_id": self.server.lab_id, "run": run}


ASK = """
import http.client, json, socket
method, path, body = REQUEST
link = http.client.HTTPConnection("docker", timeout=30)
link.sock = socket.socket(socket.AF_UNIX)
link.sock.connect("/run/labctl/broker.sock")
link.request(method, path, json.dumps(body) if body is not None else None)
reply = link.getresponse()
print(reply.status)
print(reply.read().decode())
"""


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


@dataclass
class SharedServer:
    """The server as staff has it, and the people on it."""

    host: LabServer
    staff: Connections
    server: Server
    people: dict[str, Person]
    reporter: Recorded

    def share(self, *accounts: Account, only_accounts: bool = False) -> None:
        """Run the playbook, as staff."""
        self.reporter.events.clear()
        share(
            self.server,
            accounts,
            SHARING,
            playbooks_dir=PLAYBOOKS,
            ssh_config=self.staff.write(self.server),
            reporter=self.reporter,
            only_accounts=only_accounts,
        )


def shared(host: LabServer, folder: Path) -> SharedServer:
    """Share a lab server between NAMES; one who has no account yet cannot log in."""
    # The local provider's image lets in its one user only.
    host.sh("sed -i /^AllowUsers/d /etc/ssh/sshd_config && kill -HUP $(cat /run/sshd.pid)")
    # Device nodes as a driver makes them. There is no device behind them.
    host.sh("for n in 0 1; do mknod -m 666 /dev/nvidia$n c 195 $n; done")
    host.load(IMAGE)
    staff = Connections(folder / "staff", None)
    found = host.found()
    people, accounts = {}, []
    for number, name in enumerate(NAMES):
        key = folder / name
        accounts.append(Account(name=name, keys=(make_key(key),)))
        endpoint = _as(found, name, key)
        server = _server(found, f"seat-{number}", f"{number}" * 12, endpoint)
        people[name] = Person(name, server, Connections(folder / f"of-{name}", None))
    made = SharedServer(host, staff, found, people, Recorded())
    made.share(*accounts)
    return made


def _as(found: Server, user: str, key: Path) -> Endpoint:
    return msgspec.structs.replace(found.endpoint, user=user, identity=str(key))


def _server(found: Server, name: str, lab_id: str, endpoint: Endpoint) -> Server:
    return msgspec.structs.replace(
        found, id=name, lab="hw3", lab_id=lab_id, alias=name, endpoint=endpoint
    )
