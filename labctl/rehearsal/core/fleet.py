"""The instances of a simulated cloud: states, and a booting container each if machines are real.

Every change of state goes through here, so that states, addresses and machines agree.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Generic, Literal, TypeVar
from wsgiref.types import WSGIApplication

from werkzeug.serving import BaseWSGIServer

from labctl.lazy import lazy_imports
from labctl.rehearsal.core import listener
from labctl.rehearsal.core.clock import TaskTimer
from labctl.rehearsal.core.machines import REBOOT_CODE, Machines
from labctl.rehearsal.core.scenario import CloudScenario

with lazy_imports(__name__):
    from docker import errors as docker_errors

InstanceState = Literal["pending", "running", "stopping", "stopped", "ending", "ended"]
ALIVE: tuple[InstanceState, ...] = ("pending", "running", "stopping", "stopped", "ending")
# What a cloud does after the system has powered itself off: the instance ends, it is stopped, or
# the cloud takes no notice, and it goes on to be billed as running.
AfterPowerOff = Literal["ended", "stopped", "running"]
SSH_ONLY = ("--protocol tcp --dport 22",)
# Addresses of instances without machines, where connections are refused at once.
NOWHERE = "127.64.0.0/16"


@dataclass
class CloudInstance:
    """An instance; a cloud's own record adds what its API shows. Times are monotonic.

    `seed` has the files of cloud-init's NoCloud by name: "user-data" and "meta-data". `rules` are
    the connections that reach it, as iptables arguments. `notice_at` (Unix seconds) is when it will
    be reclaimed, once notice was given. `reason` says why it ended: "request", "power-off",
    "reclaim", "timer" or "failure".
    """

    id: str
    type: str = ""
    region: str = ""
    seed: dict[str, str] = field(default_factory=dict)
    rules: tuple[str, ...] = SSH_ONLY
    state: InstanceState = "pending"
    address: str = ""
    is_spot: bool = False
    notice_at: float | None = None
    reason: str = ""
    created: float = field(default_factory=time.monotonic)
    created_at: float = field(default_factory=time.time)
    ended: float | None = None
    started_ns: int = 0
    is_expected_to_end: bool = False
    metadata_server: BaseWSGIServer | None = None
    # Held while its machine is created, started, stopped or removed.
    machine: threading.Lock = field(default_factory=threading.Lock)


Instance = TypeVar("Instance", bound=CloudInstance)


class CloudFleet(Generic[Instance]):
    """All instances of a simulated cloud. Safe to use from many threads.

    `lock` is reentrant; hold it for a change that depends on what the fleet has. `metadata` builds
    the application of a machine's metadata service at 169.254.169.254, None for a cloud without.
    `ended` is called with each instance that has ended, and `get_kept_disk` with one that ends: it
    returns the id of a disk that outlives it, or "".
    """

    def __init__(
        self,
        clock: TaskTimer,
        machines: Machines | None,
        scenario: Callable[[], CloudScenario],
        after_power_off: AfterPowerOff,
        notify: Callable[[str], None] = lambda text: None,
        metadata: Callable[[Instance], WSGIApplication | None] = lambda instance: None,
    ) -> None:
        self.lock = threading.RLock()
        self.ended: Callable[[Instance], None] = lambda instance: None
        self.get_kept_disk: Callable[[Instance], str] = lambda instance: ""
        self._changed = threading.Condition(self.lock)
        self._instances: dict[str, Instance] = {}
        self._clock = clock
        self._machines = machines
        self._scenario = scenario
        self._after_power_off = after_power_off
        self._notify = notify
        self._metadata = metadata
        self._nowhere = ipaddress.IPv4Network(NOWHERE).hosts()
        self._closed = False
        if machines is not None:
            machines.watch(self._machine_ended)

    def add(self, instance: Instance) -> None:
        """Record a new instance, and boot it."""
        with self.lock:
            self._instances[instance.id] = instance
            self._show(instance)
        self._clock.run_after(self._scenario().delays.boot, lambda: self._boot(instance))

    def find(self, instance_id: str) -> Instance | None:
        """Return an instance that is shown: not before `delays.visible`, nor once forgotten."""
        with self.lock:
            instance = self._instances.get(instance_id)
            return instance if instance is not None and self._is_shown(instance) else None

    def list_shown(self) -> list[Instance]:
        """List the instances that are shown, the oldest first."""
        with self.lock:
            return [one for one in self._instances.values() if self._is_shown(one)]

    def list_all(self) -> list[Instance]:
        """List every instance that ever existed."""
        with self.lock:
            return list(self._instances.values())

    def count_alive(self) -> int:
        with self.lock:
            return sum(one.state in ALIVE for one in self._instances.values())

    def has_capacity(self, type_: str, region: str) -> bool:
        """Whether one more such instance fits into the scenario's capacities."""
        with self.lock:
            alive = [one for one in self._instances.values() if one.state in ALIVE]
            for limit in self._scenario().capacity:
                if fnmatchcase(type_, limit.type) and fnmatchcase(region, limit.region):
                    used = sum(
                        fnmatchcase(one.type, limit.type) and fnmatchcase(one.region, limit.region)
                        for one in alive
                    )
                    return used < limit.left
        return True

    def terminate(self, instance: Instance, reason: str = "request") -> None:
        """Start to end an instance; one that is ending or has ended is left alone."""
        with self.lock:
            if instance.state in ("ending", "ended"):
                return
            self._set(instance, "ending", reason)
        began = time.monotonic()

        def finish() -> None:
            with instance.machine:
                self._stop_metadata(instance)
                if self._machines is not None:
                    politely = reason not in ("reclaim", "timer")
                    disk = self.get_kept_disk(instance)
                    self._machines.remove(instance.id, politely=politely, disk=disk)
            left_s = self._scenario().delays.terminate - (time.monotonic() - began)
            self._clock.run_after(max(0.0, left_s), end)

        def end() -> None:
            with self.lock:
                instance.ended = time.monotonic()
                instance.address = ""
                self._set(instance, "ended", reason)
            self.ended(instance)

        self._clock.run_after(0, finish)

    def stop(self, instance: Instance, reason: str = "request") -> None:
        with self.lock:
            if instance.state not in ("pending", "running"):
                return
            self._set(instance, "stopping", reason)

        def finish() -> None:
            with instance.machine:
                if self._machines is not None and reason == "reclaim":
                    self._machines.kill(instance.id)
                elif self._machines is not None:
                    self._machines.stop(instance.id)
            with self.lock:
                if instance.state == "stopping":
                    self._set(instance, "stopped", reason)

        self._clock.run_after(0, finish)

    def start(self, instance: Instance) -> None:
        """Start a stopped instance."""
        with self.lock:
            if instance.state != "stopped":
                return
            self._set(instance, "pending")
        self._clock.run_after(self._scenario().delays.boot, lambda: self._boot(instance))

    def reboot(self, instance: Instance) -> None:
        def restart() -> None:
            if self._machines is None:
                return
            with instance.machine:
                instance.is_expected_to_end = True
                self._machines.stop(instance.id)
                self._switch_on(instance)

        self._clock.run_now(restart)

    def reclaim(self, instance: Instance, notice_s: float) -> None:
        """Give notice now, and take the instance `notice_s` later; 0 is without notice."""
        if notice_s:
            instance.notice_at = time.time() + notice_s
        self._clock.run_after(notice_s, lambda: self.terminate(instance, "reclaim"))

    def allow(self, instance: Instance, rules: tuple[str, ...]) -> None:
        """Allow these connections from now on."""
        instance.rules = rules
        if self._machines is not None and instance.state in ("pending", "running"):
            self._machines.allow(instance.id, list(rules))

    def attach_disk(self, instance: Instance, disk: str, device: str) -> None:
        """Make the files of a kept disk available in a machine, below this device's name."""
        if self._machines is not None:
            self._machines.attach_disk(instance.id, disk, device)

    def drop_disk(self, disk: str) -> None:
        """Remove a kept disk; an unknown one is ignored."""
        if self._machines is not None:
            self._machines.drop_disk(disk)

    def read_console(self, instance: Instance) -> str:
        return self._machines.read_console(instance.id) if self._machines is not None else ""

    def wait(self, instance: Instance, state: InstanceState, timeout_s: float) -> bool:
        """Wait until it is in this state, for at most `timeout_s`; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: instance.state == state, timeout_s)

    def close(self) -> None:
        self._closed = True
        for instance in self.list_all():
            self._stop_metadata(instance)

    def _is_shown(self, instance: Instance) -> bool:
        delays, now = self._scenario().delays, time.monotonic()
        if now - instance.created < delays.visible:
            return False
        return instance.ended is None or now - instance.ended < delays.forget

    def _boot(self, instance: Instance) -> None:
        """Start the machine, then set the instance to running."""
        with instance.machine:
            if instance.state != "pending":
                return
            try:
                self._ensure_machine(instance)
            except (docker_errors.DockerException, OSError) as error:
                self._notify(f"could not create the machine of {instance.id}: {error}")
                self.terminate(instance, "failure")
                return
        with self.lock:
            if instance.state == "pending":
                self._set(instance, "running")

    def _ensure_machine(self, instance: Instance) -> None:
        """Create its machine unless it has one, and start it."""
        if self._machines is None:
            instance.address = instance.address or str(next(self._nowhere))
            return
        if not instance.address:
            rules = list(instance.rules)
            instance.address = self._machines.create(instance.id, rules, instance.seed)
            application = self._metadata(instance)
            if self._machines.has_cloud_init and application is not None:
                socket = self._machines.directory(instance.id) / "imds.sock"
                instance.metadata_server = listener.serve(application, socket)
        self._switch_on(instance)

    def _switch_on(self, instance: Instance) -> None:
        assert self._machines is not None
        instance.is_expected_to_end = False
        instance.started_ns = time.time_ns()
        self._machines.start(instance.id)

    def _machine_ended(self, instance_id: str, code: int, when_ns: int) -> None:
        """Handle the end of a machine that nobody asked for: a power-off or a reboot inside."""
        with self.lock:
            instance = self._instances.get(instance_id)
            if self._closed or instance is None or when_ns < instance.started_ns:
                return
            if instance.state != "running" or instance.is_expected_to_end:
                return
        if code == REBOOT_CODE:
            self._clock.run_now(lambda: self._restart(instance))
        elif self._after_power_off == "ended":
            self.terminate(instance, "power-off")
        elif self._after_power_off == "stopped":
            self.stop(instance, "power-off")
        else:
            self._notify(f"{instance_id} has powered itself off, and is still billed")

    def _restart(self, instance: Instance) -> None:
        with instance.machine:
            if instance.state == "running":
                self._switch_on(instance)

    def _stop_metadata(self, instance: Instance) -> None:
        if (server := instance.metadata_server) is not None:
            instance.metadata_server = None
            server.shutdown()
            server.server_close()

    def _set(self, instance: Instance, state: InstanceState, reason: str = "") -> None:
        instance.state = state
        instance.reason = reason
        instance.is_expected_to_end = state not in ("pending", "running")
        self._show(instance)

    def _show(self, instance: Instance) -> None:
        reason = f" ({instance.reason})" if instance.reason else ""
        self._notify(f"{instance.id} is {instance.state}{reason}")
        self._changed.notify_all()
