"""The bodies of requests and replies of a rehearsed Lambda, as description.yaml has them."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from labctl.model import Value


class RegionReply(Value, frozen=True):
    name: str
    description: str


class SpecsReply(Value, frozen=True):
    vcpus: int
    memory_gib: int
    storage_gib: int
    gpus: int


class InstanceTypeReply(Value, frozen=True):
    name: str
    description: str
    gpu_description: str
    price_cents_per_hour: int
    specs: SpecsReply


class TypeItemReply(Value, frozen=True):
    instance_type: InstanceTypeReply
    regions_with_capacity_available: tuple[RegionReply, ...]


class TypesReply(Value, frozen=True):
    data: dict[str, TypeItemReply]


class TagEntry(Value, frozen=True):
    key: str
    value: str


class ActionReply(Value, frozen=True):
    available: bool
    reason_code: str | UnsetType = UNSET
    reason_description: str | UnsetType = UNSET


class ActionsReply(Value, frozen=True):
    """What can be done with an instance now."""

    migrate: ActionReply
    rebuild: ActionReply
    restart: ActionReply
    cold_reboot: ActionReply
    terminate: ActionReply


class InstanceReply(Value, frozen=True):
    id: str
    status: str
    ssh_key_names: tuple[str, ...]
    file_system_names: tuple[str, ...]
    region: RegionReply
    instance_type: InstanceTypeReply
    actions: ActionsReply
    hostname: str
    tags: tuple[TagEntry, ...]
    name: str | UnsetType = UNSET
    ip: str | UnsetType = UNSET


class InstanceDataReply(Value, frozen=True):
    data: InstanceReply


class InstancesReply(Value, frozen=True):
    data: tuple[InstanceReply, ...]


class ImageChoice(Value, frozen=True):
    family: str = ""
    id: str = ""


class LaunchBody(Value, frozen=True):
    region_name: str
    instance_type_name: str
    ssh_key_names: tuple[str, ...]
    file_system_names: tuple[str, ...] = ()
    hostname: str = ""
    name: str = ""
    image: ImageChoice | None = None
    user_data: str = ""
    tags: tuple[TagEntry, ...] = ()


class LaunchedIds(Value, frozen=True):
    instance_ids: tuple[str, ...]


class LaunchReply(Value, frozen=True):
    data: LaunchedIds


class InstanceIdsBody(Value, frozen=True):
    instance_ids: tuple[str, ...]


class TerminatedInstances(Value, frozen=True):
    terminated_instances: tuple[InstanceReply, ...]


class TerminateReply(Value, frozen=True):
    data: TerminatedInstances


class RestartedInstances(Value, frozen=True):
    restarted_instances: tuple[InstanceReply, ...]


class RestartReply(Value, frozen=True):
    data: RestartedInstances


class ModifyBody(Value, frozen=True):
    name: str = ""


class KeyReply(Value, frozen=True):
    id: str
    name: str
    public_key: str


class KeyDataReply(Value, frozen=True):
    data: KeyReply


class KeysReply(Value, frozen=True):
    data: tuple[KeyReply, ...]


class AddKeyBody(Value, frozen=True):
    name: str
    public_key: str


class UserReply(Value, frozen=True):
    id: str
    email: str
    status: str = "active"


class FileSystemReply(Value, frozen=True):
    id: str
    name: str
    mount_point: str
    created: str
    created_by: UserReply
    is_in_use: bool
    region: RegionReply
    bytes_used: int


class FileSystemDataReply(Value, frozen=True):
    data: FileSystemReply


class FileSystemsReply(Value, frozen=True):
    data: tuple[FileSystemReply, ...]


class CreateFileSystemBody(Value, frozen=True):
    name: str
    region: str


class DeletedFileSystems(Value, frozen=True):
    deleted_ids: tuple[str, ...]


class DeletedFileSystemsReply(Value, frozen=True):
    data: DeletedFileSystems


class NothingData(Value, frozen=True):
    """An empty object."""


class NothingReply(Value, frozen=True):
    data: NothingData = NothingData()


class AuditEventReply(Value, frozen=True):
    service_name: str
    resource_name: str
    action: str
    catalog_version: str
    event_id: str
    event_time: str
    actor_lrn: str | None
    resource_lrns: tuple[str, ...]
    resource_owner_lrn: str | None
    request_api_key_lrn: str | None
    additional_details: dict[str, str] = msgspec.field(default_factory=dict)


class AuditPage(Value, frozen=True):
    events: tuple[AuditEventReply, ...]
    page_token: str | None = None


class AuditReply(Value, frozen=True):
    data: AuditPage


class FaultText(Value, frozen=True):
    """An error with a suggestion, which most of Lambda's errors must have."""

    code: str
    message: str
    suggestion: str = "This is a rehearsal."


class FaultBody(Value, frozen=True):
    error: FaultText
