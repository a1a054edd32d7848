"""The instances of a rehearsal: what moto does not know of them, and how they live and end.

moto's own object holds what describe calls show. Every change of state goes through here, with
the backend held, so that states, addresses and machines agree.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from werkzeug.serving import BaseWSGIServer

from labctl.rehearsal import imds, ingress
from labctl.rehearsal.backend import Backend
from labctl.rehearsal.clock import Clock
from labctl.rehearsal.machines import REBOOT_CODE, Machines
from labctl.rehearsal.scenario import Scenario

PENDING, RUNNING, SHUTTING_DOWN = (0, "pending"), (16, "running"), (32, "shutting-down")
TERMINATED, STOPPING, STOPPED = (48, "terminated"), (64, "stopping"), (80, "stopped")
State = tuple[int, str]

USER_SHUTDOWN = "Client.UserInitiatedShutdown"
OWN_SHUTDOWN = "Client.InstanceInitiatedShutdown"
RECLAIMED = "Server.SpotInstanceTermination"
# The addresses of instances without machines: connections are refused at once.
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
class Record:
    """One instance beyond what moto keeps. Times are of the monotonic clock, notices Unix."""

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
    # Held by whoever makes, starts, stops or removes its machine.
    machine: threading.Lock = field(default_factory=threading.Lock)


class Fleet:
    """Every instance, with its machine where machines are real."""

    def __init__(
        self,
        backend: Backend,
        clock: Clock,
        machines: Machines | None,
        scenario: Callable[[], Scenario],
        metadata: Callable[[Record], imds.Look],
        said: Callable[[str], None],
    ) -> None:
        self.records: dict[str, Record] = {}
        self._backend = backend
        self._clock = clock
        self._machines = machines
        self._scenario = scenario
        self._metadata = metadata
        self._said = said
        self._closed = False
        self._nowhere = ipaddress.IPv4Network(NOWHERE).hosts()
        # Told of each instance that runs.
        self.running: Callable[[Record], None] = lambda record: None
        if machines is not None:
            machines.watch(self._machine_ended)

    def add(self, record: Record) -> None:
        """An instance that moto has just made: it boots from here on."""
        with self._backend.held():
            self.records[record.id] = record
            instance = self.instance(record)
            for nic in instance.nics.values():
                nic.public_ip_auto_assign = False
            self._show_address(record, "")
            self._set(record, PENDING)
        self._clock.after(self._scenario().delays.boot, lambda: self._boot(record))

    def instance(self, record: Record) -> Any:
        """moto's object; only while the backend is held."""
        return self._backend.instance(record.region, record.id)

    def state(self, record: Record) -> State:
        instance = self.instance(record)
        return instance._state.code, instance._state.name

    def terminate(self, record: Record, reason: str = USER_SHUTDOWN) -> tuple[State, State]:
        """(state before, state now). The rest happens by itself."""
        with self._backend.held():
            before = self.state(record)
            if before in (TERMINATED, SHUTTING_DOWN):
                return before, before
            record.asked_to_end = True
            self._set(record, SHUTTING_DOWN, reason)
        delay_s = self._scenario().delays.terminate
        self._clock.after(0, lambda: self._end(record, reason, delay_s))
        return before, SHUTTING_DOWN

    def stop(self, record: Record, reason: str = USER_SHUTDOWN) -> tuple[State, State]:
        with self._backend.held():
            before = self.state(record)
            if before not in (RUNNING, PENDING):
                return before, before
            record.asked_to_end = True
            self._set(record, STOPPING, reason)
        self._clock.after(0, lambda: self._stopped(record, reason))
        return before, STOPPING

    def start(self, record: Record) -> tuple[State, State]:
        with self._backend.held():
            before = self.state(record)
            if before != STOPPED:
                return before, before
            self._set(record, PENDING)
        self._clock.after(self._scenario().delays.boot, lambda: self._boot(record))
        return before, PENDING

    def reboot(self, record: Record) -> None:
        def again() -> None:
            if self._machines is None:
                return
            with record.machine:
                record.asked_to_end = True
                self._machines.stop(record.id)
                self._switch_on(record)

        self._clock.now(again)

    def admit(self, region: str) -> None:
        """Security groups have changed: every machine there follows."""
        if self._machines is None:
            return
        with self._backend.held():
            lines = {
                record.id: self._rules(record)
                for record in self.records.values()
                if record.region == region and self.state(record) in (PENDING, RUNNING)
            }
        for instance_id, rules in lines.items():
            self._machines.allow(instance_id, rules)

    def console(self, record: Record) -> str:
        return self._machines.console(record.id) if self._machines is not None else ""

    def attach(self, instance_id: str, volume_id: str) -> None:
        """A kept disk's files appear in a machine."""
        if self._machines is not None:
            self._machines.attach_disk(instance_id, volume_id)

    def drop_disk(self, volume_id: str) -> None:
        if self._machines is not None:
            self._machines.drop_disk(volume_id)

    def wait(self, record: Record, state: State, timeout_s: float) -> bool:
        """Until it is in this state, at most so long."""

        def there() -> bool:
            return bool(record.states) and record.states[-1][1] == state

        with record.changed:
            return record.changed.wait_for(there, timeout_s)

    def close(self) -> None:
        self._closed = True
        for record in self.records.values():
            self._silence(record)

    def _boot(self, record: Record) -> None:
        """The machine starts, then the instance is running."""
        from docker.errors import DockerException

        with record.machine:
            with self._backend.held():
                if self.state(record) != PENDING:
                    return
                rules = self._rules(record)
            try:
                self._make(record, rules)
            except (DockerException, OSError) as error:
                self._said(f"{record.id} cannot be made: {error}")
                self.terminate(record, FAILED)
                return
        with self._backend.held():
            if self.state(record) == PENDING:
                self._show_address(record, record.address)
                self._set(record, RUNNING)
        self.running(record)

    def _make(self, record: Record, rules: list[str]) -> None:
        """A machine for it, or the one that it has, started."""
        if self._machines is None:
            record.address = record.address or str(next(self._nowhere))
            return
        if record.address:
            self._machines.allow(record.id, rules)
        else:
            record.address = self._machines.create(record.id, rules, self._seed(record))
            if self._machines.whole:
                socket = self._machines.directory(record.id) / "imds.sock"
                record.metadata = imds.serve(imds.Metadata(self._metadata(record)), socket)
        self._switch_on(record)

    def _switch_on(self, record: Record) -> None:
        assert self._machines is not None
        record.asked_to_end = False
        record.started_ns = time.time_ns()
        self._machines.start(record.id)

    def _end(self, record: Record, reason: str, delay_s: float) -> None:
        """The machine goes, then moto's instance with the disks that end with it."""
        began = time.monotonic()
        with record.machine:
            self._silence(record)
            if self._machines is not None:
                kept = self._kept(record)
                self._machines.remove(record.id, politely=reason != RECLAIMED, disk=kept)
        left_s = delay_s - (time.monotonic() - began)
        self._clock.after(max(0.0, left_s), lambda: self._ended(record, reason))

    def _ended(self, record: Record, reason: str) -> None:
        with self._backend.held():
            self.instance(record).terminate()
            record.ended = time.monotonic()
            self._show_address(record, "")
            self._set(record, TERMINATED, reason)

    def _stopped(self, record: Record, reason: str) -> None:
        if self._machines is not None:
            with record.machine:
                self._machines.stop(record.id)
        with self._backend.held():
            if self.state(record) == STOPPING:
                self.instance(record).stop()
                self._show_address(record, "")
                self._set(record, STOPPED, reason)

    def _machine_ended(self, instance_id: str, code: int, at_ns: int) -> None:
        """Its own doing, unless it was asked to: what the shutdown behaviour says then happens."""
        record = self.records.get(instance_id)
        if record is None or record.asked_to_end or self._closed or at_ns < record.started_ns:
            return
        if code == REBOOT_CODE:
            self._clock.now(lambda: self._switch_on(record))
            return
        with self._backend.held():
            behaviour = self.instance(record).instance_initiated_shutdown_behavior
        if behaviour == "terminate":
            self.terminate(record, OWN_SHUTDOWN)
        else:
            self.stop(record, OWN_SHUTDOWN)

    def _set(self, record: Record, state: State, reason: str = "") -> None:
        from moto.ec2.models.instances import StateReason

        instance = self.instance(record)
        instance._state.code, instance._state.name = state
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        by_user = f"User initiated ({when})" if reason == USER_SHUTDOWN else ""
        instance._reason = by_user or (f"{reason} ({when})" if reason else "")
        words = f"{reason}: {REASONS[reason]}" if reason else ""
        instance.state_reason = StateReason(words, reason)
        with record.changed:
            record.states.append((time.monotonic(), state))
            record.changed.notify_all()
        kind = instance.instance_type + (" spot" if record.spot_request else "")
        shown = f" at {record.address}" if state == RUNNING else ""
        self._said(f"{record.id} {kind} in {record.region}: {state[1]}{shown} {reason}".rstrip())

    def _show_address(self, record: Record, address: str) -> None:
        nics = self.instance(record).nics
        if 0 in nics:
            nics[0].public_ip = address or None

    def _rules(self, record: Record) -> list[str]:
        groups = {group.id: group for group in self._groups(self.instance(record))}
        members: dict[str, list[str]] = {}
        for other in self.records.values():
            if other.address and other.region == record.region:
                for group in self._groups(self.instance(other)):
                    members.setdefault(group.id, []).append(f"{other.address}/32")
        return ingress.rules(list(groups.values()), members)

    def _groups(self, instance: Any) -> list[Any]:
        nics = [group for nic in instance.nics.values() for group in nic.group_set]
        return [*instance.security_groups, *nics]

    def _seed(self, record: Record) -> dict[str, str]:
        meta = imds.document({"instance-id": record.id, "local-hostname": record.id})
        return {"user-data": record.user_data, "meta-data": meta}

    def _kept(self, record: Record) -> str:
        """The root volume's id where it outlives the instance."""
        with self._backend.held():
            instance = self.instance(record)
            root = dict(instance.get_block_device_mapping).get(instance.root_device_name)
            return root.volume_id if root is not None and not root.delete_on_termination else ""

    def _silence(self, record: Record) -> None:
        if record.metadata is not None:
            record.metadata.shutdown()
            record.metadata.server_close()
            record.metadata = None
