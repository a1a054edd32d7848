"""Vast.ai's API: the values that labctl reads and sends, and its error codes.

https://docs.vast.ai/api-reference describes it. Fields that labctl does not use are left out.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from labctl.decoding import decode_json
from labctl.errors import (
    CapacityError,
    CredentialsError,
    DeniedError,
    ProviderError,
    ThrottledError,
)
from labctl.model import Value
from labctl.providers.http import AbsentError, CloudDescription, ErrorDetail

Market = Literal["ondemand", "bid"]
TargetState = Literal["running", "stopped"]


class Condition(Value, frozen=True):
    """A condition of a search; those that are set hold all."""

    eq: bool | int | str | UnsetType = UNSET
    gte: float | UnsetType = UNSET
    in_: tuple[str, ...] | UnsetType = msgspec.field(default=UNSET, name="in")


class SearchRequest(Value, frozen=True):
    """A search for offers. `allocated_storage` (GB) is part of the prices; `duration` in seconds.

    `order` has two entries, as the description asks.
    """

    type: Market
    limit: int
    order: tuple[tuple[str, str], tuple[str, str]]
    allocated_storage: int
    disk_space: Condition
    rentable: Condition
    vms_enabled: Condition
    gpu_arch: Condition
    num_gpus: Condition
    direct_port_count: Condition
    reliability: Condition
    verified: Condition
    id: Condition | UnsetType = UNSET
    datacenter: Condition | UnsetType = UNSET
    geolocation: Condition | UnsetType = UNSET
    duration: Condition | UnsetType = UNSET


class Ask(Value, frozen=True):
    """An offer of a machine, or of some of its GPUs. RAM is in MB, prices are in USD per hour.

    `min_bid` is the least that an interruptible instance must bid. `gpu_frac` is the share of the
    machine's GPUs.
    """

    id: int
    machine_id: int = 0
    gpu_name: str = ""
    num_gpus: int = 0
    gpu_ram: float = 0.0
    gpu_frac: float = 1.0
    cpu_cores_effective: float | None = None
    cpu_ram: float = 0.0
    cpu_arch: str | None = None
    geolocation: str | None = None
    dph_total: float = 0.0
    min_bid: float | None = None


class Asks(Value, frozen=True):
    offers: tuple[Ask, ...] = ()


class RentRequest(Value, frozen=True):
    """Accept an offer. `disk` is in GB; `price` is the bid of an interruptible instance."""

    image: str
    label: str
    disk: int
    onstart: str
    vm: bool = True
    runtype: str = "ssh_direct"
    target_state: TargetState = "running"
    # By default an interruptible instance that cannot start now is created stopped, and bills.
    cancel_unavail: bool = True
    price: float | UnsetType = UNSET


class Rented(Value, frozen=True):
    """The reply to RentRequest; `new_contract` is the instance's id."""

    success: bool = False
    new_contract: int = 0


class PortMapping(Value, frozen=True):
    host_port: str = msgspec.field(default="", name="HostPort")


class VastInstance(Value, frozen=True):
    """An instance. RAM is in MB, prices are in USD per hour, the disk is in GB.

    `actual_status` is None before its host has reported, then created, loading, running, stopped,
    exited, offline or unknown. `intended_status` is what was asked for: running or stopped.
    """

    id: int
    actual_status: str | None = None
    intended_status: str | None = None
    label: str | None = None
    machine_id: int = 0
    public_ipaddr: str | None = None
    ports: dict[str, tuple[PortMapping, ...]] | None = None
    ssh_host: str | None = None
    ssh_port: int | None = None
    is_bid: bool = False
    gpu_name: str | None = None
    num_gpus: int = 0
    gpu_ram: float | None = None
    gpu_frac: float | None = None
    cpu_cores_effective: float | None = None
    cpu_ram: float | None = None
    cpu_arch: str | None = None
    geolocation: str | None = None
    dph_total: float | None = None
    storage_total_cost: float | None = None
    disk_space: float | None = None


class InstancePage(Value, frozen=True):
    instances: tuple[VastInstance, ...] = ()
    next_token: str | None = None


class ManageRequest(Value, frozen=True):
    """Start, stop or label an instance."""

    state: TargetState | UnsetType = UNSET
    label: str | UnsetType = UNSET


class VastUser(Value, frozen=True):
    """The account. `credit` is shown by Vast.ai's own tools, and not described; USD."""

    id: int
    balance: float | None = None
    credit: float | None = None


class VastKey(Value, frozen=True):
    """An SSH key of the account; `key` is the whole public line."""

    id: int
    key: str = ""


class AddVastKeyRequest(Value, frozen=True):
    ssh_key: str


class VastErrorReply(Value, frozen=True):
    """An error reply; some have only one of these, and throttled ones may be plain text."""

    error: str | None = None
    msg: str | None = None
    detail: str | None = None


def parse_error(body: bytes) -> ErrorDetail:
    try:
        reply = decode_json(body, VastErrorReply)
    except msgspec.MsgspecError:
        return ErrorDetail()
    return ErrorDetail(code=reply.error or "", message=reply.msg or reply.detail or "")


VAST = CloudDescription(
    name="Vast.ai",
    provider="vast",
    endpoint="https://console.vast.ai",
    # Vast.ai's own tools read the same variable.
    endpoint_variable="VAST_URL",
    key_variables=("VAST_API_KEY",),
    key_files=(".config/vastai/vast_api_key",),
    key_help="make a key at https://cloud.vast.ai/manage-keys/\n"
    "labctl docs vast   # its permissions",
    quota_help="ask Vast.ai's support",
    balance_help="add credit at https://cloud.vast.ai/billing/",
    parse_error=parse_error,
    codes={
        "auth_error": CredentialsError,
        "not_authorized": DeniedError,
        "rate_limit_exceeded": ThrottledError,
        "no_such_ask": CapacityError,
        # The bid is below what the offer now asks for.
        "invalid_price": CapacityError,
        "no_ssh_key_for_vm": ProviderError,
        "no_such_instance": AbsentError,
        "not_found": AbsentError,
        "no_ssh_key": ProviderError,
    },
)
