"""Lambda's Cloud API, version 1: the values that labctl reads and sends, and its error codes.

https://docs-api.lambda.ai/api/cloud describes it. Fields that labctl does not use are left out.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from labctl.decoding import decode_json
from labctl.errors import (
    BusyError,
    CapacityError,
    CredentialsError,
    DeniedError,
    ProviderError,
    QuotaError,
)
from labctl.model import Value
from labctl.providers.http import AbsentError, CloudDescription, ErrorDetail

PREFIX = "/api/v1"
T = TypeVar("T")


class Data(Value, Generic[T], frozen=True):
    """Every successful reply."""

    data: T


class LambdaRegion(Value, frozen=True):
    name: str = ""


class LambdaSpecs(Value, frozen=True):
    """What an instance type consists of, in GiB."""

    vcpus: int = 0
    memory_gib: int = 0
    storage_gib: int = 0
    gpus: int = 0


class LambdaType(Value, frozen=True):
    """An instance type. `gpu_description` is "A10 (24 GB PCIe)", or "N/A" without a GPU."""

    name: str
    gpu_description: str = ""
    price_cents_per_hour: int = 0
    specs: LambdaSpecs = LambdaSpecs()


class LambdaTypeItem(Value, frozen=True):
    """An instance type with the regions that have capacity for it now."""

    instance_type: LambdaType
    regions_with_capacity_available: tuple[LambdaRegion, ...] = ()


class LambdaTag(Value, frozen=True):
    key: str
    value: str


class LambdaInstance(Value, frozen=True):
    """An instance. `status` is booting, active, unhealthy, terminating, terminated or preempted."""

    id: str
    status: str
    instance_type: LambdaType
    region: LambdaRegion = LambdaRegion()
    name: str = ""
    ip: str = ""
    tags: tuple[LambdaTag, ...] = ()


class LambdaKey(Value, frozen=True):
    """A stored SSH key."""

    id: str
    name: str
    public_key: str


class LambdaFileSystem(Value, frozen=True):
    """A file system, which outlives the instances that mount it."""

    id: str
    name: str
    region: LambdaRegion = LambdaRegion()
    bytes_used: int = 0
    is_in_use: bool = False


class AuditEvent(Value, frozen=True):
    """An event of the audit log. `resource_owner_lrn` names the account."""

    resource_owner_lrn: str | None = None


class AuditEvents(Value, frozen=True):
    events: tuple[AuditEvent, ...] = ()


class ImageFamily(Value, frozen=True):
    family: str


class LaunchRequest(Value, frozen=True):
    """Launch one instance; exactly one key must be named."""

    region_name: str
    instance_type_name: str
    ssh_key_names: tuple[str, ...]
    name: str
    user_data: str
    tags: tuple[LambdaTag, ...]
    image: ImageFamily | msgspec.UnsetType = msgspec.UNSET


class LaunchedInstances(Value, frozen=True):
    instance_ids: tuple[str, ...]


class InstanceIds(Value, frozen=True):
    """The body of terminate and restart."""

    instance_ids: tuple[str, ...]


class RenameRequest(Value, frozen=True):
    name: str


class AddKeyRequest(Value, frozen=True):
    name: str
    public_key: str


class ApiFault(Value, frozen=True):
    """What is wrong with a request."""

    code: str = ""
    message: str = ""


class FaultReply(Value, frozen=True):
    """Every error reply."""

    error: ApiFault = ApiFault()


def parse_error(body: bytes) -> ErrorDetail:
    """Read an error reply; a proxy's page gives an empty detail."""
    try:
        fault = decode_json(body, FaultReply).error
    except msgspec.MsgspecError:
        return ErrorDetail()
    return ErrorDetail(code=fault.code, message=fault.message)


LAMBDA = CloudDescription(
    name="Lambda",
    provider="lambda",
    endpoint="https://cloud.lambda.ai",
    endpoint_variable="LAMBDA_ENDPOINT_URL",
    key_variables=("LAMBDA_API_KEY",),
    key_files=(".lambda_cloud/lambda_keys",),
    key_help="make a key at https://cloud.lambda.ai/api-keys/cloud-api",
    quota_help="ask for more at https://support.lambda.ai; it also rises as you pay invoices",
    balance_help="https://cloud.lambda.ai/settings/billing",
    parse_error=parse_error,
    codes={
        "global/invalid-api-key": CredentialsError,
        "global/account-inactive": DeniedError,
        "global/invalid-address": DeniedError,
        "global/quota-exceeded": QuotaError,
        "global/object-does-not-exist": AbsentError,
        "global/internal-error": BusyError,
        "global/invalid-parameters": ProviderError,
        "global/duplicate": ProviderError,
        "instance-operations/launch/insufficient-capacity": CapacityError,
        "filesystems/filesystem-in-use": BusyError,
        "provider/*": BusyError,
    },
)
