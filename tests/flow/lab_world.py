"""A lab on an in-memory provider, whose server is a directory on this machine.

The program on the server, the state, the ssh files and every flow are the real ones; only the
provider's API and the wire are not.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from shared_agent import link_agent, run_line

from labctl.agent import reply
from labctl.config import Paths, find_paths, load_lab
from labctl.errors import LabError, LinkLostError, UnreachableError
from labctl.events import Event, Note, Question, Reporter
from labctl.model import (
    Check,
    CreateServerRequest,
    Endpoint,
    Need,
    Offer,
    ProviderAccount,
    Resource,
    Server,
    Value,
)
from labctl.servers.connections import Connections
from labctl.servers.context import LabContext
from labctl.servers.host_keys import ensure_key_pair
from labctl.state import State
from labctl.transports import Result, Transport
from labctl.transports.fake import FakeTransport

LAB_ID = "0f1e2d3c4b5a"
# Nothing is missing, and a banner comes first.
PROBE = (
    "Welcome!\n=== labctl probe ===\npython=3.11.2\ntmux=tmux 3.3a\n"
    "docker_said=labctl-engine 27.3.1\n=== labctl probe end ===\n"
)


class Settings(Value, frozen=True):
    pass


class Cloud:
    """Servers in memory. Its switches make it as awkward as real ones are."""

    name: ClassVar[str] = "cloud"
    settings_type: ClassVar[type[Value]] = Settings
    ends_billing: ClassVar[frozenset[str]] = frozenset({"shutdown"})

    def __init__(self, key: str) -> None:
        self.settle_s = 60.0
        self.key = key
        self.price = 0.0
        self.kinds = ["small"]
        self.machines: dict[str, Server] = {}
        self.ended: dict[str, Server] = {}
        self.account = ProviderAccount()
        self.calls: list[str] = []
        self.create_error: BaseException | None = None
        self.create_errors: list[BaseException] = []
        self.loses_reply = False
        self.tried: list[tuple[str, str]] = []
        self.interrupt_after_create = False
        self.invisible_finds = 0
        self.never_gone = False
        self.dies_at_once = False
        self.left: list[Resource] = []
        self.remove_errors: list[BaseException] = []
        self.at_create: Any = lambda request: None
        self.guard = threading.Lock()

    def get_account(self) -> ProviderAccount:
        return self.account

    def check(self, need: Need | None = None) -> list[Check]:
        return [Check(name="cloud", ok=True)]

    def offers(self, need: Need) -> list[Offer]:
        if need.gpu.is_required:
            return []
        price = self.price
        return [Offer(provider=self.name, type=k, price_usd_per_hour=price) for k in self.kinds]

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        self.at_create(request)
        self.tried.append((offer.type, request.token))
        if self.create_errors:
            raise self.create_errors.pop(0)
        if self.create_error is not None:
            raise self.create_error
        with self.guard:
            if (known := self.machines.get(f"srv-{request.token}")) is not None:
                return known
            self.calls.append("create")
            server = self.add(f"srv-{request.token}", request.lab, request.lab_id, offer)
            if self.loses_reply:
                self.loses_reply = False
                raise LinkLostError("the answer never came")
        if self.interrupt_after_create:
            raise KeyboardInterrupt
        return server

    def add(self, server_id: str, lab: str, lab_id: str, offer: Offer | None = None) -> Server:
        server = Server(
            id=server_id,
            provider=self.name,
            lab=lab,
            lab_id=lab_id,
            alias=lab,
            endpoint=Endpoint(host="127.0.0.1", port=2222, host_key=self.key),
            offer=offer or Offer(provider=self.name, type="small"),
            created_at=time.time(),
            state="running",
            account=self.account.id,
        )
        self.machines[server_id] = server
        return server

    def find(self, server_id: str) -> Server | None:
        if self.invisible_finds:
            self.invisible_finds -= 1
            return None
        if self.dies_at_once and server_id in self.machines:
            self.change(server_id, state="terminated")
        server = self.machines.get(server_id) or self.ended.get(server_id)
        return server if server and server.account == self.account.id else None

    def servers(self) -> list[Server]:
        mine = [one for one in self.machines.values() if one.account == self.account.id]
        return [] if self.invisible_finds else mine

    def change(self, server_id: str, **fields: Any) -> None:
        self.machines[server_id] = msgspec.structs.replace(self.machines[server_id], **fields)

    def terminate(self, server_id: str) -> None:
        self.calls.append("terminate")
        server = self.machines.get(server_id)
        if server and server.account == self.account.id and not self.never_gone:
            del self.machines[server_id]
            self.ended[server_id] = msgspec.structs.replace(server, state="terminated")

    def leftovers(self) -> list[Resource]:
        return self.left

    def remove(self, resource: Resource) -> None:
        if self.remove_errors:
            raise self.remove_errors.pop(0)
        self.left.remove(resource)


class DiskCloud(Cloud):
    """One that can also stop servers, and shows their console."""

    def stop(self, server_id: str) -> None:
        self.calls.append("stop")
        self.change(server_id, state="stopped")

    def start(self, server_id: str) -> None:
        self.calls.append("start")
        self.change(server_id, state="running")

    def read_console(self, server_id: str) -> str:
        return "kernel panic\nno sshd today\n"


@dataclass
class Recorded:
    """Keeps events; answers with `answers` in turn, then with yes."""

    events: list[Event] = field(default_factory=list)
    asked: list[Question] = field(default_factory=list)
    answers: list[bool] = field(default_factory=list)
    on_event: Callable[[Event], None] = lambda event: None

    def emit(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)

    def confirm(self, decision: Question) -> bool:
        self.asked.append(decision)
        return self.answers.pop(0) if self.answers else True

    @property
    def said(self) -> str:
        return "\n".join(event.text for event in self.events if isinstance(event, Note))


class Machine:
    """The server: a home directory, and a shell of this machine. `error` cuts the wire.

    Several servers of a lab are the same machine; those in `silent`, by id, do not answer.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.error: LabError | None = None
        self.silent: set[str] = set()
        self.lines: list[str] = []
        link_agent(home)

    def transport(self, server_id: str = "") -> FakeTransport:
        def answer(line: str, stdin: bytes) -> Result:
            if server_id in self.silent:
                raise unreachable()
            return self._answer(line, stdin)

        return FakeTransport().reply("", answer)

    def _answer(self, line: str, stdin: bytes) -> Result:
        self.lines.append(line)
        if self.error is not None:
            raise self.error
        if line.split()[-2:] == ["sh", "-s"]:
            return Result(code=0, stdout=PROBE)
        environ = {"PATH": os.environ["PATH"], "HOME": str(self.home)}
        done = run_line(line, stdin, environ)
        return Result(
            code=done.returncode,
            stdout=done.stdout.decode(errors="surrogateescape"),
            stderr=done.stderr.decode(),
        )

    def run_with(self, run_id: str, **files: str) -> Path:
        """A run that has ended on the server, with these files below checkpoints/."""
        lab = self.home / "labctl" / "digits"
        directory = lab / "runs" / run_id
        for name in (".labctl", "checkpoints", "logs", "code"):
            (directory / name).mkdir(parents=True)
        (lab / ".labctl").mkdir(exist_ok=True)
        (lab / ".labctl" / "id").write_text(LAB_ID)
        record = {"id": run_id, "lab_id": LAB_ID, "state": "exited", "exit_code": 0, "told": "done"}
        own = directory / ".labctl"
        own.joinpath("record.json").write_bytes(msgspec.json.encode(record))
        own.joinpath("spec.json").write_text('{"outputs": ["checkpoints", "logs"]}')
        for name, text in files.items():
            (directory / "checkpoints" / name).write_text(text)
        return directory


class RunMachine(Machine):
    """A server whose Docker Engine is a script: its runs, and what they print, are set here.

    `log` is all that each run prints; `verbs` are the calls of the program.
    """

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.runs: dict[str, dict[str, Any]] = {}
        self.log = b""
        self.verbs: list[str] = []

    def put_run(self, run_id: str, **fields: Any) -> None:
        record = {"id": run_id, "lab_id": LAB_ID, "image": "small:1", "created_at": len(self.runs)}
        self.runs[run_id] = {**record, "command": ["true"], "state": "running", **fields}

    def _answer(self, line: str, stdin: bytes) -> Result:
        verb = line.split()[-1]
        request = json.loads(stdin.split(b"\n")[0]) if stdin.startswith(b"{") else {}
        is_known = "run" not in request or request["run"] in self.runs
        scripted = ("status", "image", "start", "run", "follow", "cancel")
        if self.error is None and verb in scripted and is_known:
            self.lines.append(line)
            self.verbs.append(verb)
            return getattr(self, f"_{verb}")(request)
        return super()._answer(line, stdin)

    def _status(self, request: dict[str, Any]) -> Result:
        wanted = request["runs"] or list(self.runs)
        runs = [self.runs[name] for name in wanted if name in self.runs]
        disk = {"free_bytes": 10**9, "total_bytes": 10**10}
        return _reply({"runs": runs, "disk": disk, "uptime_s": 1.0, "now": time.time()})

    def _image(self, request: dict[str, Any]) -> Result:
        return _reply({"ids": {name: name for name in request["references"]}})

    def _start(self, request: dict[str, Any]) -> Result:
        return _reply(self._put_started(request["spec"]["id"]))

    def _run(self, request: dict[str, Any]) -> Result:
        first = self._put_started(request["spec"]["id"])
        return self._end(first["run"], first)

    def _put_started(self, run_id: str) -> dict[str, Any]:
        self.put_run(run_id)
        running = [run["id"] for run in self.runs.values() if run["state"] == "running"]
        active = [name for name in reversed(running) if name != run_id]
        return {"run": self.runs[run_id], "found": False, "active": active}

    def _follow(self, request: dict[str, Any]) -> Result:
        run = self.runs[request["run"]]
        first = {"run": run, "offset": 0}
        return self._end(run, first) if request["wait"] else _reply(first, {"run": run}, self.log)

    def _end(self, run: dict[str, Any], first: dict[str, Any]) -> Result:
        ended = {**run, "state": "exited", "exit_code": 0, "told": "done"}
        self.runs[run["id"]] = ended
        return _reply(first, {"run": ended}, self.log)

    def _cancel(self, request: dict[str, Any]) -> Result:
        earlier = self.runs[request["run"]]
        run = {**earlier, "state": "cancelled", "told": "canceled (SIGTERM)"}
        self.runs[request["run"]] = run
        return _reply({"run": run, "already": earlier["state"] == "cancelled"})


def _reply(
    first: dict[str, Any], closing: dict[str, Any] | None = None, data: bytes = b""
) -> Result:
    stdout = reply.encode_line(first) + data
    stderr = reply.encode_line(closing).decode() if closing is not None else ""
    return Result(code=0, stdout=stdout.decode(), stderr=stderr)


class Wires(Connections):
    """Real ssh files; every transport leads to one Machine, and patience is short."""

    def __init__(self, places: Paths, machine: Machine) -> None:
        super().__init__(places.ssh_dir, places.user_ssh_config)
        self.machine = machine

    def _make_transport(self, config: Path, server_id: str, endpoint: Endpoint) -> Transport:
        return self.machine.transport(server_id)

    def wait_for_ssh(
        self,
        server: Server,
        deadline_s: float,
        name: str = "",
        before_retry: Callable[[BaseException], None] | None = None,
        *,
        waits_for_host_key: bool = False,
    ) -> Transport:
        return super().wait_for_ssh(
            server, 0.2, name, before_retry, waits_for_host_key=waits_for_host_key
        )


@dataclass
class World:
    """A user's home, a lab in it, a provider and a server."""

    home: Path
    cloud: Cloud
    machine: Machine

    @property
    def places(self) -> Paths:
        return find_paths({"HOME": str(self.home)})

    def context(self, reporter: Reporter | None = None, need: Need | None = None) -> LabContext:
        """As a new process would make it."""
        config = load_lab(self.home / "lab", environ={"HOME": str(self.home)})
        if need is not None:
            server = msgspec.structs.replace(config.server, need=need)
            config = msgspec.structs.replace(config, server=server)
        state = State(self.places.database)
        made = LabContext(config, LAB_ID, self.places, state, reporter or Recorded())
        made.__dict__["provider"] = self.cloud
        made.__dict__["connections"] = Wires(self.places, self.machine)
        return made


def world(directory: Path, kind: type[Cloud] = DiskCloud) -> World:
    home = directory / "home"
    (home / "lab").mkdir(parents=True)
    (home / "lab" / "lab.yaml").write_text("lab: digits\nrun: [python, train.py]\n")
    (directory / "machine").mkdir(exist_ok=True)
    key = ensure_key_pair(directory / "host").rpartition(" ")[0]
    return World(home, kind(key), Machine(directory / "machine"))


class Output(Value, frozen=True):
    """What one command printed, and its exit code."""

    code: int
    out: str
    err: str


# Calls the command line as a new process would: labctl(lab, "logs", "-f").
Labctl = Callable[..., Output]


def unreachable() -> UnreachableError:
    return UnreachableError("no answer", why="it is silent")
