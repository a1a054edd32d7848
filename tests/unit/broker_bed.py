"""A broker over an engine's socket, as accounts reach it: real HTTP on both sides, without root."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from engine_socket import Answer, EngineSocket

from labctl.agent.broker import broker, housekeeping, mounts, networks
from labctl.agent.broker import calls as broker_calls
from labctl.agent.broker import claims as broker_claims
from labctl.agent.broker.calls import Calls
from labctl.agent.broker.claims import Claims
from labctl.agent.broker.gpu_leases import GpuIdentity, identify_gpus
from labctl.agent.broker.gpu_queue import GpuQueue
from labctl.agent.broker.housekeeping import Housekeeping
from labctl.agent.broker.rules import BrokerAccount
from labctl.agent.broker.settings import BrokerSettings
from labctl.wire.telemetry import GpuRecord

ALICE = BrokerAccount(71001, 71001, "lab-alice", "/home/lab-alice")
BOB = BrokerAccount(71003, 71003, "lab-bob", "/home/lab-bob")
CAROL = BrokerAccount(71004, 71004, "lab-carol", "/home/lab-carol")
CARDS = [GpuRecord(uuid="GPU-a", index="0", name="T4")]
GPU = {"DeviceRequests": [{"Count": -1, "Capabilities": [["gpu"]], "Driver": ""}]}
SETTINGS = BrokerSettings(gpu_lease_s=100, memory_bytes=1 << 30, cpus=1.0)


@dataclass
class Engine:
    """What the engine's socket answers: containers that are made, started, stopped and removed."""

    served: EngineSocket
    containers: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Part of a path -> until when an answer to it is held back.
    hold: dict[str, threading.Event] = field(default_factory=dict)
    # Part of a path -> what is answered instead.
    said: dict[str, Answer] = field(default_factory=dict)

    def answer(self, method: str, path: str, body: Any) -> Answer | None:
        parts = urlsplit(path)
        words = parts.path.split("/")[2:]
        for part, event in list(self.hold.items()):
            if part in path:
                assert event.wait(120)
        for part, answer in self.said.items():
            if part in path:
                return answer
        if words == ["containers", "json"]:
            return 200, list(self.containers.values())
        if words == ["containers", "create"]:
            return self._create(parse_qs(parts.query)["name"][0], body)
        if words[0] == "containers":
            return self._about(method, words)
        if words[0] == "images":
            return 200, {"Id": "sha256:" + "1" * 64, "RepoTags": ["x:1"], "Config": {}}
        if words[0] == "info":
            return 200, {"DockerRootDir": "/"}
        if words[0] == "networks":
            return 200, {}
        return None

    def _create(self, name: str, body: dict[str, Any]) -> Answer:
        identity = f"{len(self.served.asked):064x}"
        self.containers[identity] = {
            "Id": identity,
            "Names": [f"/{name}"],
            "Name": f"/{name}",
            "State": "created",
            "Created": 1.0,
            "Labels": body["Labels"],
        }
        return 201, {"Id": identity}

    def _about(self, method: str, words: list[str]) -> Answer | None:
        known = [
            one for one in self.containers.values() if words[1] in (one["Id"], one["Name"][1:])
        ]
        if not known:
            return None
        row = known[0]
        if method == "DELETE":
            del self.containers[row["Id"]]
        elif words[2] == "json":
            config = {"Labels": row["Labels"]}
            return 200, {**row, "State": {"Status": row["State"]}, "Config": config}
        elif words[2] == "exec":
            row.setdefault("ExecIDs", []).append("e" * 64)
            return 201, {"Id": "e" * 64}
        else:
            row["State"] = {"start": "running", "stop": "exited"}[words[2]]
        return 204, b""

    def asked(self, method: str, part: str) -> list[str]:
        return [path for how, path, _ in self.served.asked if how == method and part in path]


@dataclass
class Bed:
    """`now_s` is the time that leases go by."""

    engine: Engine
    folder: Path
    patch: pytest.MonkeyPatch
    settings: BrokerSettings = SETTINGS
    now_s: float = 1000.0
    reported: list[str] = field(default_factory=list)
    driver_answers: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        for module in (broker_calls, broker_claims, housekeeping):
            self.patch.setattr(module, "read_boottime_s", lambda: self.now_s)
        self.driver_answers.set()
        self.start_broker()

    def start_broker(self) -> None:
        """As after a restart: nothing is known but what the engine and files say."""
        claims = Claims(self.settings, GpuQueue(self.folder / "queue.json"), self.identify)
        self.keeping = Housekeeping(self.settings, claims, self.reported.append)
        calls = Calls(self.settings, self.keeping, self)  # type: ignore[arg-type]
        self.broker = broker.Broker(self.settings, calls)

    def measure(self) -> list[GpuRecord]:
        """The GPUs of the machine, once the driver answers."""
        assert self.driver_answers.wait(120)
        return CARDS

    def identify(self) -> list[GpuIdentity]:
        return identify_gpus(self.measure())

    def ask(
        self, account: BrokerAccount, method: str, path: str, body: Any = None
    ) -> tuple[int, Any]:
        """What the broker answers: (status, JSON)."""
        with self.connect(account) as link:
            link.request(method, path, json.dumps(body) if body is not None else None)
            reply = link.getresponse()
            return reply.status, json.loads(reply.read() or b"null")

    @contextmanager
    def connect(self, account: BrokerAccount) -> Iterator[http.client.HTTPConnection]:
        here, there = socket.socketpair()
        self.patch.setattr(broker, "find_account", lambda uid, group: PEOPLE[uid])
        thread = threading.Thread(target=self.broker._serve_connection, args=(there, account.uid))
        thread.start()
        link = http.client.HTTPConnection("docker", timeout=120)
        link.sock = here
        try:
            yield link
        finally:
            link.close()
            here.close()
            thread.join()

    def create(
        self, account: BrokerAccount, name: str, host: dict[str, Any] | None = None, **more: Any
    ) -> tuple[int, Any]:
        body = {"Image": "x:1", "Cmd": ["sh"], "HostConfig": host or {}, **more}
        return self.ask(account, "POST", f"/containers/create?name={name}", body)

    def create_with_gpu(self, account: BrokerAccount, name: str) -> int:
        status, reply = self.create(account, name, GPU)
        self.message = reply.get("message", "")
        return status

    def end_lease(self) -> None:
        """Let time pass until every lease has ended, and the engine stop what had one."""
        self.now_s += self.settings.gpu_lease_s + 1
        self.keeping.run_round()

    def is_running(self, name: str) -> bool:
        rows = self.engine.containers.values()
        return any(one["Name"] == f"/{name}" and one["State"] == "running" for one in rows)


PEOPLE = {one.uid: one for one in (ALICE, BOB, CAROL)}


def make_bed(served: EngineSocket, folder: Path, patch: pytest.MonkeyPatch) -> Bed:
    patch.setenv("DOCKER_HOST", served.host)
    patch.setattr(broker_calls, "ENGINE", str(served.path))
    for name in ("mounts", "accounts"):
        (folder / name).mkdir()
    patch.setattr(mounts, "PLACE", folder / "mounts")
    patch.setattr(networks, "PLACE", folder / "accounts")
    patch.setattr(housekeeping, "PLACE", folder / "accounts")
    patch.setattr(housekeeping, "NOTE_S", 0.1)
    patch.setattr(broker_calls.cgroup, "set_account_limits", lambda *_: "/labctl/x")
    engine = Engine(served)
    served.answers = engine.answer
    return Bed(engine, folder, patch)
