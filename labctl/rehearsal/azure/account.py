"""A simulated subscription: its resources by kind and name, operations, quotas and timers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase

from msgspec.structs import replace

from labctl.rehearsal.azure.hardware import FAMILIES, SIZES_BY_NAME
from labctl.rehearsal.azure.resources import (
    ArmProblem,
    ArmResource,
    AzureMachine,
    OperationState,
    Properties,
    last_segment,
)
from labctl.rehearsal.azure.scenario import AzureScenario
from labctl.rehearsal.core.clock import TaskTimer
from labctl.rehearsal.core.fleet import CloudFleet
from labctl.rehearsal.core.operations import ApiError

VMS = "Microsoft.Compute/virtualMachines"
DISKS = "Microsoft.Compute/disks"
NICS = "Microsoft.Network/networkInterfaces"
ADDRESSES = "Microsoft.Network/publicIPAddresses"
NETWORKS = "Microsoft.Network/virtualNetworks"
NSGS = "Microsoft.Network/networkSecurityGroups"
LARGE = 1000.0
# Azure's limits on the tags of a resource.
MOST_TAGS, TAG_NAME, TAG_VALUE = 50, 512, 256
NOT_IN_TAG_NAMES = frozenset("<>%&\\?/")
SPOT_QUOTA, ALL_QUOTA = "lowPriorityCores", "cores"
# Machines that take from a quota; a deallocated one takes nothing.
COUNTED = ("pending", "running", "stopping")


class AzureAccount:
    """The state of a subscription. Hold `fleet.lock` for a change that depends on what there is."""

    def __init__(
        self,
        fleet: CloudFleet[AzureMachine],
        clock: TaskTimer,
        scenario: Callable[[], AzureScenario],
    ) -> None:
        self.fleet = fleet
        self.clock = clock
        self.scenario = scenario
        self.groups: dict[str, ArmResource] = {}
        self.resources: dict[tuple[str, str], ArmResource] = {}
        self.failed: dict[str, AzureMachine] = {}
        self.timers: set[str] = set()
        self._operations: dict[str, tuple[float, ArmProblem | None]] = {}
        self._numbers = itertools.count(1)
        self._numbers_lock = threading.Lock()
        fleet.ended = self._release_parts

    def begin(self, problem: ArmProblem | None = None) -> str:
        """Begin an operation, which is done after the scenario's time for one; return its name."""
        with self._numbers_lock:
            name = f"operation-{next(self._numbers)}"
        self._operations[name] = (time.monotonic() + self.scenario().operation, problem)
        return name

    def read_operation(self, name: str) -> OperationState:
        if name not in self._operations:
            raise make_absent(name)
        done_at, problem = self._operations[name]
        if time.monotonic() < done_at:
            return OperationState(name=name, status="InProgress")
        if problem is not None:
            return OperationState(name=name, status="Failed", error=problem)
        return OperationState(name=name, status="Succeeded")

    def make_id(self, group: str, kind: str, name: str) -> str:
        subscription = self.scenario().subscription
        return f"/subscriptions/{subscription}/resourceGroups/{group}/providers/{kind}/{name}"

    def find_machine(self, name: str) -> AzureMachine | None:
        """Return a machine that is shown, one that was never allocated included."""
        machine = self.fleet.find(name)
        if machine is None or machine.state == "ended":
            return self.failed.get(name)
        return machine

    def require_machine(self, name: str) -> AzureMachine:
        machine = self.find_machine(name)
        if machine is None:
            raise make_absent(name)
        return machine

    def list_machines(self) -> list[AzureMachine]:
        shown = [one for one in self.fleet.list_shown() if one.state != "ended"]
        return [*shown, *self.failed.values()]

    def find_user(self, nic: str) -> AzureMachine | None:
        """Return the machine that has this interface."""
        return next((one for one in self.list_machines() if one.nic_name == nic), None)

    def find_exceeded_quota(self, size: str, region: str, is_spot: bool) -> str:
        """Return the quota that has no room for one more such machine; "" if all have."""
        cpus = SIZES_BY_NAME[size].cpus
        usage = self.measure_usage(region)
        for name in list_quota_names(size, is_spot):
            if usage[name] + cpus > self.get_limit(name, region):
                return name
        return ""

    def measure_usage(self, region: str) -> dict[str, float]:
        """Return the vCPUs in use of every quota."""
        usage = dict.fromkeys((SPOT_QUOTA, ALL_QUOTA, *FAMILIES), 0.0)
        for machine in self.fleet.list_all():
            if machine.region == region and machine.state in COUNTED:
                for name in list_quota_names(machine.type, machine.is_spot):
                    usage[name] += SIZES_BY_NAME[machine.type].cpus
        return usage

    def get_limit(self, name: str, region: str) -> float:
        for quota in self.scenario().quotas:
            if quota.name == name and fnmatchcase(region, quota.region):
                return quota.limit
        return LARGE

    def is_closed(self, size: str) -> bool:
        """Whether the subscription may not use a size."""
        return any(fnmatchcase(size, pattern) for pattern in self.scenario().closed)

    def apply_rules(self) -> None:
        """Let the security groups decide what reaches each machine."""
        for machine in self.fleet.list_shown():
            self.fleet.allow(machine, self.build_rules(machine))

    def build_rules(self, machine: AzureMachine) -> tuple[str, ...]:
        """Return what reaches a machine, as iptables arguments, by its rules and Azure's own."""
        nic = self.resources.get((NICS, machine.nic_name))
        if nic is None:
            return ()
        group = last_segment(nic.properties["networkSecurityGroup"]["id"])
        nsg = self.resources.get((NSGS, group))
        rules = nsg.properties["securityRules"] if nsg else []
        lines: list[str] = []
        # Azure's own rule, after all others, admits the machines of the virtual network.
        admits_peers = True
        for rule in sorted(rules, key=lambda one: -int(one["properties"]["priority"])):
            facts = rule["properties"]
            if facts.get("sourceAddressPrefix") == "VirtualNetwork":
                admits_peers = facts["access"] == "Allow"
            for source in facts.get("sourceAddressPrefixes", ()):
                port = facts["destinationPortRange"]
                lines.append(f"--protocol tcp --dport {port} --source {source}")
        if admits_peers:
            lines += [f"--source {peer}/32" for peer in self._list_peers(machine, nic)]
        return tuple(sorted(set(lines)))

    def _list_peers(self, machine: AzureMachine, nic: ArmResource) -> Iterator[str]:
        subnet = find_subnet(nic)
        for other in self.list_machines():
            its_nic = self.resources.get((NICS, other.nic_name))
            if (
                other is not machine
                and other.address
                and its_nic
                and find_subnet(its_nic) == subnet
            ):
                yield other.address

    def _release_parts(self, machine: AzureMachine) -> None:
        """Delete the parts that go with a machine, as their options say."""
        with self.fleet.lock:
            disk = machine.body.properties["storageProfile"]["osDisk"]
            if disk.get("deleteOption") == "Delete":
                self.resources.pop((DISKS, machine.disk_name), None)
            reference = machine.body.properties["networkProfile"]["networkInterfaces"][0]
            if reference["properties"].get("deleteOption") == "Delete":
                nic = self.resources.pop((NICS, machine.nic_name), None)
                address = find_address(nic) if nic else {}
                if address.get("properties", {}).get("deleteOption") == "Delete":
                    self.resources.pop((ADDRESSES, last_segment(address["id"])), None)

    def set_tags(self, machine: AzureMachine, tags: dict[str, str]) -> None:
        machine.body = replace(machine.body, tags=tags)


def list_quota_names(size: str, is_spot: bool) -> tuple[str, ...]:
    return (SPOT_QUOTA,) if is_spot else (SIZES_BY_NAME[size].family, ALL_QUOTA)


def find_subnet(nic: ArmResource) -> str:
    return str(nic.properties["ipConfigurations"][0]["properties"]["subnet"]["id"])


def find_address(nic: ArmResource) -> Properties:
    """Return the reference of an interface to its public address."""
    found: Properties = nic.properties["ipConfigurations"][0]["properties"]["publicIPAddress"]
    return found


def make_absent(name: str) -> ApiError:
    return ApiError(404, "ResourceNotFound", f"The resource '{name}' was not found.")


def require_valid_tags(tags: Mapping[str, str]) -> None:
    """Refuse what Azure refuses: too many tags, and names and values that it does not take."""
    if len(tags) > MOST_TAGS:
        raise ApiError(400, "TooManyTags", f"A resource can have at most {MOST_TAGS} tags.")
    for name, value in tags.items():
        if not name or len(name) > TAG_NAME or set(name) & NOT_IN_TAG_NAMES:
            raise ApiError(400, "InvalidTagName", f"The tag name '{name}' is invalid.")
        if len(value) > TAG_VALUE:
            raise ApiError(400, "InvalidTagValue", f"The value of the tag '{name}' is too long.")


def make_arm_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
