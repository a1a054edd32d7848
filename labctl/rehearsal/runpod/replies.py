"""The bodies of a rehearsed RunPod's requests and replies, complete as its description asks."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from labctl.model import Value
from labctl.providers.runpod.api import CloudTier, PodAction


class Body(Value, frozen=True, rename="camel"):
    """A request or a reply, or a part of one; every field is written."""


class PersistentBody(Body, frozen=True):
    size: int
    path: str


class PodNetworkBody(Body, frozen=True):
    volume_id: str
    path: str


class MountsBody(Body, frozen=True):
    persistent: PersistentBody | UnsetType = UNSET
    network: tuple[PodNetworkBody, ...] | UnsetType = UNSET


class GpuBody(Body, frozen=True):
    id: str
    count: int = 1


class CreateBody(Body, frozen=True):
    """A creation; what the description allows besides is ignored."""

    name: str
    image: str = ""
    gpu: GpuBody | None = None
    args: str = ""
    cloud: CloudTier = "SECURE"
    disk: int = 20
    env: dict[str, str] = msgspec.field(default_factory=dict)
    mounts: MountsBody = MountsBody()
    ports: tuple[str, ...] = ()
    data_center_ids: tuple[str, ...] = ()


class UpdateBody(Body, frozen=True):
    """A change; this rehearsal knows only that of the name."""

    name: str = ""


class ActionBody(Body, frozen=True):
    action: PodAction


class SshAddress(Body, frozen=True):
    host: str
    port: int
    username: str
    command: str


class SshReply(Body, frozen=True):
    proxy: SshAddress | None
    direct: SshAddress | None


class GlobalNetworkingReply(Body, frozen=True):
    enabled: bool = False


class PortReply(Body, frozen=True):
    private: int
    public: int | None
    type: str
    ip: str | None


class RuntimeReply(Body, frozen=True):
    uptime: int
    ports: tuple[PortReply, ...]


class PodReply(Body, frozen=True):
    id: str
    name: str
    status: str
    actions: tuple[PodAction, ...]
    image: str
    args: str
    disk: int
    mounts: MountsBody
    ports: tuple[str, ...]
    env: dict[str, str]
    registry: None
    gpu: GpuBody
    cloud: CloudTier
    data_center_id: str | None
    cuda_version: str | None
    ssh: SshReply
    template: None
    cost: float
    locked: bool
    runtime: RuntimeReply | None
    created_at: str
    started_at: str | None
    global_networking: GlobalNetworkingReply = GlobalNetworkingReply()


class PodsReply(Body, frozen=True):
    pods: tuple[PodReply, ...]


class TierPriceReply(Body, frozen=True):
    secure: float
    community: float


class TierCountReply(Body, frozen=True):
    secure: int
    community: int


class StockReply(Body, frozen=True):
    id: str
    name: str
    availability: str


class GpuTypeReply(Body, frozen=True):
    id: str
    name: str
    pool: str | None
    manufacturer: str
    memory: int
    secure: bool
    community: bool
    price: TierPriceReply
    max_count: TierCountReply
    availability: str | UnsetType = UNSET
    data_centers: tuple[StockReply, ...] | UnsetType = UNSET


class GpuTypesReply(Body, frozen=True):
    gpus: tuple[GpuTypeReply, ...]


class DataCenterReply(Body, frozen=True):
    id: str
    name: str
    region: str
    network_volume_types: tuple[str, ...]
    compliance: tuple[str, ...]
    global_network: bool


class DataCentersReply(Body, frozen=True):
    data_centers: tuple[DataCenterReply, ...]


class CreateVolumeBody(Body, frozen=True):
    name: str
    size: int
    data_center: str
    type: str = "STANDARD"


class VolumeReply(Body, frozen=True):
    id: str
    name: str
    size: int
    data_center: str
    type: str


class VolumesReply(Body, frozen=True):
    network_volumes: tuple[VolumeReply, ...]


class KeysBody(Body, frozen=True):
    keys: tuple[str, ...] = ()


class QueryBody(Value, frozen=True):
    """A GraphQL request."""

    query: str


class MyselfReply(Body, frozen=True):
    id: str
    client_balance: float
    current_spend_per_hr: float
    spend_limit: float


class GraphDataReply(Body, frozen=True):
    myself: MyselfReply


class GraphFault(Body, frozen=True):
    message: str


class GraphReplyBody(Body, frozen=True):
    data: GraphDataReply | None = None
    errors: tuple[GraphFault, ...] | UnsetType = UNSET


class ProblemReply(Body, frozen=True):
    """Every error reply."""

    title: str
    status: int
    detail: str
