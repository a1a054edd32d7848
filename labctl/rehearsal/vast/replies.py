"""The bodies of a rehearsed Vast.ai's requests and replies, as its description has them."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from labctl.model import Value

Scalar = bool | int | float | str


class ConditionBody(Value, frozen=True, forbid_unknown_fields=True):
    """A condition of a search; those that are set hold all."""

    eq: Scalar | None = None
    gte: float | None = None
    lte: float | None = None
    in_: tuple[Scalar, ...] | None = msgspec.field(default=None, name="in")


class SearchBody(Value, frozen=True, forbid_unknown_fields=True):
    """A search. Conditions that this rehearsal does not know are refused, and not ignored."""

    limit: int = 64
    type: str = "ondemand"
    order: tuple[tuple[str, str], ...] = (("dph_total", "asc"),)
    allocated_storage: float = 8.0
    verified: ConditionBody = ConditionBody(eq=True)
    rentable: ConditionBody = ConditionBody(eq=True)
    rented: ConditionBody = ConditionBody(eq=False)
    id: ConditionBody | None = None
    gpu_name: ConditionBody | None = None
    gpu_arch: ConditionBody | None = None
    num_gpus: ConditionBody | None = None
    gpu_ram: ConditionBody | None = None
    reliability: ConditionBody | None = None
    vms_enabled: ConditionBody | None = None
    datacenter: ConditionBody | None = None
    geolocation: ConditionBody | None = None
    direct_port_count: ConditionBody | None = None
    disk_space: ConditionBody | None = None
    duration: ConditionBody | None = None
    dph_total: ConditionBody | None = None


class AskReply(Value, frozen=True):
    """An offer. `datacenter` and `verified` are searched for, and shown as other fields."""

    id: int
    ask_contract_id: int
    machine_id: int
    gpu_name: str
    gpu_arch: str
    num_gpus: int
    gpu_ram: int
    gpu_frac: float
    cpu_cores_effective: float
    cpu_ram: int
    cpu_arch: str
    disk_space: float
    direct_port_count: int
    duration: float
    geolocation: str
    reliability: float
    verification: str
    hosting_type: int
    vms_enabled: bool
    is_bid: bool
    rentable: bool
    rented: bool
    storage_cost: float
    storage_total_cost: float
    min_bid: float
    dph_base: float
    dph_total: float


class AsksReply(Value, frozen=True):
    offers: tuple[AskReply, ...]


class RentBody(Value, frozen=True):
    image: str
    label: str = ""
    disk: float = 8.0
    runtype: str = "ssh"
    target_state: str = "running"
    onstart: str = ""
    vm: bool = False
    cancel_unavail: bool = False
    price: float | None = None


class RentedReply(Value, frozen=True):
    new_contract: int
    success: bool = True


class DoneReply(Value, frozen=True):
    success: bool = True


class ManageBody(Value, frozen=True):
    state: str = ""
    label: str | None = None


class PortMappingReply(Value, frozen=True, rename="pascal"):
    host_ip: str
    host_port: str


class VastVmReply(Value, frozen=True):
    id: int
    actual_status: str | None
    intended_status: str
    cur_state: str
    next_state: str
    label: str
    image_uuid: str
    image_runtype: str
    onstart: str
    machine_id: int
    start_date: float
    gpu_name: str
    gpu_arch: str
    num_gpus: int
    gpu_ram: int
    gpu_frac: float
    cpu_cores_effective: float
    cpu_ram: int
    cpu_arch: str
    disk_space: float
    geolocation: str
    verification: str
    is_bid: bool
    min_bid: float
    dph_base: float
    dph_total: float
    storage_cost: float
    storage_total_cost: float
    public_ipaddr: str | UnsetType = UNSET
    ports: dict[str, tuple[PortMappingReply, ...]] | None = None


class VmsReply(Value, frozen=True):
    instances: tuple[VastVmReply, ...]
    instances_found: int
    total_instances: int
    next_token: str | None
    success: bool = True


class FilterBody(Value, frozen=True, forbid_unknown_fields=True):
    """The filters of a list that this rehearsal knows."""

    id: ConditionBody = ConditionBody()
    label: ConditionBody = ConditionBody()


class VastUserReply(Value, frozen=True):
    id: int
    balance: float
    key_id: int = 1
    email: str = "student@example.com"


class AddVastKeyBody(Value, frozen=True):
    ssh_key: str


class NewKeyReply(Value, frozen=True):
    id: int
    user_id: int
    public_key: str
    created_at: str
    deleted_at: None = None


class AddedKeyReply(Value, frozen=True):
    key: NewKeyReply
    success: bool = True


class VastKeyReply(Value, frozen=True):
    id: int
    user_id: int
    key: str
    created_at: str
    deleted_at: None = None


class VastFaultReply(Value, frozen=True):
    """An error; `detail` stands alone where Vast.ai throttles."""

    success: bool | UnsetType = UNSET
    error: str | UnsetType = UNSET
    msg: str | UnsetType = UNSET
    detail: str | UnsetType = UNSET
