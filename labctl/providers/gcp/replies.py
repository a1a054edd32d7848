"""What labctl reads of Compute Engine's replies, as frozen values with Google's own names."""

from __future__ import annotations

from datetime import datetime
from typing import Any, TypeVar

import msgspec

from labctl.decoding import decode_json
from labctl.model import Value

Reply = TypeVar("Reply", bound=Value)


class AccessConfig(Value, frozen=True, rename="camel"):
    nat_ip: str = msgspec.field(default="", name="natIP")


class NetworkInterface(Value, frozen=True, rename="camel"):
    access_configs: tuple[AccessConfig, ...] = ()


class AttachedDisk(Value, frozen=True, rename="camel"):
    """`source` is the URL of the disk, `device_name` its name below /dev/disk/by-id/google-."""

    source: str = ""
    device_name: str = ""
    boot: bool = False
    auto_delete: bool = False


class MetadataItem(Value, frozen=True, rename="camel"):
    key: str
    value: str = ""


class InstanceMetadata(Value, frozen=True, rename="camel"):
    """Its `fingerprint` is that of the content: a change with an old one is refused."""

    fingerprint: str = ""
    items: tuple[MetadataItem, ...] = ()


class SchedulingStatus(Value, frozen=True, rename="camel"):
    termination_timestamp: str = ""


class ResourceStatus(Value, frozen=True, rename="camel"):
    scheduling: SchedulingStatus = SchedulingStatus()


class InstanceScheduling(Value, frozen=True, rename="camel"):
    provisioning_model: str = ""


class GceInstance(Value, frozen=True, rename="camel"):
    name: str
    status: str = ""
    zone: str = ""
    machine_type: str = ""
    creation_timestamp: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    metadata: InstanceMetadata = InstanceMetadata()
    network_interfaces: tuple[NetworkInterface, ...] = ()
    disks: tuple[AttachedDisk, ...] = ()
    scheduling: InstanceScheduling = InstanceScheduling()
    resource_status: ResourceStatus = ResourceStatus()


class GceDisk(Value, frozen=True, rename="camel"):
    """`users` are the URLs of the instances that it is attached to."""

    name: str
    zone: str = ""
    size_gb: str = "0"
    type: str = ""
    status: str = ""
    creation_timestamp: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    label_fingerprint: str = ""
    users: tuple[str, ...] = ()


class GceAddress(Value, frozen=True, rename="camel"):
    name: str
    region: str = ""
    address: str = ""
    creation_timestamp: str = ""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    users: tuple[str, ...] = ()


class FirewallRule(Value, frozen=True, rename="camel"):
    name: str
    description: str = ""
    creation_timestamp: str = ""
    source_ranges: tuple[str, ...] = ()


class GceImage(Value, frozen=True, rename="camel"):
    name: str
    self_link: str
    disk_size_gb: str = "0"


class QuotaExceededInfo(Value, frozen=True, rename="camel"):
    metric_name: str = ""
    limit_name: str = ""
    limit: float = 0.0
    dimensions: dict[str, str] = msgspec.field(default_factory=dict)


class ErrorDetails(Value, frozen=True, rename="camel"):
    quota_info: QuotaExceededInfo | None = None


class OperationProblem(Value, frozen=True, rename="camel"):
    code: str = ""
    message: str = ""
    error_details: tuple[ErrorDetails, ...] = ()


class OperationError(Value, frozen=True, rename="camel"):
    errors: tuple[OperationProblem, ...] = ()


class GceOperation(Value, frozen=True, rename="camel"):
    name: str
    status: str = ""
    operation_type: str = ""
    target_link: str = ""
    insert_time: str = ""
    error: OperationError = OperationError()


class GceQuota(Value, frozen=True, rename="camel"):
    metric: str = ""
    limit: float = 0.0
    usage: float = 0.0


class GceRegion(Value, frozen=True, rename="camel"):
    name: str
    quotas: tuple[GceQuota, ...] = ()


class GceProject(Value, frozen=True, rename="camel"):
    name: str = ""
    quotas: tuple[GceQuota, ...] = ()


def decode_reply(message: Any, kind: type[Reply]) -> Reply:
    """Decode a message of Google's SDK."""
    text = type(message).to_json(
        message,
        indent=None,
        use_integers_for_enums=False,
        always_print_fields_with_no_presence=False,
    )
    return decode_json(text, kind)


def last_part(url: str) -> str:
    """Return the last part of a URL, which is the name of what it refers to."""
    return url.rpartition("/")[2]


def parse_timestamp(text: str) -> float:
    """Return Unix seconds of a time such as 2025-01-02T03:04:05.678-07:00; 0.0 if it is not one."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
