"""Handlers of virtual machines and of the timers that end them."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from typing import Any

from msgspec.structs import replace

from labctl.model import Value
from labctl.rehearsal.azure.account import (
    DISKS,
    NICS,
    VMS,
    AzureAccount,
    make_arm_time,
    require_valid_tags,
)
from labctl.rehearsal.azure.hardware import SIZES_BY_NAME
from labctl.rehearsal.azure.resources import (
    ArmListing,
    ArmProblem,
    ArmResource,
    AzureMachine,
    CancelBody,
    SubmitBody,
    TagsChange,
    TagsPart,
    last_segment,
)
from labctl.rehearsal.core.machines import build_seed
from labctl.rehearsal.core.operations import ApiCall, ApiError, NoBody, Operation
from labctl.rehearsal.core.replies import HttpReply

TAGS_TYPE = "Microsoft.Resources/tags"
GROUP = "/subscriptions/<subscription>/resourceGroups/<group>"
MACHINES = f"{GROUP}/providers/{VMS}"
MACHINE = f"{MACHINES}/<name>"
TAGS = f"{MACHINE}/providers/{TAGS_TYPE}/default"
SCHEDULE = "/subscriptions/<subscription>/providers/Microsoft.ComputeSchedule/locations/<region>"
NO_CONTENT = 204
# Builds the reply to a call that has begun an operation: its status, operation and resource.
BuildReply = Callable[[int, str, Value | None], HttpReply]


class TimerOperation(Value, frozen=True, rename="camel"):
    operation_id: str
    op_type: str = "Deallocate"
    state: str = "Scheduled"


class TimerOutcome(Value, frozen=True, rename="camel"):
    resource_id: str
    operation: TimerOperation


class TimerListing(Value, frozen=True):
    description: str
    type: str
    location: str
    results: tuple[TimerOutcome, ...]


class VmHandlers:
    """The calls of virtualMachines and of Microsoft.ComputeSchedule."""

    def __init__(self, account: AzureAccount, build_reply: BuildReply, url: str) -> None:
        self._account = account
        self._fleet = account.fleet
        self._build_reply = build_reply
        self._url = url

    def list_operations(self) -> tuple[Operation[Any], ...]:
        name = "VirtualMachines"
        return (
            Operation(f"{name}_CreateOrUpdate", "PUT", MACHINE, self.create, ArmResource),
            Operation("Tags_UpdateAtScope", "PATCH", TAGS, self.change_tags, TagsChange),
            Operation(f"{name}_Get", "GET", MACHINE, self.get, NoBody),
            Operation(f"{name}_List", "GET", MACHINES, self.list_all, NoBody),
            Operation(f"{name}_Delete", "DELETE", MACHINE, self.delete, NoBody),
            Operation(f"{name}_Deallocate", "POST", f"{MACHINE}/deallocate", self.stop, NoBody),
            Operation(f"{name}_Start", "POST", f"{MACHINE}/start", self.start, NoBody),
            Operation(
                f"{name}_RetrieveBootDiagnosticsData",
                "POST",
                f"{MACHINE}/retrieveBootDiagnosticsData",
                self.tell_console,
                NoBody,
            ),
            Operation("console", "GET", "/console/<name>", self.read_console, NoBody),
            Operation(
                "ScheduledActions_VirtualMachinesSubmitDeallocate",
                "POST",
                f"{SCHEDULE}/virtualMachinesSubmitDeallocate",
                self.submit_timer,
                SubmitBody,
            ),
            Operation(
                "ScheduledActions_VirtualMachinesCancelOperations",
                "POST",
                f"{SCHEDULE}/virtualMachinesCancelOperations",
                self.cancel_timer,
                CancelBody,
            ),
        )

    def create(self, call: ApiCall[ArmResource]) -> HttpReply:
        """Create a machine; the same name finds the one that exists."""
        name, group = call.path["name"], call.path["group"]
        body = replace(call.body, name=name, type=VMS, id=self._account.make_id(group, VMS, name))
        require_valid_tags(body.tags)
        with self._fleet.lock:
            existing = self._account.find_machine(name)
            if existing is not None and not existing.failed:
                if existing.region != body.location:
                    raise ApiError(409, "InvalidResourceLocation", f"{name} exists elsewhere")
                if existing.state == "ending":
                    raise ApiError(409, "OperationNotAllowed", f"{name} is being deleted")
                return self._build_reply(200, self._account.begin(), self._describe(existing))
            self._account.failed.pop(name, None)
            machine, problem = self._check(name, body)
            if problem is None:
                self._add(machine, group)
            else:
                machine.failed = True
                self._account.failed[name] = machine
            begun = self._account.begin(problem)
        return self._build_reply(201, begun, self._describe(machine))

    def change_tags(self, call: ApiCall[TagsChange]) -> TagsChange:
        """Merge, replace or delete tags in one step, whatever else changes them meanwhile."""
        sent = call.body.properties.tags
        with self._fleet.lock:
            machine = self._account.require_machine(call.path["name"])
            before = machine.body.tags
            if call.body.operation == "Merge":
                tags = {**before, **sent}
            elif call.body.operation == "Delete":
                tags = {name: text for name, text in before.items() if name not in sent}
            else:
                tags = sent
            require_valid_tags(tags)
            self._account.set_tags(machine, tags)
        return TagsChange(
            id=f"{machine.body.id}/providers/{TAGS_TYPE}/default",
            name="default",
            type=TAGS_TYPE,
            properties=TagsPart(tags=tags),
        )

    def get(self, call: ApiCall[NoBody]) -> ArmResource:
        machine = self._account.require_machine(call.path["name"])
        return self._describe(machine, with_view=call.query.get("$expand") == "instanceView")

    def list_all(self, call: ApiCall[NoBody]) -> ArmListing:
        return ArmListing(value=tuple(map(self._describe, self._account.list_machines())))

    def delete(self, call: ApiCall[NoBody]) -> HttpReply:
        machine = self._account.find_machine(call.path["name"])
        if machine is None:
            return HttpReply(status=NO_CONTENT)
        if machine.failed:
            del self._account.failed[machine.id]
        else:
            self._fleet.terminate(machine)
        return self._build_reply(202, self._account.begin(), None)

    def stop(self, call: ApiCall[NoBody]) -> HttpReply:
        self._deallocate(self._account.require_machine(call.path["name"]))
        return self._build_reply(202, self._account.begin(), None)

    def start(self, call: ApiCall[NoBody]) -> HttpReply:
        machine = self._account.require_machine(call.path["name"])
        if machine.state == "stopping":
            raise ApiError(409, "OperationNotAllowed", f"{machine.id} is being deallocated")
        self._fleet.start(machine)
        return self._build_reply(202, self._account.begin(), None)

    def tell_console(self, call: ApiCall[NoBody]) -> HttpReply:
        name = self._account.require_machine(call.path["name"]).id
        url = f"{self._url}/console/{name}"
        return HttpReply(
            status=200,
            body=f'{{"serialConsoleLogBlobUri": "{url}"}}'.encode(),
            headers=(("Content-Type", "application/json"),),
        )

    def read_console(self, call: ApiCall[NoBody]) -> HttpReply:
        machine = self._account.require_machine(call.path["name"])
        return HttpReply(status=200, body=self._fleet.read_console(machine).encode())

    def submit_timer(self, call: ApiCall[SubmitBody]) -> TimerListing:
        scenario = self._account.scenario()
        if not scenario.registered:
            text = "The subscription is not registered to use namespace Microsoft.ComputeSchedule"
            raise ApiError(409, "MissingSubscriptionRegistration", text)
        [resource_id] = call.body.resources["ids"]
        machine = self._account.require_machine(last_segment(resource_id))
        at = datetime.fromisoformat(call.body.schedule["deadline"]).timestamp()
        operation = str(uuid.uuid4())
        self._account.timers.add(operation)
        span_s = max(0.0, at - time.time()) if scenario.timer is None else scenario.timer

        def fire() -> None:
            if operation in self._account.timers:
                self._account.timers.discard(operation)
                self._deallocate(machine, "timer")

        self._account.clock.run_after(span_s, fire)
        return _reply_to_timer("SubmitDeallocate", call.path["region"], resource_id, operation)

    def cancel_timer(self, call: ApiCall[CancelBody]) -> TimerListing:
        self._account.timers.difference_update(call.body.operation_ids)
        return _reply_to_timer("Cancel", call.path["region"], "", *call.body.operation_ids)

    def _deallocate(self, machine: AzureMachine, reason: str = "request") -> None:
        if machine.state == "stopped":
            # Its system had powered itself off, and it was billed until now.
            machine.reason = reason
        self._fleet.stop(machine, reason)

    def _check(self, name: str, body: ArmResource) -> tuple[AzureMachine, ArmProblem | None]:
        """Refuse what Azure refuses at once; return the machine, and why it will fail later."""
        size, region = body.properties["hardwareProfile"]["vmSize"], body.location
        is_spot = body.properties.get("priority") == "Spot"
        scenario = self._account.scenario()
        if region not in scenario.regions or size not in SIZES_BY_NAME:
            raise ApiError(400, "InvalidParameter", f"{size} in {region} is not valid")
        if self._account.is_closed(size):
            text = f"The requested VM size {size} is currently not available in {region}"
            raise ApiError(409, "SkuNotAvailable", text)
        machine = AzureMachine(
            id=name,
            type=size,
            region=region,
            seed=_make_seed(name, body),
            is_spot=is_spot,
            body=body,
        )
        if (NICS, machine.nic_name) not in self._account.resources:
            raise ApiError(400, "InvalidResourceReference", f"{machine.nic_name} does not exist")
        if quota := self._account.find_exceeded_quota(size, region, is_spot):
            text = f"Operation could not be completed as it results in exceeding approved {quota}"
            raise ApiError(409, "OperationNotAllowed", text)
        if self._fleet.has_capacity(size, region):
            return machine, None
        text = "Allocation failed. We do not have sufficient capacity for the requested VM size."
        return machine, ArmProblem(code="AllocationFailed", message=text)

    def _add(self, machine: AzureMachine, group: str) -> None:
        """Record the machine with its disk, and boot it."""
        disk = machine.body.properties["storageProfile"]["osDisk"]
        self._account.resources[DISKS, machine.disk_name] = ArmResource(
            location=machine.region,
            name=machine.disk_name,
            type=DISKS,
            id=self._account.make_id(group, DISKS, machine.disk_name),
            tags=machine.body.tags,
            sku={"name": disk["managedDisk"]["storageAccountType"]},
            managed_by=machine.body.id,
            properties={
                "diskSizeGB": disk["diskSizeGB"],
                "timeCreated": make_arm_time(machine.created_at),
                "creationData": {"createOption": "FromImage"},
            },
        )
        machine.rules = self._account.build_rules(machine)
        self._fleet.add(machine)

    def _describe(self, machine: AzureMachine, *, with_view: bool = False) -> ArmResource:
        properties = {
            **machine.body.properties,
            "provisioningState": _get_provisioning_state(machine),
            "timeCreated": make_arm_time(machine.created_at),
            "vmId": str(uuid.uuid5(uuid.NAMESPACE_URL, machine.id)),
        }
        # Azure never shows the first boot's script again.
        properties["osProfile"] = {
            name: value for name, value in properties["osProfile"].items() if name != "customData"
        }
        if with_view:
            codes = [f"ProvisioningState/{properties['provisioningState'].lower()}"]
            codes += [f"PowerState/{power}"] if (power := _get_power_state(machine)) else []
            properties["instanceView"] = {"statuses": [{"code": code} for code in codes]}
        return replace(machine.body, properties=properties)


def _get_provisioning_state(machine: AzureMachine) -> str:
    if machine.failed:
        return "Failed"
    states = {"ending": "Deleting", "pending": "Creating", "stopping": "Updating"}
    return states.get(machine.state, "Succeeded")


def _get_power_state(machine: AzureMachine) -> str:
    """Return Azure's word: a machine that powered itself off is stopped, but not deallocated."""
    if machine.failed:
        return ""
    off = "stopped" if machine.reason == "power-off" else "deallocated"
    words = {
        "pending": "starting",
        "stopping": "deallocating",
        "stopped": off,
        "ending": "stopping",
    }
    return words.get(machine.state, "running")


def _make_seed(name: str, body: ArmResource) -> dict[str, str]:
    data = body.properties["osProfile"].get("customData", "")
    return build_seed(name, base64.b64decode(data).decode() or "#cloud-config\n")


def _reply_to_timer(kind: str, region: str, resource_id: str, *operations: str) -> TimerListing:
    results = tuple(
        TimerOutcome(resource_id=resource_id, operation=TimerOperation(operation_id=one))
        for one in operations
    )
    return TimerListing(
        description=f"{kind} request", type="VirtualMachines", location=region, results=results
    )
