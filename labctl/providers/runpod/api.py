"""RunPod's API, version 2: the values that labctl reads and sends, and what its statuses mean.

https://docs.runpod.io/api-reference-v2 describes it. Fields that labctl does not use are left out.
Its errors have a status and a text, but no code: the status stands for the code, as "HTTP 409".
Only GraphQL, the older API, shows whose key it is and the balance.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from labctl.decoding import decode_json
from labctl.errors import BusyError, CapacityError, UsageError
from labctl.model import Value
from labctl.providers.http import CloudDescription, ErrorDetail

CloudTier = Literal["SECURE", "COMMUNITY"]
PodAction = Literal["start", "stop", "restart", "terminate"]
# The level of a stock that is empty.
NO_STOCK = "NONE"
# Where the disk that survives a stop is mounted, as in RunPod's own templates.
WORKSPACE = "/workspace"


class ApiValue(Value, frozen=True, rename="camel", omit_defaults=True):
    """A part of a request or a reply."""


class PersistentMount(ApiValue, frozen=True):
    """A disk of the pod's own host, in GB. It ends with the pod."""

    size: int
    path: str


class NetworkMount(ApiValue, frozen=True):
    volume_id: str
    path: str


class Mounts(ApiValue, frozen=True):
    """At most one of the two kinds."""

    persistent: PersistentMount | None = None
    network: tuple[NetworkMount, ...] = ()


class GpuChoice(ApiValue, frozen=True):
    id: str = ""
    count: int = msgspec.field(default=1)


class CreatePod(ApiValue, frozen=True):
    """The body of a creation. `args` is the command that the image's entrypoint gets."""

    name: str
    image: str
    gpu: GpuChoice
    args: str
    cloud: CloudTier
    disk: int
    env: dict[str, str]
    mounts: Mounts
    ports: tuple[str, ...]
    data_center_ids: tuple[str, ...] = ()


class RenamePod(ApiValue, frozen=True):
    name: str


class PodActionRequest(ApiValue, frozen=True):
    action: PodAction


class SshEndpoint(ApiValue, frozen=True):
    """An address of a pod's sshd."""

    host: str
    port: int
    username: str = ""


class PodSsh(ApiValue, frozen=True):
    """`direct` is the public port that leads to port 22, None while the pod has no such port."""

    direct: SshEndpoint | None = None


class Pod(ApiValue, frozen=True):
    """A pod. `cost` is in USD per hour, 0 while it is stopped. Sizes are in GB.

    `status` is PROVISIONING, STARTING, RUNNING, EXITED, ERROR or TERMINATED.
    """

    id: str
    name: str
    status: str
    created_at: str
    gpu: GpuChoice = GpuChoice()
    cloud: CloudTier = "SECURE"
    data_center_id: str | None = None
    env: dict[str, str] = msgspec.field(default_factory=dict)
    ssh: PodSsh = PodSsh()
    cost: float = 0.0
    disk: int = 0
    mounts: Mounts = Mounts()


class Pods(ApiValue, frozen=True):
    pods: tuple[Pod, ...]


class TierPrice(ApiValue, frozen=True):
    """List prices of one GPU, in USD per hour."""

    secure: float = 0.0
    community: float = 0.0


class TierCount(ApiValue, frozen=True):
    secure: int = 0
    community: int = 0


class DataCenterStock(ApiValue, frozen=True):
    id: str
    availability: str = NO_STOCK


class GpuType(ApiValue, frozen=True):
    """A GPU model. `memory` is in GB; `max_count` is what the largest machine has."""

    id: str
    name: str
    manufacturer: str
    memory: int
    secure: bool
    community: bool
    price: TierPrice
    max_count: TierCount
    availability: str = NO_STOCK
    data_centers: tuple[DataCenterStock, ...] = ()


class GpuTypes(ApiValue, frozen=True):
    gpus: tuple[GpuType, ...]


class NetworkVolume(ApiValue, frozen=True):
    """A volume that outlives pods. `size` is in GB."""

    id: str
    name: str
    size: int
    data_center: str
    type: str = "STANDARD"


class NetworkVolumes(ApiValue, frozen=True):
    network_volumes: tuple[NetworkVolume, ...]


class SshKeys(ApiValue, frozen=True):
    keys: tuple[str, ...]


class GraphQuery(Value, frozen=True):
    """The body of a GraphQL request."""

    query: str


class Myself(ApiValue, frozen=True):
    """Whose key it is. Dollars; `spend_limit` is per hour."""

    id: str = ""
    client_balance: float | None = None
    current_spend_per_hr: float | None = None
    spend_limit: float | None = None


class GraphData(ApiValue, frozen=True):
    myself: Myself | None = None


class GraphReply(ApiValue, frozen=True):
    """A GraphQL reply. A key without the permission gets errors, and no data."""

    data: GraphData | None = None


class ProblemDetails(Value, frozen=True):
    """Every error reply of version 2."""

    title: str = ""
    status: int = 0
    detail: str = ""
    errors: tuple[str, ...] = ()


def parse_error(body: bytes) -> ErrorDetail:
    """Read an error reply; an empty detail for anything else, such as a proxy's page."""
    try:
        problem = decode_json(body, ProblemDetails)
    except msgspec.MsgspecError:
        return ErrorDetail()
    if not problem.status:
        return ErrorDetail()
    message = "; ".join(filter(None, (problem.detail or problem.title, *problem.errors)))
    return ErrorDetail(code=f"HTTP {problem.status}", message=message)


RUNPOD = CloudDescription(
    name="RunPod",
    provider="runpod",
    endpoint="https://api.runpod.io",
    endpoint_variable="RUNPOD_ENDPOINT_URL",
    key_variables=("RUNPOD_API_KEY",),
    key_help="make a key at https://console.runpod.io/user/settings, API Keys\n"
    "labctl docs runpod   # its permissions",
    quota_help="ask RunPod's support for a higher spend limit",
    balance_help="add credit at https://console.runpod.io/user/billing",
    parse_error=parse_error,
    # 409: the pod's status does not allow the action now.
    codes={"HTTP 409": BusyError, "HTTP 422": UsageError},
)
# RunPod documents these for a creation alone: try the next candidate. 403 is about the pool of
# machines then, unless the key may create nothing at all, which launch.py finds out.
CREATION = msgspec.structs.replace(
    RUNPOD, codes={"HTTP 400": CapacityError, "HTTP 422": UsageError}
)
