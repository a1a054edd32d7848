"""The resources of a simulated project, with the fields of Google's API that labctl uses."""

from __future__ import annotations

import base64
import hashlib
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from labctl.model import Value
from labctl.rehearsal.core.fleet import CloudInstance


class Items(Value, frozen=True, rename="camel", omit_defaults=True):
    key: str = ""
    value: str = ""


class Metadata(Value, frozen=True, rename="camel", omit_defaults=True):
    fingerprint: str = ""
    items: tuple[Items, ...] = ()


class NetworkTags(Value, frozen=True, rename="camel", omit_defaults=True):
    items: tuple[str, ...] = ()


class DiskParameters(Value, frozen=True, rename="camel", omit_defaults=True):
    source_image: str = ""
    disk_size_gb: str = "10"
    disk_type: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class DiskUse(Value, frozen=True, rename="camel", omit_defaults=True):
    """A disk of an instance."""

    source: str = ""
    device_name: str = ""
    boot: bool = False
    auto_delete: bool = False
    initialize_params: DiskParameters | None = None


class NatConfig(Value, frozen=True, rename="camel", omit_defaults=True):
    name: str = ""
    type: str = ""
    nat_ip: str = msgspec.field(default="", name="natIP")


class Interface(Value, frozen=True, rename="camel", omit_defaults=True):
    network: str = ""
    subnetwork: str = ""
    access_configs: tuple[NatConfig, ...] = ()


class RunDuration(Value, frozen=True, rename="camel", omit_defaults=True):
    seconds: str = "0"


class SchedulingResource(Value, frozen=True, rename="camel", omit_defaults=True):
    provisioning_model: str = ""
    instance_termination_action: str = ""
    on_host_maintenance: str = ""
    automatic_restart: bool = True
    max_run_duration: RunDuration | None = None


class TimerStatus(Value, frozen=True, rename="camel", omit_defaults=True):
    termination_timestamp: str = ""


class StatusResource(Value, frozen=True, rename="camel", omit_defaults=True):
    scheduling: TimerStatus = TimerStatus()


class Accelerator(Value, frozen=True, rename="camel", omit_defaults=True):
    accelerator_type: str = ""
    accelerator_count: int = 0


class InstanceResource(Value, frozen=True, rename="camel", omit_defaults=True):
    name: str = ""
    id: str = ""
    zone: str = ""
    machine_type: str = ""
    status: str = ""
    creation_timestamp: str = ""
    self_link: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    tags: NetworkTags = NetworkTags()
    metadata: Metadata = Metadata()
    disks: tuple[DiskUse, ...] = ()
    network_interfaces: tuple[Interface, ...] = ()
    scheduling: SchedulingResource = SchedulingResource()
    guest_accelerators: tuple[Accelerator, ...] = ()
    resource_status: StatusResource = StatusResource()


class DiskResource(Value, frozen=True, rename="camel", omit_defaults=True):
    name: str = ""
    zone: str = ""
    size_gb: str = "10"
    type: str = ""
    status: str = "READY"
    creation_timestamp: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    label_fingerprint: str = ""
    users: tuple[str, ...] = ()


class Traffic(Value, frozen=True, rename="camel", omit_defaults=True):
    """One protocol of a firewall rule; "all" is every one."""

    ip_protocol: str = msgspec.field(default="", name="IPProtocol")
    ports: tuple[str, ...] = ()


class FirewallResource(Value, frozen=True, rename="camel", omit_defaults=True):
    name: str = ""
    description: str = ""
    network: str = ""
    creation_timestamp: str = ""
    direction: str = ""
    priority: int = 1000
    allowed: tuple[Traffic, ...] = ()
    denied: tuple[Traffic, ...] = ()
    source_ranges: tuple[str, ...] = ()
    source_tags: tuple[str, ...] = ()
    target_tags: tuple[str, ...] = ()


class LabelChange(Value, frozen=True, rename="camel", omit_defaults=True):
    """The body of disks.setLabels."""

    labels: dict[str, str] = msgspec.field(default_factory=dict)
    label_fingerprint: str = ""


class QuotaInfo(Value, frozen=True, rename="camel", omit_defaults=True):
    metric_name: str = ""
    limit_name: str = ""
    limit: float = 0.0
    dimensions: dict[str, str] = msgspec.field(default_factory=dict)


class FaultDetails(Value, frozen=True, rename="camel", omit_defaults=True):
    quota_info: QuotaInfo | None = None


class OperationFault(Value, frozen=True, rename="camel", omit_defaults=True):
    code: str = ""
    message: str = ""
    error_details: tuple[FaultDetails, ...] = ()


class OperationFaults(Value, frozen=True, rename="camel", omit_defaults=True):
    errors: tuple[OperationFault, ...] = ()


class OperationResource(Value, frozen=True, rename="camel", omit_defaults=True):
    name: str = ""
    status: str = "RUNNING"
    operation_type: str = ""
    target_link: str = ""
    insert_time: str = ""
    zone: str = ""
    error: OperationFaults | None = None


@dataclass
class GceMachine(CloudInstance):
    """An instance of the rehearsal, with what its API shows."""

    zone: str = ""
    resource: InstanceResource = field(default_factory=InstanceResource)
    # when the timer ends it (Unix seconds), and which start it counts from
    ends_at: float | None = None
    starts: int = 0


def make_fingerprint(value: Value | dict[str, str]) -> str:
    """Return a fingerprint of content, which changes with it."""
    digest = hashlib.sha256(msgspec.json.encode(value)).digest()
    return base64.urlsafe_b64encode(digest[:9]).decode()


def make_timestamp(at: float | None = None) -> str:
    moment = datetime.fromtimestamp(time.time() if at is None else at, UTC)
    return moment.isoformat(timespec="milliseconds")
