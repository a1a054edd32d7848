"""The instances of a rehearsal: their state beyond moto's, and their life cycle.

moto's own object has what describe calls show. Every change of state goes through here, with the
backend locked, so that states, addresses and machines agree.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from werkzeug.serving import BaseWSGIServer

from labctl.lazy import lazy_imports
from labctl.rehearsal.aws import imds, ingress
from labctl.rehearsal.aws.backend import Backend
from labctl.rehearsal.aws.scenario import Scenario
from labctl.rehearsal.core import listener
from labctl.rehearsal.core.clock import TaskTimer
from labctl.rehearsal.core.machines import REBOOT_CODE, Machines, build_seed

if TYPE_CHECKING:
    from moto.ec2.models.instances import Instance
    from moto.ec2.models.security_groups import SecurityGroup

with lazy_imports(__name__):
    from docker import errors as docker_errors
    from moto.ec2.models import instances

PENDING, RUNNING, SHUTTING_DOWN = (0, "pending"), (16, "running"), (32, "shutting-down")
TERMINATED, STOPPING, STOPPED = (48, "terminated"), (64, "stopping"), (80, "stopped")
State = tuple[int, str]

USER_SHUTDOWN = "Client.UserInitiatedShutdown"
OWN_SHUTDOWN = "Client.InstanceInitiatedShutdown"
RECLAIMED = "Server.SpotInstanceTermination"
# Addresses of instances without machines, where connections are refused at once.
NOWHERE = "127.64.0.0/16"
FAILED = "Server.InternalError"
REASONS = {
    USER_SHUTDOWN: "User initiated shutdown",
    OWN_SHUTDOWN: "Instance initiated shutdown",
    RECLAIMED: "Spot instance termination",
    FAILED: "Internal error on launch",
}

log = logging.getLogger(__name__)


@dataclass
class InstanceRecord:
    """An instance's state beyond moto's. Times are on the monotonic clock, notices Unix seconds."""

    id: str
    region: str
    user_data: str
    spot_request: str = ""
    created: float = field(default_factory=time.monotonic)
    ended: float | None = None
    states: list[tuple[float, State]] = field(default_factory=list)
    address: str = ""
    asked_to_end: bool = False
    started_ns: int = 0
    notice_at: float | None = None
    rebalance_at: float | None = None
    metadata: BaseWSGIServer | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)
    # Held while its machine is created, started, stopped or removed.
    machine: threading.Lock = field(default_factory=threading.Lock)


class Fleet:
    """All instances, each with its machine if machines are real."""

    def __init__(
        self,
        backend: Backend,
        clock: TaskTimer,
        machines: Machines | None,
        scenario: Callable[[], Scenario],
        metadata: Callable[[InstanceRecord], imds.MetadataLookup],
        notify: Callable[[str], None],
    ) -> None:
        self.records: dict[str, InstanceRecord] = {}
        self._backend = backend
        self._clock = clock
        self._machines = machines
        self._scenario = scenario
        self._metadata = metadata
        self._report = notify
        self._closed = False
        self._nowhere = ipaddress.IPv4Network(NOWHERE).hosts()
        # Called with each instance that has started.
        self.running: Callable[[InstanceRecord], None] = lambda record: None
        if machines is not None:
            machines.watch(self._machine_ended)

    def add(self, record: InstanceRecord) -> None:
        """Boot an instance that moto has just created."""
        with self._backend.lock():
            self.records[record.id] = record
            instance = self.instance(record)
            for nic in instance.nics.values():
                nic.public_ip_auto_assign = False
            self._show_address(record, "")
            self._set_state(record, PENDING)
        self._clock.run_after(self._scenario().delays.boot, lambda: self._boot(record))

    def instance(self, record: InstanceRecord) -> Instance:
        """Return moto's object; use it only while the backend is locked."""
        return self._backend.instance(record.region, record.id)

    def state(self, record: InstanceRecord) -> State:
        instance = self.instance(record)
        return instance._state.code, instance._state.name

    def terminate(self, record: InstanceRecord, reason: str = USER_SHUTDOWN) -> tuple[State, State]:
        """Start to terminate; return (state before, state now)."""
        with self._backend.lock():
            previous = self.state(record)
            if previous in (TERMINATED, SHUTTING_DOWN):
                return previous, previous
            record.asked_to_end = True
            self._set_state(record, SHUTTING_DOWN, reason)
        delay_s = self._scenario().delays.terminate
        self._clock.run_after(0, lambda: self._remove_machine(record, reason, delay_s))
        return previous, SHUTTING_DOWN

    def stop(self, record: InstanceRecord, reason: str = USER_SHUTDOWN) -> tuple[State, State]:
        with self._backend.lock():
            previous = self.state(record)
            if previous not in (RUNNING, PENDING):
                return previous, previous
            record.asked_to_end = True
            self._set_state(record, STOPPING, reason)
        self._clock.run_after(0, lambda: self._finish_stop(record, reason))
        return previous, STOPPING

    def start(self, record: InstanceRecord) -> tuple[State, State]:
        with self._backend.lock():
            previous = self.state(record)
            if previous != STOPPED:
                return previous, previous
            self._set_state(record, PENDING)
        self._clock.run_after(self._scenario().delays.boot, lambda: self._boot(record))
        return previous, PENDING

    def reboot(self, record: InstanceRecord) -> None:
        def restart() -> None:
            if self._machines is None:
                return
            with record.machine:
                record.asked_to_end = True
                self._machines.stop(record.id)
                self._switch_on(record)

        self._clock.run_now(restart)

    def apply_ingress(self, region: str) -> None:
        """Apply changed security groups to every machine of the region."""
        if self._machines is None:
            return
        with self._backend.lock():
            lines = {
                record.id: self._rules(record)
                for record in self.records.values()
                if record.region == region and self.state(record) in (PENDING, RUNNING)
            }
        for instance_id, rules in lines.items():
            self._machines.allow(instance_id, rules)

    def read_console(self, record: InstanceRecord) -> str:
        return self._machines.read_console(record.id) if self._machines is not None else ""

    def attach(self, instance_id: str, volume_id: str) -> None:
        """Make the files of a kept disk available in a machine."""
        if self._machines is not None:
            self._machines.attach_disk(instance_id, volume_id)

    def drop_disk(self, volume_id: str) -> None:
        if self._machines is not None:
            self._machines.drop_disk(volume_id)

    def wait(self, record: InstanceRecord, state: State, timeout_s: float) -> bool:
        """Wait until it is in this state, for at most `timeout_s`; return whether it is."""

        def is_reached() -> bool:
            return bool(record.states) and record.states[-1][1] == state

        with record.changed:
            return record.changed.wait_for(is_reached, timeout_s)

    def close(self) -> None:
        self._closed = True
        for record in self.records.values():
            self._stop_metadata(record)

    def _boot(self, record: InstanceRecord) -> None:
        """Start the machine, then set the instance to running."""
        with record.machine:
            with self._backend.lock():
                if self.state(record) != PENDING:
                    return
                rules = self._rules(record)
            try:
                self._ensure_machine(record, rules)
            except (docker_errors.DockerException, OSError) as error:
                self._report(f"could not create the machine of {record.id}: {error}")
                self.terminate(record, FAILED)
                return
        with self._backend.lock():
            if self.state(record) == PENDING:
                self._show_address(record, record.address)
                self._set_state(record, RUNNING)
        # Rules of other machines may admit its group, and so its address.
        self.apply_ingress(record.region)
        self.running(record)

    def _ensure_machine(self, record: InstanceRecord, rules: list[str]) -> None:
        """Create its machine unless it has one, and start it."""
        if self._machines is None:
            record.address = record.address or str(next(self._nowhere))
            return
        if record.address:
            self._machines.allow(record.id, rules)
        else:
            record.address = self._machines.create(
                record.id, rules, build_seed(record.id, record.user_data)
            )
            if self._machines.has_cloud_init:
                socket = self._machines.directory(record.id) / "imds.sock"
                record.metadata = listener.serve(imds.MetadataApp(self._metadata(record)), socket)
        self._switch_on(record)

    def _switch_on(self, record: InstanceRecord) -> None:
        assert self._machines is not None
        record.asked_to_end = False
        record.started_ns = time.time_ns()
        self._machines.start(record.id)

    def _remove_machine(self, record: InstanceRecord, reason: str, delay_s: float) -> None:
        """Remove the machine, then moto's instance with the disks that end with it."""
        started_s = time.monotonic()
        with record.machine:
            self._stop_metadata(record)
            if self._machines is not None:
                kept_volume = self._kept_root_volume(record)
                self._machines.remove(record.id, politely=reason != RECLAIMED, disk=kept_volume)
        remaining_s = delay_s - (time.monotonic() - started_s)
        self._clock.run_after(
            max(0.0, remaining_s), lambda: self._finish_termination(record, reason)
        )

    def _finish_termination(self, record: InstanceRecord, reason: str) -> None:
        with self._backend.lock():
            self.instance(record).terminate()
            record.ended = time.monotonic()
            self._show_address(record, "")
            self._set_state(record, TERMINATED, reason)

    def _finish_stop(self, record: InstanceRecord, reason: str) -> None:
        if self._machines is not None:
            with record.machine:
                self._machines.stop(record.id)
        with self._backend.lock():
            if self.state(record) == STOPPING:
                self.instance(record).stop()
                self._show_address(record, "")
                self._set_state(record, STOPPED, reason)

    def _machine_ended(self, instance_id: str, code: int, at_ns: int) -> None:
        """Handle a machine's end: unless requested, apply its shutdown behavior."""
        record = self.records.get(instance_id)
        if record is None or record.asked_to_end or self._closed or at_ns < record.started_ns:
            return
        if code == REBOOT_CODE:
            self._clock.run_now(lambda: self._switch_on(record))
            return
        with self._backend.lock():
            behavior = self.instance(record).instance_initiated_shutdown_behavior
        if behavior == "terminate":
            self.terminate(record, OWN_SHUTDOWN)
        else:
            self.stop(record, OWN_SHUTDOWN)

    def _set_state(self, record: InstanceRecord, state: State, reason: str = "") -> None:
        instance = self.instance(record)
        instance._state.code, instance._state.name = state
        when_text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        by_user = f"User initiated ({when_text})" if reason == USER_SHUTDOWN else ""
        instance._reason = by_user or (f"{reason} ({when_text})" if reason else "")
        message = f"{reason}: {REASONS[reason]}" if reason else ""
        instance.state_reason = instances.StateReason(message, reason)
        with record.changed:
            record.states.append((time.monotonic(), state))
            record.changed.notify_all()
        kind = instance.instance_type + (" spot" if record.spot_request else "")
        address = f" at {record.address}" if state == RUNNING else ""
        self._report(
            f"{record.id} {kind} in {record.region}: {state[1]}{address} {reason}".rstrip()
        )

    def _show_address(self, record: InstanceRecord, address: str) -> None:
        nics = self.instance(record).nics
        if 0 in nics:
            nics[0].public_ip = address or None

    def _rules(self, record: InstanceRecord) -> list[str]:
        groups = {group.id: group for group in self._list_groups(self.instance(record))}
        members: dict[str, list[str]] = {}
        for other in self.records.values():
            if other.address and other.region == record.region:
                for group in self._list_groups(self.instance(other)):
                    members.setdefault(group.id, []).append(f"{other.address}/32")
        return ingress.build_rules(list(groups.values()), members)

    def _list_groups(self, instance: Instance) -> list[SecurityGroup]:
        nics = [group for nic in instance.nics.values() for group in nic.group_set]
        return [*instance.security_groups, *nics]

    def _kept_root_volume(self, record: InstanceRecord) -> str:
        """Return the root volume's id if it outlives the instance, else ""."""
        with self._backend.lock():
            instance = self.instance(record)
            root = dict(instance.get_block_device_mapping).get(instance.root_device_name)
            return root.volume_id if root is not None and not root.delete_on_termination else ""

    def _stop_metadata(self, record: InstanceRecord) -> None:
        if record.metadata is not None:
            record.metadata.shutdown()
            record.metadata.server_close()
            record.metadata = None
