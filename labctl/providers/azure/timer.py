"""A timer at Azure that deallocates a server, even if it hangs: Compute Schedule's own.

learn.microsoft.com/azure/virtual-machines/scheduled-actions: an operation that is submitted now for
a time in the future. It cannot be moved, so a new one is submitted before the old one is canceled.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from labctl.decoding import decode_json
from labctl.errors import LabError, ProviderError
from labctl.model import Value
from labctl.providers.azure import machines, permissions, tags
from labctl.providers.azure.arm import RESOURCES, Arm
from labctl.providers.azure.bodies import (
    CancelTimerBody,
    SubmitTimerBody,
    TimerResources,
    TimerSchedule,
)
from labctl.providers.azure.replies import ResourceProviderReply, VmReply

NAMESPACE = "Microsoft.ComputeSchedule"
VERSION = "2025-05-01"
REGISTERED = "Registered"


class TimerDetails(Value, frozen=True, rename="camel"):
    operation_id: str = ""


class TimerResult(Value, frozen=True, rename="camel"):
    """The result for one machine: an operation, or an error."""

    error_code: str | None = None
    error_details: str | None = None
    operation: TimerDetails | None = None


class TimerReply(Value, frozen=True):
    results: tuple[TimerResult, ...] = ()


def explain_missing_setup(arm: Arm) -> str:
    """Return what must be done before a timer can be set; "" if nothing."""
    path = arm.subscription_path(f"/providers/{NAMESPACE}")
    try:
        found = arm.find(ResourceProviderReply, path, RESOURCES, permissions.READ_PROVIDER)
    except LabError as error:
        return f"{NAMESPACE} could not be checked: {error.what}"
    if found is not None and found.registration_state == REGISTERED:
        return ""
    command = f"az provider register --namespace {NAMESPACE}"
    return f"the subscription has not registered {NAMESPACE}: {command}"


def set_timer(arm: Arm, server_id: str, at: float) -> None:
    """Have Azure deallocate a server at `at` (Unix seconds), and at no other time."""
    vm = machines.require_machine(arm, server_id)
    before = tags.parse_timer(vm.tags)
    operation = _submit(arm, vm, at)
    machines.merge_tags(arm, vm, {tags.TIMER: f"{operation}@{round(at)}"})
    if before is not None and before.operation != operation:
        _cancel(arm, vm, before.operation)


def _submit(arm: Arm, vm: VmReply, at: float) -> str:
    """Submit the operation; return its id."""
    deadline = datetime.fromtimestamp(round(at), UTC).isoformat().replace("+00:00", "Z")
    body = SubmitTimerBody(
        schedule=TimerSchedule(deadline=deadline),
        resources=TimerResources(ids=(arm.resource_path(machines.VMS, vm.name),)),
        correlationid=str(uuid.uuid4()),
    )
    path = _make_path(arm, vm, "virtualMachinesSubmitDeallocate")
    begun = arm.begin("POST", path, VERSION, permissions.SUBMIT_TIMER, body)
    for result in decode_json(begun.content, TimerReply).results:
        if result.operation is not None and not result.error_code:
            return result.operation.operation_id
        raise ProviderError(
            "Azure refused the timer",
            why=f"{result.error_details} ({result.error_code})",
            hint="labctl doctor --provider azure",
        )
    raise ProviderError(
        "Azure refused the timer",
        why="its reply names no operation",
        hint="labctl doctor --provider azure",
    )


def _cancel(arm: Arm, vm: VmReply, operation: str) -> None:
    """Cancel an earlier operation; Azure ignores one that has run already."""
    body = CancelTimerBody(operation_ids=(operation,), correlationid=str(uuid.uuid4()))
    path = _make_path(arm, vm, "virtualMachinesCancelOperations")
    arm.begin("POST", path, VERSION, permissions.CANCEL_TIMER, body)


def _make_path(arm: Arm, vm: VmReply, call: str) -> str:
    return arm.subscription_path(f"/providers/{NAMESPACE}/locations/{vm.location}/{call}")
