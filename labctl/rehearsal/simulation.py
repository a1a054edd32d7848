"""A rehearsal: a simulated EC2 on this machine, from entering a `with` to leaving it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import BaseWSGIServer, make_server

from labctl.errors import EngineError, NotFoundError
from labctl.providers.local import engine
from labctl.rehearsal import amis, images, imds, roles
from labctl.rehearsal.backend import Backend
from labctl.rehearsal.calls import Environ
from labctl.rehearsal.clock import Clock
from labctl.rehearsal.fleet import Fleet, Record
from labctl.rehearsal.images import Building, here
from labctl.rehearsal.layer import Layer
from labctl.rehearsal.machines import Machines, sweep
from labctl.rehearsal.metadata import metadata_of
from labctl.rehearsal.reclaims import Reclaims
from labctl.rehearsal.scenario import Scenario, switched
from labctl.rehearsal.schedules import Schedules

LOOPBACK = "127.0.0.1"
KEY = "AKIAREHEARSAL0000000"


class QuietMotoHandler(imds.QuietHandler, MotoRequestHandler):
    """Keeps moto's care for headers with underscores."""


class Rehearsal:
    """`with Rehearsal(Scenario(boot="none")) as rehearsal:` and export `rehearsal.environment`.

    `building` says what the machines' image is built from (labctl's own directory and
    LABCTL_BASE_IMAGE). `port` 0 is any free one; `said` is told of every change of an instance.
    Everything listens on the loopback or on Unix sockets in a directory of its own.
    """

    def __init__(
        self,
        scenario: Scenario | None = None,
        building: Building | None = None,
        port: int = 0,
        said: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.scenario = scenario or Scenario()
        self._building = building or here()
        self._said = said
        self._port = port
        self._servers: list[BaseWSGIServer] = []
        self._machines: Machines | None = None

    def __enter__(self) -> Rehearsal:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """What to export: any AWS SDK and labctl then speak to this rehearsal."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": "rehearsal",
            "AWS_DEFAULT_REGION": self.scenario.regions[0],
            "AWS_REGION": self.scenario.regions[0],
            "AWS_EC2_METADATA_DISABLED": "true",
            "LABCTL_SERVER_AWS_ADDRESS_FROM": f"{self.url}/checkip",
        }

    @property
    def calls(self) -> dict[str, int]:
        """How often each action was called, whatever came of it. A copy."""
        return dict(self._layer.calls)

    @property
    def held(self) -> dict[str, int]:
        """How many calls of each action have been held (see Loss) so far. A copy."""
        return dict(self._layer.held)

    @property
    def under_way(self) -> int:
        """How many calls are being answered now: one may take effect though its caller is gone."""
        return self._layer.under_way

    @property
    def caller(self) -> str:
        """The address under which machines see a caller on this one."""
        if self.scenario.address:
            return self.scenario.address
        return self._machines.gateway if self._machines is not None else LOOPBACK

    @property
    def instances(self) -> dict[str, str]:
        """The state of every instance by its id, as the cloud knows it."""
        with self.backend.held():
            records = list(self.fleet.records.values())
            return {record.id: self.fleet.state(record)[1] for record in records}

    def change(self, **settings: Any) -> None:
        """Set top keys of the scenario from now on; counts of losses begin anew."""
        self.scenario = msgspec.structs.replace(self.scenario, **settings)
        self._layer.faults.forget()

    def switch(self, switches: Iterable[str]) -> None:
        """The same with `delays.boot=2s`, as on the command line."""
        self.scenario = switched(self.scenario, switches)
        self._layer.faults.forget()

    def reclaim(self, instance_id: str, notice_s: float = 120.0, rebalance_s: float = 0.0) -> None:
        """Take a spot instance back; see Reclaims.reclaim."""
        self._reclaims.reclaim(instance_id, notice_s, rebalance_s)

    def wait(self, instance_id: str, state: str, timeout_s: float = 120.0) -> None:
        """Until an instance is in a state. TimeoutError otherwise."""
        record = self.record(instance_id)
        codes = {"pending": 0, "running": 16, "terminated": 48, "stopped": 80}
        if not self.fleet.wait(record, (codes[state], state), timeout_s):
            raise TimeoutError(f"{instance_id} is not {state} after {timeout_s} s")

    def record(self, instance_id: str) -> Record:
        """What is known of an instance besides moto. NotFoundError for none."""
        found = self.fleet.records.get(instance_id)
        if found is None:
            raise NotFoundError(f"there is no instance {instance_id!r} here")
        return found

    def execute(self, instance_id: str, line: str) -> tuple[int, str]:
        """A shell line in an instance's machine, as root: (exit code, what it printed)."""
        if self._machines is None:
            raise EngineError("machines of this rehearsal are not real")
        return self._machines.execute(instance_id, line)

    def close(self) -> None:
        """Everything ends: servers, machines, their network. May be called again."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers.clear()
        if hasattr(self, "fleet"):
            self.fleet.close()
        if hasattr(self, "_clock"):
            self._clock.stop()
        if self._machines is not None:
            self._machines.close()
            self._machines = None

    def _start(self) -> None:
        self._clock = Clock()
        self.backend = Backend(self.scenario.regions)
        amis.stock(self.backend, self.scenario.images)
        roles.stock(self.backend)
        listener = self._listen()
        if self.scenario.boot != "none":
            self._machines = self._real()
        self.fleet = Fleet(
            self.backend,
            self._clock,
            self._machines,
            lambda: self.scenario,
            lambda record: metadata_of(record, self.backend),
            self._said,
        )
        self._reclaims = Reclaims(self.backend, self._clock, self.fleet, lambda: self.scenario)
        self.fleet.running = self._reclaims.began
        schedules = Schedules(self.backend, self._clock, self.fleet, time.time)
        self._layer = Layer(
            self.backend,
            self.fleet,
            schedules,
            lambda: self.scenario,
            self._controlled,
            lambda: self.caller,
        )
        listener.app = self._layer
        self._serve(listener)
        if self._machines is not None:
            socket = self._machines.root / "api" / "api.sock"
            self._servers.append(imds.serve(self._layer.inside, socket))

    def _listen(self) -> BaseWSGIServer:
        """The port is taken before machines are told of it."""
        made = make_server(
            LOOPBACK, self._port, _not_yet, threaded=True, request_handler=QuietMotoHandler
        )
        self._port = made.port
        return made

    def _serve(self, listener: BaseWSGIServer) -> None:
        thread = threading.Thread(target=listener.serve_forever, args=(0.1,), daemon=True)
        thread.name = "rehearsal-api"
        thread.start()
        self._servers.append(listener)

    def _real(self) -> Machines:
        import docker

        with engine.connected() as client:
            sweep(client)
            image = images.ensure(
                client, msgspec.structs.replace(self._building, stands_on=self.scenario.image)
            )
        client = docker.from_env(timeout=engine.TIMEOUT_S, max_pool_size=32)
        return Machines(client, image, self.scenario.boot, self._port)

    def _controlled(self, name: str, said: dict[str, Any]) -> Any:
        if name == "reclaim":
            self.reclaim(
                said["instance"],
                float(said.get("notice_s", 120)),
                float(said.get("rebalance_s", 0)),
            )
        elif name == "set":
            self.switch(said["switches"])
        elif name != "state":
            raise NotFoundError(f"{name} is none of reclaim, set, state")
        return {"instances": self.instances, "calls": self.calls}


def _not_yet(environ: Environ, start_response: Any) -> list[bytes]:
    start_response("503 -", [])
    return []
