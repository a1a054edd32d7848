"""A lab on a lab server with an engine of its own, for services and forwards.

Its fixtures are in service_fixtures.py: `pytest_plugins = ["service_fixtures"]` in a test module.

LABCTL_BASE_IMAGE names the image that everything is made from, LABCTL_WHEELHOUSE a directory of
wheels for TensorBoard and JupyterLab; without it pip asks its index.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from sshd_container import Sshd, docker

from labctl.events import Event, Note, Question
from labctl.model import Server, Service
from labctl.servers.agent import AgentClient
from labctl.servers.connections import Connections
from labctl.services.port_forward import ForwardSpec
from labctl.services.services import ensure_service
from labctl.transports.openssh import OpenSshTransport
from labctl.wire.services import ServiceRequest

LAB = "digits"
LAB_ID = "5d1f0c2e9a7b"
HOME = "/home/student/labctl"
SCALARS = """
import sys
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
writer = EventFileWriter(sys.argv[1])
for step in range(5):
    value = Summary.Value(tag="train/loss_of_digits", simple_value=1.0 / (step + 1))
    writer.add_event(Event(step=step, wall_time=1.7e9 + step, summary=Summary(value=[value])))
writer.close()
"""


class Recorder:
    """A Reporter that keeps what it was told; flows may tell from several threads."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def confirm(self, decision: Question) -> bool:
        return decision.default

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]

    def count(self, words: str) -> int:
        return sum(words in note for note in self.notes)


class ServiceLab:
    """A lab on a lab server of its own, whose image is bare: it has neither tool."""

    def __init__(self, box: Sshd, ssh_dir: Path, image: str, wheelhouse: bool) -> None:
        self.box = box
        self.image = image
        self.wheelhouse = wheelhouse
        self.connections = Connections(ssh_dir, None)
        self.reporter = Recorder()

    @property
    def server(self) -> Server:
        return self.box.server("services-1", LAB)

    @property
    def remote(self) -> AgentClient:
        server = self.server
        path = self.connections.write(server)
        return AgentClient(OpenSshTransport(path, server.id, server.endpoint, master=False))

    def request(self, name: str, *command: str, port: int = 0) -> ServiceRequest:
        return ServiceRequest(
            lab=LAB,
            lab_id=LAB_ID,
            name=name,
            image=self.image,
            command=command,
            port=port,
            wheelhouse=self.wheelhouse,
        )

    def ensure(self, name: str, *command: str, port: int = 0) -> Service:
        return ensure_service(self.remote, self.request(name, *command, port=port), self.reporter)

    def web(self, name: str = "web") -> Service:
        """A small service that serves the lab's code."""
        self.box.sh(f"mkdir -p {HOME}/{LAB}/code", user="student")
        self.box.sh(f"echo hello > {HOME}/{LAB}/code/hello.txt", user="student")
        program = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8000)"
        return self.ensure(name, "python3", "-c", program, port=8000)

    def spec(self, service: Service, local_port: int = 0) -> ForwardSpec:
        server = self.server
        return ForwardSpec(
            config=str(self.connections.write(server)),
            server_id=server.id,
            endpoint=server.endpoint,
            service=service,
            local_port=local_port,
        )

    def inspect(self, container: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = msgspec.json.decode(
            self.box.sh(f"docker inspect {container}").encode()
        )
        return found[0]

    def write_scalars(self, run: str) -> None:
        """A run that logged scalars, as TensorBoard's own writer does it."""
        logs = f"{HOME}/{LAB}/runs/{run}/logs"
        self.box.sh(f"mkdir -p {logs}", user="student")
        tag = self.box.sh(
            "for tag in $(docker images -q labctl-services); do "
            "docker run --rm $tag python3 -c 'import tensorboard' 2>&- && echo $tag && break; done"
        ).strip()
        docker(
            *("exec", "-i", "-u", "student", self.box.name, "docker", "run", "--rm", "-i"),
            *("--user", "1000:1000", "-v", f"{logs}:/logs", tag, "python3", "-", "/logs"),
            stdin=SCALARS,
        )
