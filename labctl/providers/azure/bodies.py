"""What labctl sends to Azure, as frozen values with Azure's own names."""

from __future__ import annotations

import msgspec

from labctl.model import Value
from labctl.providers.azure.replies import ResourceRef


class GroupBody(Value, frozen=True):
    location: str
    tags: dict[str, str]


class SkuBody(Value, frozen=True):
    name: str


class DeleteOption(Value, frozen=True, rename="camel"):
    """What happens to a part of a machine with the machine."""

    delete_option: str = "Delete"


class AddressBodyProperties(Value, frozen=True, rename="camel"):
    public_ip_allocation_method: str = msgspec.field(
        default="Static", name="publicIPAllocationMethod"
    )


class AddressBody(Value, frozen=True):
    location: str
    tags: dict[str, str]
    sku: SkuBody
    properties: AddressBodyProperties = AddressBodyProperties()


class SubnetBodyProperties(Value, frozen=True, rename="camel"):
    address_prefix: str


class SubnetBody(Value, frozen=True):
    name: str
    properties: SubnetBodyProperties


class AddressSpace(Value, frozen=True, rename="camel"):
    address_prefixes: tuple[str, ...]


class NetworkBodyProperties(Value, frozen=True, rename="camel"):
    address_space: AddressSpace
    subnets: tuple[SubnetBody, ...]


class NetworkBody(Value, frozen=True):
    location: str
    tags: dict[str, str]
    properties: NetworkBodyProperties


class RuleProperties(Value, frozen=True, rename="camel", omit_defaults=True):
    """A rule of a network security group: a single prefix is a service tag or `*`."""

    protocol: str
    access: str
    direction: str
    priority: int
    destination_port_range: str
    source_port_range: str
    destination_address_prefix: str
    source_address_prefix: str = ""
    source_address_prefixes: tuple[str, ...] = ()


class RuleBody(Value, frozen=True):
    name: str
    properties: RuleProperties


class NsgProperties(Value, frozen=True, rename="camel"):
    security_rules: tuple[RuleBody, ...]


class NsgBody(Value, frozen=True):
    location: str
    tags: dict[str, str]
    properties: NsgProperties


class IpRefBody(Value, frozen=True):
    id: str
    properties: DeleteOption = DeleteOption()


class IpConfigProperties(Value, frozen=True, rename="camel"):
    subnet: ResourceRef
    public_ip_address: IpRefBody = msgspec.field(name="publicIPAddress")


class IpConfigBody(Value, frozen=True):
    name: str
    properties: IpConfigProperties


class NicProperties(Value, frozen=True, rename="camel"):
    ip_configurations: tuple[IpConfigBody, ...]
    network_security_group: ResourceRef


class NicBody(Value, frozen=True):
    location: str
    tags: dict[str, str]
    properties: NicProperties


class HardwareBody(Value, frozen=True, rename="camel"):
    vm_size: str


class ImageBody(Value, frozen=True):
    publisher: str
    offer: str
    sku: str
    version: str


class ManagedDiskBody(Value, frozen=True, rename="camel"):
    storage_account_type: str


class OsDiskBody(Value, frozen=True, rename="camel"):
    name: str
    disk_size_gb: int = msgspec.field(name="diskSizeGB")
    managed_disk: ManagedDiskBody
    create_option: str = "FromImage"
    delete_option: str = "Delete"


class StorageBody(Value, frozen=True, rename="camel"):
    image_reference: ImageBody
    os_disk: OsDiskBody


class SshKeyBody(Value, frozen=True, rename="camel"):
    path: str
    key_data: str


class SshBody(Value, frozen=True, rename="camel"):
    public_keys: tuple[SshKeyBody, ...]


class LinuxBody(Value, frozen=True, rename="camel"):
    ssh: SshBody
    disable_password_authentication: bool = True


class OsBody(Value, frozen=True, rename="camel", omit_defaults=True):
    """`custom_data` is cloud-init's user data in base64."""

    computer_name: str
    admin_username: str
    linux_configuration: LinuxBody
    custom_data: str = ""


class PrimaryNic(Value, frozen=True, rename="camel"):
    primary: bool = True
    delete_option: str = "Delete"


class NicRefBody(Value, frozen=True):
    id: str
    properties: PrimaryNic = PrimaryNic()


class VmNetworkBody(Value, frozen=True, rename="camel"):
    network_interfaces: tuple[NicRefBody, ...]


class BillingBody(Value, frozen=True, rename="camel"):
    """The highest price of a spot machine in USD an hour; -1 is the price without spot."""

    max_price: float


class BootDiagnostics(Value, frozen=True):
    enabled: bool = True


class DiagnosticsBody(Value, frozen=True, rename="camel"):
    boot_diagnostics: BootDiagnostics = BootDiagnostics()


class VmBodyProperties(Value, frozen=True, rename="camel", omit_defaults=True):
    hardware_profile: HardwareBody
    storage_profile: StorageBody
    os_profile: OsBody
    network_profile: VmNetworkBody
    diagnostics_profile: DiagnosticsBody
    priority: str
    eviction_policy: str = ""
    billing_profile: BillingBody | None = None


class VmBody(Value, frozen=True):
    location: str
    tags: dict[str, str]
    properties: VmBodyProperties


class TagNames(Value, frozen=True):
    tags: dict[str, str]


class MergeTagsBody(Value, frozen=True):
    """A change of these tags alone, whatever others write at the same time."""

    properties: TagNames
    operation: str = "Merge"


class TimerSchedule(Value, frozen=True, rename="camel"):
    deadline: str
    timezone: str = "UTC"
    deadline_type: str = "InitiateAt"


class TimerRetries(Value, frozen=True, rename="camel"):
    retry_count: int = 5
    retry_window_in_minutes: int = 60


class TimerExecution(Value, frozen=True, rename="camel"):
    retry_policy: TimerRetries = TimerRetries()


class TimerResources(Value, frozen=True):
    ids: tuple[str, ...]


class SubmitTimerBody(Value, frozen=True, rename="camel"):
    schedule: TimerSchedule
    resources: TimerResources
    correlationid: str
    execution_parameters: TimerExecution = TimerExecution()


class CancelTimerBody(Value, frozen=True, rename="camel"):
    operation_ids: tuple[str, ...]
    correlationid: str
