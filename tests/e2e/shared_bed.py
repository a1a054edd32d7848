"""A shared server for tests: the product's image with two stand-in GPUs, shared by its playbook.

Two students have accounts there, and log in over SSH with keys of their own, as they would.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab_servers import LabServer
from prepare_bench import Recorded

from labctl.config import find_paths
from labctl.courses.records.folder import CourseFolder, make_private
from labctl.courses.servers import CourseOperator, bring_up_servers
from labctl.events import Question
from labctl.model import Server
from labctl.servers.agent import AgentClient
from labctl.servers.connections import Connections
from labctl.state import State
from labctl.wire.runs import (
    CANCEL_RUN,
    RUN,
    START_RUN,
    STATUS,
    CancelRunRequest,
    RunRecord,
    RunSpec,
    StartRunRequest,
    StatusRequest,
)

BROKER = "/run/labctl/broker.sock"
IMAGE = "labctl-test-small:1"
SLEEP = "trap 'exit 0' TERM; echo here; sleep 600 & wait"


@dataclass
class Person:
    """One account of the server, as its owner uses it."""

    name: str
    server: Server
    connections: Connections

    @property
    def remote(self) -> AgentClient:
        """labctl's program there, over the person's own connection."""
        return AgentClient(self.connections.open(self.server))

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
        return self.ask_all([(method, path, body)])[0]

    def ask_all(self, asked: Sequence[tuple[str, str, Any]]) -> list[tuple[int, Any]]:
        """The same for many, in one login."""
        answers = json.loads(self.said(f"python3 -c {quoted(ASK.replace('ASKED', repr(asked)))}"))
        return [(status, json.loads(text or "null")) for status, text in answers]

    def spec(self, run: str, shell: str, **more: Any) -> StartRunRequest:
        """What labctl sends to have a run started."""
        spec = RunSpec(
            id=run,
            lab="hw3",
            lab_id=self.server.lab_id,
            command=("sh", "-c", shell),
            image=IMAGE,
            env={},
        )
        return StartRunRequest(spec._replace(**more))

    def run(self, run: str, shell: str, **more: Any) -> tuple[str, RunRecord]:
        """Start a run and follow it to its end: (its log, what became of it)."""
        log = bytearray()
        closing = self.remote.stream(
            RUN, self.spec(run, shell, **more), on_reply=lambda _: None, on_bytes=log.extend
        )
        assert closing.run is not None
        return log.decode(), closing.run

    def start(self, run: str, shell: str, **more: Any) -> RunRecord:
        reply = self.remote.call(START_RUN, self.spec(run, shell, **more))
        assert reply.run is not None
        return reply.run

    def cancel(self, run: str, grace_s: int = 60) -> RunRecord:
        request = CancelRunRequest("hw3", self.server.lab_id, run, grace_s)
        return self.remote.call(CANCEL_RUN, request).run

    def find_run(self, run: str) -> RunRecord:
        request = StatusRequest("hw3", self.server.lab_id, (run,))
        (record,) = self.remote.call(STATUS, request).runs
        return record


ASK = """
import http.client, json, socket
said = []
for method, path, body in ASKED:
    link = http.client.HTTPConnection("docker", timeout=120)
    link.sock = socket.socket(socket.AF_UNIX)
    link.sock.connect("/run/labctl/broker.sock")
    link.request(method, path, json.dumps(body) if body is not None else None)
    reply = link.getresponse()
    said.append([reply.status, reply.read().decode()])
print(json.dumps(said))
"""


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


class Agreeing(Recorded):
    """Staff, who confirms the host key and whatever else is asked."""

    def confirm(self, decision: Question) -> bool:
        return True


@dataclass
class SharedServer:
    """The server, the course that shares it, and the people on it."""

    host: LabServer
    folder: CourseFolder
    home: Path
    people: dict[str, Person]
    reporter: Agreeing = field(default_factory=Agreeing)

    def staff(self) -> CourseOperator:
        """As a new process has it."""
        places = find_paths({"HOME": str(self.home)})
        return CourseOperator(
            CourseFolder(self.folder.path),
            places,
            State(places.database),
            self.reporter,
            by="staff",
        )


COURSE = """\
course: ml
server:
  provider: static
  static: {{hosts: [{{host: 127.0.0.1, port: {port}, user: student, identity: {key}}}]}}
shared: {{accounts_per_server: 4, gpu_lease: 1h}}
image: {image}
"""
ROSTER = "id,name,email,team,section,active\nalice,Alice,,,,yes\nbob,Bob,,,,yes\n"


def shared(host: LabServer, folder: Path) -> SharedServer:
    """Share a lab server between two students, as `labctl course up` does."""
    # Device nodes as a driver makes them. There is no device behind them.
    host.sh("for n in 0 1; do mknod -m 666 /dev/nvidia$n c 195 $n; done")
    # Images outlive test servers: none of an account of an earlier one.
    host.sh("docker images --quiet 'labctl-u*/*' | xargs -r docker rmi --force")
    host.sh("docker images --quiet 'labctl-u*/*/*' | xargs -r docker rmi --force")
    host.load(IMAGE)
    course = folder / "ml"
    course.mkdir()
    way = host.endpoint
    (course / "course.yaml").write_text(COURSE.format(port=way.port, key=way.identity, image=IMAGE))
    (course / "roster.csv").write_text(ROSTER)
    make_private(course)
    made = SharedServer(host, CourseFolder(course), folder / "home", {})
    made.home.mkdir()
    staff = made.staff()
    for one in bring_up_servers(staff, staff.folder.list_seats()):
        assert one.server is not None, f"{one.error}: {one.why}"
        name = f"lab-{one.seat}"
        own = Connections(folder / f"of-{one.seat}", None)
        made.people[name] = Person(name, one.server, own)
    return made


@contextmanager
def small_shares(bed: SharedServer, **settings: int) -> Iterator[None]:
    """The broker decides by these for a while."""
    path, start = "/etc/labctl/broker.json", "/usr/local/lib/labctl/start-broker"
    before = bed.host.sh(f"cat {path}")
    try:
        bed.host.sh(f"echo '{json.dumps({**json.loads(before), **settings})}' > {path}; {start}")
        yield
    finally:
        bed.host.sh(f"echo '{before.strip()}' > {path}; {start}")
