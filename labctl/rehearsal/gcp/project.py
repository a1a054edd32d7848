"""A simulated project: its disks, firewall rules and operations beside its instances."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable

from msgspec.structs import replace

from labctl.model import Value
from labctl.rehearsal.core.clock import TaskTimer
from labctl.rehearsal.core.fleet import CloudFleet
from labctl.rehearsal.core.operations import ApiError
from labctl.rehearsal.gcp.resources import (
    DiskResource,
    FirewallResource,
    GceMachine,
    OperationFault,
    OperationFaults,
    OperationResource,
    Traffic,
    make_timestamp,
)
from labctl.rehearsal.gcp.scenario import GcpScenario

ROOT = "https://www.googleapis.com/compute/v1"
PREEMPTED = "compute.instances.preempted"
ANYWHERE = "0.0.0.0/0"
_CONDITION = re.compile(r'(labels\.)?([A-Za-z-]+)\s*(=| eq )\s*"?([^"]*)"?')


class Project:
    """The state of a project. Hold `fleet.lock` for a change that depends on what there is."""

    def __init__(
        self,
        fleet: CloudFleet[GceMachine],
        clock: TaskTimer,
        scenario: Callable[[], GcpScenario],
    ) -> None:
        self.fleet = fleet
        self.clock = clock
        self.scenario = scenario
        self.disks: dict[tuple[str, str], DiskResource] = {}
        self.operations: dict[str, OperationResource] = {}
        self.by_request: dict[tuple[str, str], OperationResource] = {}
        self._done_at: dict[str, float] = {}
        self._numbers = itertools.count(1)
        self._numbers_lock = threading.Lock()
        # What every new project has in its network `default`.
        self.firewalls = {
            "default-allow-ssh": FirewallResource(
                name="default-allow-ssh",
                network=self.link("global/networks/default"),
                direction="INGRESS",
                priority=65534,
                allowed=(Traffic(ip_protocol="tcp", ports=("22",)),),
                source_ranges=(ANYWHERE,),
            )
        }
        fleet.ended = self._release_disks
        fleet.get_kept_disk = _find_kept_disk

    @property
    def name(self) -> str:
        return self.scenario().project

    def link(self, path: str) -> str:
        """Return the URL of a resource of the project."""
        return f"{ROOT}/projects/{self.name}/{path}"

    def begin(
        self, kind: str, target: str, zone: str = "", problem: OperationFault | None = None
    ) -> OperationResource:
        """Begin an operation, which is done after the scenario's time for one."""
        with self._numbers_lock:
            number = next(self._numbers)
        operation = OperationResource(
            name=f"operation-{number}",
            operation_type=kind,
            target_link=self.link(target),
            insert_time=make_timestamp(),
            zone=self.link(f"zones/{zone}") if zone else "",
            error=OperationFaults(errors=(problem,)) if problem else None,
        )
        self.operations[operation.name] = operation
        self._done_at[operation.name] = time.monotonic() + self.scenario().operation
        return replace(operation, error=None)

    def read_operation(self, name: str) -> OperationResource:
        operation = self.operations.get(name)
        if operation is None:
            raise absent(f"operations/{name}")
        if time.monotonic() < self._done_at[name]:
            return replace(operation, error=None)
        return replace(operation, status="DONE")

    def find_machine(self, zone: str, name: str) -> GceMachine:
        """Return an instance that exists and is shown; ApiError without one."""
        machine = self.fleet.find(name)
        if machine is None or machine.zone != zone or machine.state == "ended":
            raise absent(f"zones/{zone}/instances/{name}")
        return machine

    def find_disk(self, zone: str, name: str) -> DiskResource:
        disk = self.disks.get((zone, name))
        if disk is None:
            raise absent(f"zones/{zone}/disks/{name}")
        return disk

    def list_zones(self) -> list[str]:
        return [f"{region}-{letter}" for region in self.scenario().regions for letter in "abc"]

    def apply_rules(self) -> None:
        """Let the firewall rules decide what reaches each machine."""
        for machine in self.fleet.list_shown():
            self.fleet.allow(machine, self.build_rules(machine))

    def build_rules(self, machine: GceMachine) -> tuple[str, ...]:
        """Return what reaches a machine, as iptables arguments.

        Rules are taken by priority. The first that denies everything ends them, as labctl's does;
        one that denies less is not simulated.
        """
        tags = set(machine.resource.tags.items)
        lines: list[str] = []
        rules = sorted(self.firewalls.values(), key=lambda rule: (rule.priority, not rule.denied))
        for rule in rules:
            if rule.target_tags and not tags & set(rule.target_tags):
                continue
            if any(traffic.ip_protocol == "all" for traffic in rule.denied):
                break
            sources = [*rule.source_ranges, *self._list_members(rule)]
            lines += [
                f"{_match_words(traffic)} --source {source}".strip()
                for traffic in rule.allowed
                for source in sources
            ]
        return tuple(sorted(set(lines)))

    def _list_members(self, rule: FirewallResource) -> list[str]:
        wanted = set(rule.source_tags)
        return [
            f"{machine.address}/32"
            for machine in self.fleet.list_shown()
            if machine.address and wanted & set(machine.resource.tags.items)
        ]

    def _release_disks(self, machine: GceMachine) -> None:
        """Delete the disks that go with an instance, and detach the others."""
        with self.fleet.lock:
            if machine.reason == "reclaim":
                target = f"zones/{machine.zone}/instances/{machine.id}"
                self.begin(PREEMPTED, target, machine.zone)
            for use in machine.resource.disks:
                key = (machine.zone, use.source.rpartition("/")[2])
                if use.auto_delete:
                    self.disks.pop(key, None)
                elif key in self.disks:
                    self.disks[key] = replace(self.disks[key], users=())


def make_disk_id(zone: str, name: str) -> str:
    """Return the id of a disk for the machines of the rehearsal, whose own ids are names too."""
    return f"disk-{zone}-{name}"


def _find_kept_disk(machine: GceMachine) -> str:
    """Return the boot disk of an instance if it outlives it, else ""."""
    for use in machine.resource.disks:
        if use.boot and not use.auto_delete:
            return make_disk_id(machine.zone, use.source.rpartition("/")[2])
    return ""


def absent(path: str) -> ApiError:
    return ApiError(404, "notFound", f"The resource '{path}' was not found")


def matches_filter(resource: Value, condition: str) -> bool:
    """Whether a resource meets a filter of labctl's: one label, one field, or one expression."""
    if not condition:
        return True
    match = _CONDITION.fullmatch(condition)
    if match is None:
        raise ApiError(400, "invalid", f"this rehearsal does not know the filter {condition!r}")
    is_label, field, comparison, wanted = match.groups()
    names = {"operationType": "operation_type"}
    if is_label:
        value = getattr(resource, "labels", {}).get(field)
    else:
        value = getattr(resource, names.get(field, field), None)
    if comparison.strip() == "eq":
        return value is not None and re.fullmatch(wanted, value) is not None
    return value is not None and value == wanted


def _match_words(traffic: Traffic) -> str:
    if traffic.ip_protocol == "all":
        return ""
    if not traffic.ports:
        return f"--protocol {traffic.ip_protocol}"
    return f"--protocol {traffic.ip_protocol} --dport {traffic.ports[0].replace('-', ':')}"
