"""What labctl reads of Azure's replies, as frozen values with Azure's own names."""

from __future__ import annotations

from datetime import datetime

import msgspec

from labctl.model import Value
from labctl.providers.azure.errors import ArmErrorBody


class ArmPage(Value, frozen=True, rename="camel"):
    """A page of a list; `next_link` is the URL of the next one."""

    value: tuple[msgspec.Raw, ...] = ()
    next_link: str | None = None


class OperationReply(Value, frozen=True):
    """The state of a long-running operation."""

    status: str = ""
    error: ArmErrorBody | None = None


class ResourceRef(Value, frozen=True):
    id: str = ""


class VmStatusReply(Value, frozen=True):
    code: str = ""


class InstanceViewReply(Value, frozen=True):
    statuses: tuple[VmStatusReply, ...] = ()


class HardwareReply(Value, frozen=True, rename="camel"):
    vm_size: str = ""


class VmProperties(Value, frozen=True, rename="camel"):
    provisioning_state: str = ""
    time_created: str = ""
    priority: str = ""
    hardware_profile: HardwareReply = HardwareReply()
    instance_view: InstanceViewReply = InstanceViewReply()


class VmReply(Value, frozen=True):
    """A virtual machine. `instance_view` of its properties is there only where it was asked for."""

    name: str
    id: str = ""
    location: str = ""
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    properties: VmProperties = VmProperties()


class AddressProperties(Value, frozen=True, rename="camel"):
    ip_address: str = ""
    ip_configuration: ResourceRef | None = None


class AddressReply(Value, frozen=True):
    """A public IP address."""

    name: str
    location: str = ""
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    properties: AddressProperties = AddressProperties()


class DiskSku(Value, frozen=True):
    name: str = ""


class DiskProperties(Value, frozen=True, rename="camel"):
    disk_size_gb: int = msgspec.field(default=0, name="diskSizeGB")
    time_created: str = ""


class DiskReply(Value, frozen=True, rename="camel"):
    """A managed disk; `managed_by` is the id of its machine."""

    name: str
    location: str = ""
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    sku: DiskSku = DiskSku()
    managed_by: str = ""
    properties: DiskProperties = DiskProperties()


class RuleReplyProperties(Value, frozen=True, rename="camel"):
    priority: int = 0
    source_address_prefixes: tuple[str, ...] = ()


class RuleReply(Value, frozen=True):
    name: str
    properties: RuleReplyProperties = RuleReplyProperties()


class NsgReplyProperties(Value, frozen=True, rename="camel"):
    security_rules: tuple[RuleReply, ...] = ()


class NsgReply(Value, frozen=True):
    """A network security group."""

    name: str
    id: str = ""
    location: str = ""
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    properties: NsgReplyProperties = NsgReplyProperties()


class NamedReply(Value, frozen=True):
    """A resource of which only the name, the place and the tags matter."""

    name: str
    id: str = ""
    location: str = ""
    tags: dict[str, str] = msgspec.field(default_factory=dict)


class UsageName(Value, frozen=True):
    value: str = ""


class UsageReply(Value, frozen=True, rename="camel"):
    """A quota of one region, in vCPUs."""

    name: UsageName = UsageName()
    current_value: float = 0
    limit: float = 0


class SkuRestriction(Value, frozen=True, rename="camel"):
    type: str = ""
    reason_code: str = ""


class SkuReply(Value, frozen=True, rename="camel"):
    """A size, as the subscription may use it in one region."""

    name: str = ""
    resource_type: str = ""
    family: str = ""
    restrictions: tuple[SkuRestriction, ...] = ()


class SubscriptionReply(Value, frozen=True, rename="camel"):
    display_name: str = ""
    state: str = ""


class PermissionReply(Value, frozen=True, rename="camel"):
    actions: tuple[str, ...] = ()
    not_actions: tuple[str, ...] = ()


class ResourceProviderReply(Value, frozen=True, rename="camel"):
    registration_state: str = ""


class ConsoleReply(Value, frozen=True, rename="camel"):
    serial_console_log_blob_uri: str = ""


def parse_arm_time(text: str) -> float:
    """Return Unix seconds of a time such as 2025-01-02T03:04:05.67+00:00; 0.0 if it is not one."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
