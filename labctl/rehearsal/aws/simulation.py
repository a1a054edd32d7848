"""A rehearsal: a simulated EC2 on this machine, as a context manager."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import BaseWSGIServer

from labctl.decoding import decode_json
from labctl.errors import EngineError, NotFoundError
from labctl.lazy import lazy_imports
from labctl.providers.local import engine
from labctl.rehearsal.aws import amis, instance_profiles
from labctl.rehearsal.aws.backend import Backend
from labctl.rehearsal.aws.fleet import Fleet, InstanceRecord
from labctl.rehearsal.aws.layer import Layer
from labctl.rehearsal.aws.metadata import build_metadata
from labctl.rehearsal.aws.reclaims import SpotReclaims
from labctl.rehearsal.aws.scenario import Scenario
from labctl.rehearsal.aws.schedules import Schedules
from labctl.rehearsal.core import images, listener
from labctl.rehearsal.core.clock import TaskTimer
from labctl.rehearsal.core.control import OverrideScenarioRequest, ReclaimControl, RehearsalState
from labctl.rehearsal.core.images import Building, default_building
from labctl.rehearsal.core.machines import Machines, sweep
from labctl.rehearsal.core.scenario import override_scenario

with lazy_imports(__name__):
    import docker

KEY = "AKIAREHEARSAL0000000"


class QuietMotoHandler(listener.QuietHandler, MotoRequestHandler):
    """A quiet handler with moto's handling of headers with underscores."""


class Rehearsal:
    """A rehearsal: `with Rehearsal(Scenario(boot="none")) as rehearsal:`.

    Export `rehearsal.environment` to use it. `building` has the sources of the machines' image (by
    default labctl's own directory and LABCTL_BASE_IMAGE). `port` 0 is any free port. `notify` is
    called with every change of an instance. Everything listens on the loopback or on Unix sockets
    in a directory of its own.
    """

    # Variables that would override those of `environment`.
    conflicting_variables = ("AWS_PROFILE", "AWS_SESSION_TOKEN")

    def __init__(
        self,
        scenario: Scenario | None = None,
        building: Building | None = None,
        port: int = 0,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.scenario = scenario or Scenario()
        self._building = building or default_building()
        self._notify = notify
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
        return f"http://{listener.LOOPBACK}:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables to export: any AWS SDK and labctl then use this rehearsal."""
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
        """How often each action was called, with any result. A copy."""
        return dict(self._layer.calls)

    @property
    def held_calls(self) -> dict[str, int]:
        """How many calls of each action have been held (see Loss) so far. A copy."""
        return dict(self._layer.held)

    @property
    def under_way(self) -> int:
        """How many calls are being answered now, including those whose caller is gone."""
        return self._layer.under_way

    @property
    def caller(self) -> str:
        """The address from which machines see a caller on this machine."""
        if self.scenario.address:
            return self.scenario.address
        return self._machines.gateway if self._machines is not None else listener.LOOPBACK

    @property
    def instances(self) -> dict[str, str]:
        """The state of every instance by its id, as the cloud knows it."""
        with self.backend.lock():
            records = list(self.fleet.records.values())
            return {record.id: self.fleet.state(record)[1] for record in records}

    def change(self, **settings: Any) -> None:
        """Set top-level keys of the scenario from now on, and reset the counts of losses."""
        self.scenario = msgspec.structs.replace(self.scenario, **settings)
        self._layer.faults.reset()

    def override(self, switches: Iterable[str]) -> None:
        """Do the same with overrides like `delays.boot=2s`, as on the command line."""
        self.scenario = override_scenario(self.scenario, switches)
        self._layer.faults.reset()

    def reclaim(self, instance_id: str, notice_s: float = 120.0, rebalance_s: float = 0.0) -> None:
        """Take a spot instance back; see Reclaims.reclaim."""
        self._reclaims.reclaim(instance_id, notice_s, rebalance_s)

    def wait(self, instance_id: str, state: str, timeout_s: float = 120.0) -> None:
        """Wait until an instance is in a state. TimeoutError after `timeout_s`."""
        record = self.find_record(instance_id)
        codes = {"pending": 0, "running": 16, "terminated": 48, "stopped": 80}
        if not self.fleet.wait(record, (codes[state], state), timeout_s):
            raise TimeoutError(f"{instance_id} is not {state} after {timeout_s} s")

    def find_record(self, instance_id: str) -> InstanceRecord:
        """Return an instance's record. NotFoundError if it does not exist."""
        instance_record = self.fleet.records.get(instance_id)
        if instance_record is None:
            raise NotFoundError(f"this rehearsal has no instance {instance_id!r}")
        return instance_record

    def execute(self, instance_id: str, line: str) -> tuple[int, str]:
        """Run a shell line in an instance's machine as root; return (exit code, output)."""
        if self._machines is None:
            raise EngineError("this rehearsal has no real machines (boot=none)")
        return self._machines.execute(instance_id, line)

    def close(self) -> None:
        """End everything: servers, machines, their network. Safe to repeat."""
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
        self._clock = TaskTimer()
        self.backend = Backend(self.scenario.regions)
        amis.add_images(self.backend, self.scenario.images)
        instance_profiles.add_instance_profile(self.backend)
        server = listener.listen(self._port, QuietMotoHandler)
        self._port = server.port
        if self.scenario.boot != "none":
            self._machines = self._create_machines()
        self.fleet = Fleet(
            self.backend,
            self._clock,
            self._machines,
            lambda: self.scenario,
            lambda record: build_metadata(record, self.backend),
            self._notify,
        )
        self._reclaims = SpotReclaims(self.backend, self._clock, self.fleet, lambda: self.scenario)
        self.fleet.running = self._reclaims.plan_reclaims
        schedules = Schedules(self.backend, self._clock, self.fleet, time.time)
        self._layer = Layer(
            self.backend,
            self.fleet,
            schedules,
            lambda: self.scenario,
            self._handle_control,
            lambda: self.caller,
        )
        server.app = self._layer
        listener.start(server)
        self._servers.append(server)
        if self._machines is not None:
            socket = self._machines.root / "api" / "api.sock"
            self._servers.append(listener.serve(self._layer.inside, socket))

    def _create_machines(self) -> Machines:
        with engine.connect() as client:
            sweep(client)
            image = images.ensure_image(
                client, msgspec.structs.replace(self._building, stands_on=self.scenario.image)
            )
        client = docker.from_env(timeout=engine.TIMEOUT_S, max_pool_size=32)
        return Machines(client, image, self.scenario.boot, self._port)

    def _handle_control(self, name: str, body: bytes) -> RehearsalState:
        if name == "reclaim":
            request = decode_json(body, ReclaimControl)
            self.reclaim(request.instance, request.notice_s, request.rebalance_s)
        elif name == "set":
            self.override(decode_json(body, OverrideScenarioRequest).switches)
        elif name != "state":
            raise NotFoundError(f"unknown control request {name}: expected reclaim, set or state")
        return RehearsalState(instances=self.instances, calls=self.calls)
