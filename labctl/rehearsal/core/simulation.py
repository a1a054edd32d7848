"""A rehearsal of a cloud with an HTTP API of its own: the base of each cloud's context manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Generic, Self, TypeVar
from wsgiref.types import WSGIApplication

import msgspec
from werkzeug.serving import BaseWSGIServer

from labctl.decoding import decode_json
from labctl.errors import EngineError, LabError, NotFoundError
from labctl.lazy import lazy_imports
from labctl.providers.local import engine
from labctl.rehearsal.core import images, listener
from labctl.rehearsal.core.application import CloudApi, CloudApplication
from labctl.rehearsal.core.clock import TaskTimer
from labctl.rehearsal.core.control import OverrideScenarioRequest, ReclaimControl, RehearsalState
from labctl.rehearsal.core.fleet import AfterPowerOff, CloudFleet, CloudInstance, InstanceState
from labctl.rehearsal.core.images import Building, default_building
from labctl.rehearsal.core.machines import Machines, sweep
from labctl.rehearsal.core.scenario import CloudScenario, override_scenario

with lazy_imports(__name__):
    import docker

Settings = TypeVar("Settings", bound=CloudScenario)
Instance = TypeVar("Instance", bound=CloudInstance)


class ViolationError(LabError):
    """A request or a reply of the rehearsal broke the cloud's official description."""


class CloudRehearsal(ABC, Generic[Settings, Instance]):
    """A rehearsal: `with LambdaRehearsal(LambdaScenario(boot="none")) as rehearsal:`.

    Export `rehearsal.environment` to use it. `building` has the sources of the machines' image (by
    default labctl's own directory and LABCTL_BASE_IMAGE). `port` 0 is any free port. `notify` is
    called with every change of an instance. Everything listens on the loopback or on Unix sockets
    in a directory of its own. Leaving the `with` block raises ViolationError if a request or reply
    broke the official description.

    A cloud's class has `after_power_off`, `environment` and `build_api`. If its machines have a
    metadata service, `build_metadata` returns its application.
    """

    after_power_off: AfterPowerOff
    # Variables that would override those of `environment`.
    conflicting_variables: tuple[str, ...] = ()

    def __init__(
        self,
        scenario: Settings,
        building: Building | None = None,
        port: int = 0,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.scenario = scenario
        self._building = building or default_building()
        self._notify = notify
        self._port = port
        self._servers: list[BaseWSGIServer] = []
        self._machines: Machines | None = None
        self._clock: TaskTimer | None = None
        self._fleet: CloudFleet[Instance] | None = None

    @property
    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Variables to export: the cloud's own tools and labctl then use this rehearsal."""

    @abstractmethod
    def build_api(self) -> CloudApi:
        """Build the API's operations; `fleet`, `clock` and `url` exist."""

    def build_metadata(self, instance: Instance) -> WSGIApplication | None:
        """Build the application of a machine's metadata service; None for a cloud without."""
        return None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()
        if kind is None and self.violations:
            raise ViolationError(
                "calls broke the cloud's official description", why="\n".join(self.violations)
            )

    @property
    def url(self) -> str:
        return f"http://{listener.LOOPBACK}:{self._port}"

    @property
    def fleet(self) -> CloudFleet[Instance]:
        assert self._fleet is not None, "the rehearsal has not started"
        return self._fleet

    @property
    def clock(self) -> TaskTimer:
        assert self._clock is not None, "the rehearsal has not started"
        return self._clock

    @property
    def calls(self) -> dict[str, int]:
        """How often each operation was called, with any result. A copy."""
        return dict(self._application.calls)

    @property
    def held_calls(self) -> dict[str, int]:
        """How many calls of each operation have been held (see Loss) so far. A copy."""
        return dict(self._application.held)

    @property
    def under_way(self) -> int:
        """How many calls are being answered now, including those whose caller is gone."""
        return self._application.under_way

    @property
    def violations(self) -> list[str]:
        """The requests and replies that broke the official description. A copy."""
        return list(self._application.violations)

    @property
    def instances(self) -> dict[str, InstanceState]:
        """The state of every instance by its id, those that are not shown included."""
        return {instance.id: instance.state for instance in self.fleet.list_all()}

    def change(self, **settings: Any) -> None:
        """Set top-level keys of the scenario from now on, and reset the counts of faults."""
        self.scenario = msgspec.structs.replace(self.scenario, **settings)
        self._application.faults.reset()

    def override(self, switches: Iterable[str]) -> None:
        """Do the same with overrides like `delays.boot=2s`, as on the command line."""
        self.scenario = override_scenario(self.scenario, switches)
        self._application.faults.reset()

    def find_instance(self, instance_id: str) -> Instance:
        """Return an instance, whether it is shown or not. NotFoundError if it never existed."""
        for instance in self.fleet.list_all():
            if instance.id == instance_id:
                return instance
        raise NotFoundError(f"this rehearsal has no instance {instance_id!r}")

    def reclaim(self, instance_id: str, notice_s: float = 120.0) -> None:
        """Take a spot instance back, after a notice unless `notice_s` is 0.

        NotFoundError if there is no such spot instance.
        """
        instance = self.find_instance(instance_id)
        if not instance.is_spot:
            raise NotFoundError(f"this rehearsal has no spot instance {instance_id!r}")
        self.fleet.reclaim(instance, notice_s)

    def wait(self, instance_id: str, state: InstanceState, timeout_s: float = 120.0) -> None:
        """Wait until an instance is in a state. TimeoutError after `timeout_s`."""
        if not self.fleet.wait(self.find_instance(instance_id), state, timeout_s):
            raise TimeoutError(f"{instance_id} is not {state} after {timeout_s} s")

    def execute(self, instance_id: str, line: str) -> tuple[int, str]:
        """Run a shell line in an instance's machine as root; return (exit code, output)."""
        return self._require_machines().execute(instance_id, line)

    def freeze(self, instance_id: str) -> None:
        """Let an instance's machine hang: no process of it runs, and it answers nobody."""
        self._require_machines().freeze(instance_id)

    def close(self) -> None:
        """End everything: servers, machines, their network. Safe to repeat."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers.clear()
        if self._fleet is not None:
            self._fleet.close()
        if self._clock is not None:
            self._clock.stop()
            self._clock = None
        if self._machines is not None:
            self._machines.close()
            self._machines = None

    def _start(self) -> None:
        self._clock = TaskTimer()
        server = listener.listen(self._port)
        self._port = server.port
        try:
            if self.scenario.boot != "none":
                self._machines = self._create_machines()
        except BaseException:
            server.server_close()
            raise
        self._fleet = CloudFleet(
            self._clock,
            self._machines,
            lambda: self.scenario,
            self.after_power_off,
            self._notify,
            self.build_metadata,
        )
        self._application = CloudApplication(
            self.build_api(), lambda: self.scenario, self._handle_control
        )
        server.app = self._application
        listener.start(server)
        self._servers.append(server)
        if self._machines is not None:
            socket = self._machines.root / "api" / "api.sock"
            self._servers.append(listener.serve(self._application.inside, socket))

    def _create_machines(self) -> Machines:
        with engine.connect() as client:
            sweep(client)
            image = images.ensure_image(
                client, msgspec.structs.replace(self._building, stands_on=self.scenario.image)
            )
        client = docker.from_env(timeout=engine.TIMEOUT_S, max_pool_size=32)
        return Machines(client, image, self.scenario.boot, self._port)

    def _require_machines(self) -> Machines:
        if self._machines is None:
            raise EngineError("this rehearsal has no real machines (boot=none)")
        return self._machines

    def _handle_control(self, name: str, body: bytes) -> RehearsalState:
        if name == "reclaim":
            request = decode_json(body, ReclaimControl)
            self.reclaim(request.instance, request.notice_s)
        elif name == "set":
            self.override(decode_json(body, OverrideScenarioRequest).switches)
        elif name != "state":
            raise NotFoundError(f"unknown control request {name}: expected reclaim, set or state")
        states: dict[str, str] = dict(self.instances)
        return RehearsalState(instances=states, calls=self.calls, violations=tuple(self.violations))
