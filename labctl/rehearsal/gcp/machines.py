"""Handlers of instances."""

from __future__ import annotations

import time
from typing import Any

from msgspec.structs import replace

from labctl.model import Value
from labctl.rehearsal.core.machines import build_seed
from labctl.rehearsal.core.operations import ApiCall, ApiError, NoBody, Operation
from labctl.rehearsal.gcp import hardware
from labctl.rehearsal.gcp.limits import find_exceeded_quota
from labctl.rehearsal.gcp.project import Project, absent, make_disk_id, matches_filter
from labctl.rehearsal.gcp.resources import (
    DiskResource,
    DiskUse,
    GceMachine,
    InstanceResource,
    Metadata,
    NatConfig,
    OperationFault,
    OperationResource,
    StatusResource,
    TimerStatus,
    make_fingerprint,
    make_timestamp,
)

INSTANCES = "/compute/v1/projects/<project>/zones/<zone>/instances"
INSTANCE = f"{INSTANCES}/<instance>"
BY_ID = "/dev/disk/by-id/google-"
# A stopped machine: Google's word is the same for one that a user stopped and one that ended.
STATES = {
    "pending": "STAGING",
    "running": "RUNNING",
    "stopping": "STOPPING",
    "stopped": "TERMINATED",
    "ending": "STOPPING",
    "ended": "STOPPING",
}


class InstanceScope(Value, frozen=True, rename="camel"):
    instances: tuple[InstanceResource, ...] = ()


class AggregatedInstances(Value, frozen=True, rename="camel"):
    items: dict[str, InstanceScope]


class SerialPortOutput(Value, frozen=True, rename="camel"):
    contents: str


class MachineHandlers:
    """The calls of `instances`."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._fleet = project.fleet

    def list_operations(self) -> tuple[Operation[Any], ...]:
        return (
            Operation("instances.insert", "POST", INSTANCES, self.insert, InstanceResource),
            Operation("instances.get", "GET", INSTANCE, self.get, NoBody),
            Operation("instances.delete", "DELETE", INSTANCE, self.delete, NoBody),
            Operation("instances.stop", "POST", f"{INSTANCE}/stop", self.stop, NoBody),
            Operation("instances.start", "POST", f"{INSTANCE}/start", self.start, NoBody),
            Operation(
                "instances.setMetadata",
                "POST",
                f"{INSTANCE}/setMetadata",
                self.set_metadata,
                Metadata,
            ),
            Operation(
                "instances.setDiskAutoDelete",
                "POST",
                f"{INSTANCE}/setDiskAutoDelete",
                self.set_auto_delete,
                NoBody,
            ),
            Operation(
                "instances.attachDisk", "POST", f"{INSTANCE}/attachDisk", self.attach_disk, DiskUse
            ),
            Operation(
                "instances.getSerialPortOutput",
                "GET",
                f"{INSTANCE}/serialPort",
                self.read_console,
                NoBody,
            ),
            Operation(
                "instances.aggregatedList",
                "GET",
                "/compute/v1/projects/<project>/aggregated/instances",
                self.list_all,
                NoBody,
            ),
        )

    def insert(self, call: ApiCall[InstanceResource]) -> OperationResource:
        """Create an instance; the same request id returns the operation of the first request."""
        zone, body = call.path["zone"], call.body
        request_id = (zone, call.query.get("requestId", ""))
        with self._fleet.lock:
            if request_id[1] and request_id in self._project.by_request:
                return self._project.read_operation(self._project.by_request[request_id].name)
            _require_known(self._project, zone, body)
            if any(one.id == body.name for one in self._fleet.list_all() if one.state != "ended"):
                raise ApiError(409, "alreadyExists", f"The resource '{body.name}' already exists")
            problem = self._find_problem(zone, body)
            target = f"zones/{zone}/instances/{body.name}"
            if problem is None:
                self._add(zone, body)
            begun = self._project.begin("insert", target, zone, problem)
            self._project.by_request[request_id] = begun
        return begun

    def get(self, call: ApiCall[NoBody]) -> InstanceResource:
        return self._describe(self._find(call))

    def list_all(self, call: ApiCall[NoBody]) -> AggregatedInstances:
        condition = call.query.get("filter", "")
        items: dict[str, list[InstanceResource]] = {}
        for machine in self._fleet.list_shown():
            resource = self._describe(machine)
            if machine.state != "ended" and matches_filter(resource, condition):
                items.setdefault(f"zones/{machine.zone}", []).append(resource)
        return AggregatedInstances(
            items={scope: InstanceScope(instances=tuple(some)) for scope, some in items.items()}
        )

    def delete(self, call: ApiCall[NoBody]) -> OperationResource:
        machine = self._find(call)
        machine.ends_at = None
        self._fleet.terminate(machine)
        return self._begin("delete", machine)

    def stop(self, call: ApiCall[NoBody]) -> OperationResource:
        machine = self._find(call)
        machine.ends_at = None
        self._fleet.stop(machine)
        return self._begin("stop", machine)

    def start(self, call: ApiCall[NoBody]) -> OperationResource:
        machine = self._find(call)
        if machine.state == "stopping":
            raise ApiError(400, "resourceNotReady", f"The resource '{machine.id}' is not ready")
        self._fleet.start(machine)
        self._arm_timer(machine)
        return self._begin("start", machine)

    def set_metadata(self, call: ApiCall[Metadata]) -> OperationResource:
        with self._fleet.lock:
            machine = self._find(call)
            if call.body.fingerprint != make_fingerprint(_without_print(machine.resource.metadata)):
                raise ApiError(412, "conditionNotMet", "Supplied fingerprint does not match")
            changed = _without_print(call.body)
            machine.resource = replace(machine.resource, metadata=changed)
        return self._begin("setMetadata", machine)

    def set_auto_delete(self, call: ApiCall[NoBody]) -> OperationResource:
        with self._fleet.lock:
            machine = self._find(call)
            wanted, device = call.query["autoDelete"] == "true", call.query["deviceName"]
            disks = tuple(
                replace(use, auto_delete=wanted) if use.device_name == device else use
                for use in machine.resource.disks
            )
            machine.resource = replace(machine.resource, disks=disks)
        return self._begin("setDiskAutoDelete", machine)

    def attach_disk(self, call: ApiCall[DiskUse]) -> OperationResource:
        with self._fleet.lock:
            machine = self._find(call)
            key = (machine.zone, call.body.source.rpartition("/")[2])
            disk = self._project.find_disk(*key)
            if disk.users:
                raise ApiError(400, "resourceInUseByAnotherResource", f"{disk.name} is in use")
            use = replace(call.body, source=self._project.link(f"zones/{key[0]}/disks/{key[1]}"))
            machine.resource = replace(machine.resource, disks=(*machine.resource.disks, use))
            self._project.disks[key] = replace(disk, users=(self._link(machine),))
        device = f"{BY_ID}{call.body.device_name}"
        self._fleet.attach_disk(machine, make_disk_id(*key), device)
        return self._begin("attachDisk", machine)

    def read_console(self, call: ApiCall[NoBody]) -> SerialPortOutput:
        return SerialPortOutput(contents=self._fleet.read_console(self._find(call)))

    def _find(self, call: ApiCall[Any]) -> GceMachine:
        return self._project.find_machine(call.path["zone"], call.path["instance"])

    def _link(self, machine: GceMachine) -> str:
        return self._project.link(f"zones/{machine.zone}/instances/{machine.id}")

    def _begin(self, kind: str, machine: GceMachine) -> OperationResource:
        target = f"zones/{machine.zone}/instances/{machine.id}"
        return self._project.begin(kind, target, machine.zone)

    def _find_problem(self, zone: str, body: InstanceResource) -> OperationFault | None:
        """Return why the request will fail after it was accepted."""
        machine_type = body.machine_type.rpartition("/")[2]
        is_spot = body.scheduling.provisioning_model == "SPOT"
        if problem := find_exceeded_quota(
            self._project.scenario(), self._fleet, machine_type, zone, is_spot
        ):
            return problem
        if self._fleet.has_capacity(machine_type, zone):
            return None
        what = f"The zone '{zone}' does not have enough resources available"
        return OperationFault(code="ZONE_RESOURCE_POOL_EXHAUSTED", message=what)

    def _add(self, zone: str, body: InstanceResource) -> None:
        """Record the instance with its disks, and boot it."""
        project = self._project
        items = {item.key: item.value for item in body.metadata.items}
        uses = []
        for use in body.disks:
            wanted = use.initialize_params
            assert wanted is not None
            project.disks[zone, body.name] = DiskResource(
                name=body.name,
                zone=project.link(f"zones/{zone}"),
                size_gb=wanted.disk_size_gb,
                type=project.link(wanted.disk_type),
                creation_timestamp=make_timestamp(),
                labels=wanted.labels,
                users=(project.link(f"zones/{zone}/instances/{body.name}"),),
            )
            source = project.link(f"zones/{zone}/disks/{body.name}")
            uses.append(replace(use, source=source, initialize_params=None))
        machine = GceMachine(
            id=body.name,
            type=body.machine_type.rpartition("/")[2],
            region=zone,
            zone=zone,
            seed=build_seed(body.name, items.get("user-data", "#cloud-config\n")),
            is_spot=body.scheduling.provisioning_model == "SPOT",
            resource=replace(body, disks=tuple(uses), metadata=_without_print(body.metadata)),
        )
        machine.rules = project.build_rules(machine)
        self._fleet.add(machine)
        self._arm_timer(machine)

    def _arm_timer(self, machine: GceMachine) -> None:
        """Have the machine end at its longest run time, which counts from its start."""
        duration = machine.resource.scheduling.max_run_duration
        if duration is None:
            return
        scenario = self._project.scenario()
        asked_s = float(duration.seconds)
        span_s = asked_s if scenario.run_limit is None else scenario.run_limit
        machine.ends_at = time.time() + span_s
        machine.starts += 1
        start = machine.starts

        def end() -> None:
            if machine.ends_at is None or machine.starts != start:
                return
            if machine.resource.scheduling.instance_termination_action == "DELETE":
                self._fleet.terminate(machine, "timer")
            else:
                self._fleet.stop(machine, "timer")

        self._project.clock.run_after(span_s, end)

    def _describe(self, machine: GceMachine) -> InstanceResource:
        resource, project = machine.resource, self._project
        address = machine.address if machine.state == "running" else ""
        nics = tuple(
            replace(
                nic, access_configs=tuple(_with_address(one, address) for one in nic.access_configs)
            )
            for nic in resource.network_interfaces
        )
        metadata = resource.metadata
        ends = make_timestamp(machine.ends_at) if machine.ends_at is not None else ""
        return replace(
            resource,
            zone=project.link(f"zones/{machine.zone}"),
            machine_type=project.link(f"zones/{machine.zone}/machineTypes/{machine.type}"),
            status=STATES[machine.state],
            creation_timestamp=make_timestamp(machine.created_at),
            self_link=self._link(machine),
            network_interfaces=nics,
            metadata=replace(metadata, fingerprint=make_fingerprint(metadata)),
            resource_status=StatusResource(scheduling=TimerStatus(termination_timestamp=ends)),
        )


def _require_known(project: Project, zone: str, body: InstanceResource) -> None:
    """Refuse what Google refuses before it begins an operation."""
    if zone not in project.list_zones():
        raise absent(f"zones/{zone}")
    machine_type = hardware.BY_NAME.get(body.machine_type.rpartition("/")[2])
    if machine_type is None:
        raise ApiError(400, "invalid", f"Invalid machine type: {body.machine_type}")
    given = tuple(
        (one.accelerator_type.rpartition("/")[2], one.accelerator_count)
        for one in body.guest_accelerators
    )
    wanted = ((machine_type.accelerator, machine_type.gpus),) if machine_type.accelerator else ()
    if given != wanted:
        raise ApiError(400, "invalid", f"Invalid value for guestAccelerators: {given}")
    if machine_type.gpus and body.scheduling.on_host_maintenance != "TERMINATE":
        text = "Instances with guest accelerators do not support live migration."
        raise ApiError(400, "invalid", text)
    if body.scheduling.max_run_duration and not body.scheduling.instance_termination_action:
        raise ApiError(400, "invalid", "instanceTerminationAction must be specified")


def _with_address(config: NatConfig, address: str) -> NatConfig:
    return replace(config, nat_ip=address)


def _without_print(metadata: Metadata) -> Metadata:
    return replace(metadata, fingerprint="")
