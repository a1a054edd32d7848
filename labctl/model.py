"""The frozen values that all layers share, and their records in messages of `labctl.wire`.

No I/O, no behavior beyond properties.

Times are Unix seconds (UTC), sizes bytes, prices USD per hour, unless a name says otherwise.
"""

from __future__ import annotations

import re
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from labctl.decoding import convert_value
from labctl.wire.codec import Message, MessageError, from_json, to_json
from labctl.wire.node_access import NodeAccess
from labctl.wire.run_ids import AUXILIARY_PREFIXES

# Valid names of labs, runs, data sets and services.
NAME_PATTERN = re.compile(r"^[a-z0-9][a-z0-9-]{0,38}$")

GIB = 1024**3

Spot = Literal["never", "prefer", "only"]
Work = Literal["", "fp32", "fp16", "bandwidth"]
# "ending": labctl has requested termination, and the provider has not confirmed it yet.
ServerState = Literal["starting", "running", "stopped", "ending", "terminated"]
# The part of a server in an unfinished move: "" for the lab's own server, "next" for the one that
# will replace it, "former" for one that was replaced and is about to be removed.
Moving = Literal["", "next", "former"]
DockerFault = Literal["", "missing", "denied", "silent"]
RunState = Literal["starting", "running", "exited", "lost", "cancelled"]


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all values: immutable, compared by content, JSON by msgspec."""


ValueType = TypeVar("ValueType", bound=Value)


def make_record(kind: type[Message], value: Value) -> Message:
    """Return the message that has a value's fields, by their names."""
    return from_json(kind, to_json(msgspec.to_builtins(value)))


def parse_record(kind: type[ValueType], record: Message) -> ValueType:
    """Return the value that a message stands for; MessageError if a field does not allow it."""
    try:
        # Defaults are left out: None stands for a field that is missing in the value's own JSON.
        return convert_value(to_json(record, drop_defaults=True), kind)
    except msgspec.ValidationError as error:
        raise MessageError(str(error)) from None


class GpuNeed(Value, frozen=True):
    """The GPUs that a lab needs.

    `kind` is "auto" (use a GPU if the server has one), "none", "any" (any model, but required) or
    a model name such as "T4". `count` is 0 only for "auto" and "none".
    """

    kind: str = "auto"
    count: int = 0
    min_memory_bytes: int = 0

    @property
    def is_required(self) -> bool:
        return self.kind not in ("auto", "none")


class Need(Value, frozen=True):
    """The server that a lab needs.

    `type` is the provider's name of the machine type, "" for any.
    `arch` is "x86_64", "arm64" or "" (what most images are made for: x86_64). `work` is the main
    work of the GPU: with "fp32", "fp16" or "bandwidth" offers are ranked by price per unit of it,
    with "" by price per hour.
    `ttl_s` counts from the server's creation, and can be extended up to `max_ttl_s`. `deadline`
    False declines the default deadline of a server with a price and neither ttl nor budget.
    """

    gpu: GpuNeed = GpuNeed()
    type: str = ""
    arch: str = ""
    work: Work = ""
    spot: Spot = "prefer"
    max_price_usd_per_hour: float | None = None
    budget_usd: float | None = None
    ttl_s: int | None = None
    max_ttl_s: int | None = None
    idle_s: int | None = None
    deadline: bool = True


class Gpu(Value, frozen=True):
    """One GPU as nvidia-smi lists it."""

    name: str
    uuid: str
    memory_bytes: int
    driver: str = ""


class Offer(Value, frozen=True):
    """One server that a provider could create for a need. `price_usd_per_hour` 0.0 means free.

    A value that the provider does not know is None, "" or 0. The week's lowest and highest price
    are those of the spot market in this zone; `placement_score` is AWS's estimate from 1 to 10 of
    how likely spot capacity is. `priced_at` is when the price was fetched. Where several machines
    share one offer, `free_gpus` of their `all_gpus` are not in use. Servers of one gang can be
    placed close to each other with `cluster_placement`, and exchange data by RDMA with `rdma`.
    """

    provider: str
    type: str
    region: str = ""
    zone: str = ""
    cpus: int = 0
    memory_bytes: int = 0
    arch: str = ""
    gpu_name: str = ""
    gpu_count: int = 0
    gpu_memory_bytes: int = 0
    price_usd_per_hour: float = 0.0
    spot: bool = False
    on_demand_usd_per_hour: float | None = None
    week_low_usd_per_hour: float | None = None
    week_high_usd_per_hour: float | None = None
    placement_score: int | None = None
    priced_at: float = 0.0
    free_gpus: int = 0
    all_gpus: int = 0
    cluster_placement: bool = False
    rdma: bool = False


class Endpoint(Value, frozen=True):
    """The SSH address of a server. `host_key` is the pinned public key ("ssh-ed25519 AAAA...").

    `next_host_key` is trusted too: the key that is replacing `host_key`.
    """

    host: str
    port: int = 22
    user: str = "student"
    identity: str = ""
    jump: str = ""
    proxy_command: str = ""
    host_key: str = ""
    next_host_key: str = ""


class ProviderAccount(Value, frozen=True):
    """The account that a provider's credentials belong to.

    `id` is the provider's own identifier (an AWS account, a cloud project), "" if the provider has
    no accounts. `profile` is the value of the provider's `profile` setting that selects these
    credentials, "" if no profile does.
    """

    id: str = ""
    profile: str = ""


class Server(Value, frozen=True):
    """A machine that labctl reaches over SSH. `alias` is its name in ssh_config.

    `account` is the id of the `ProviderAccount` that owns it, "" if the provider has no accounts
    or an earlier labctl recorded the server. `owner` is the user who created it, if users share the
    provider without accounts (a Docker Engine); "" otherwise. Only this machine's record says which
    part of a move (`moving`) the server has.
    """

    id: str
    provider: str
    lab: str
    lab_id: str
    alias: str
    endpoint: Endpoint
    offer: Offer
    created_at: float
    state: ServerState = "starting"
    deadline_at: float | None = None
    account: str = ""
    owner: str = ""
    moving: Moving = ""


class CreateServerRequest(Value, frozen=True):
    """The input of `Provider.create`. It is stored before the call, so it can be repeated exactly.

    `token` is random per attempt and makes the call idempotent if the provider supports that.
    `public_key` is the line for authorized_keys. `tags` must reach the provider in the same call.
    Servers of one `group` (such as a course; "" for the lab alone) share what the provider can
    share: a security group, a key pair. These bear `group_name`, or `group` if that is "".
    `first_boot` may hold the private half of `host_key`, which is replaced at first contact.
    `image` is the image that the first run will use ("" if unknown), for a provider that has it at
    hand. Servers with one `gang` reach one another at every port; "" for a server on its own.
    `moving` is that of the new server; providers ignore it.
    """

    lab: str
    lab_id: str
    token: str
    public_key: str
    identity: str
    need: Need
    tags: dict[str, str] = {}
    group: str = ""
    group_name: str = ""
    host_key: str = ""
    first_boot: str = ""
    image: str = ""
    gang: str = ""
    moving: Moving = ""


class Boot(Value, frozen=True):
    """The settings that a machine needs at its first boot, before anybody can log in.

    `host_private_key` is in OpenSSH's format. `ttl_s` counts from the boot.
    """

    lab: str
    public_key: str
    host_key: str
    host_private_key: str
    ttl_s: int | None = None


class Resource(Value, frozen=True):
    """A resource other than a server that has labctl's tag: a volume, a key, a security group.

    `server_id` is the server it belongs to, "" if that server is gone or never existed. `zone` is
    the zone in which a server can use it, "" if any can.
    `expires_at` is set for a disk that was kept for its data: the time from which its owner allows
    labctl to remove it. Such a disk also names the `account` that owns it.
    The `lab` of a cache is the owner whose labs share it, "" if everybody does.
    """

    provider: str
    kind: str
    id: str
    price_usd_per_month: float = 0.0
    note: str = ""
    lab: str = ""
    lab_id: str = ""
    region: str = ""
    zone: str = ""
    server_id: str = ""
    created_at: float | None = None
    expires_at: float | None = None
    account: str = ""


class Check(Value, frozen=True):
    """One line of `labctl doctor`. `next` is the command or action that fixes the problem.

    `skipped`: the check could not run here and has no result; `ok` is True then. A `warning` does
    not fail the check; it says what may be lost.
    """

    name: str
    ok: bool
    warning: bool = False
    detail: str = ""
    next: str = ""
    skipped: bool = False


class ServerFacts(Value, frozen=True):
    """The properties of a server, found by one probe in one round trip.

    `docker_fault` is why Docker cannot be used, and `docker_error` the same in words.
    """

    os: str = ""
    arch: str = ""
    kernel: str = ""
    user: str = ""
    uid: int = 0
    gid: int = 0
    home: str = ""
    home_filesystem: str = ""
    boot_id: str = ""
    uptime_s: float = 0.0
    python: str = ""
    tmux: str = ""
    rsync: str = ""
    docker: str = ""
    docker_fault: DockerFault = ""
    docker_error: str = ""
    sudo: bool = False
    gpus: tuple[Gpu, ...] = ()
    nvidia_runtime: bool = False
    disk_free_bytes: int = 0
    memory_bytes: int = 0
    cpus: int = 0
    stamp: str = ""
    boto3: bool = False


# Programs that read commands from a terminal if they get no script, and options that keep that.
SHELLS = frozenset(("bash", "dash", "fish", "ipython", "python", "python3", "sh", "zsh"))
SHELL_OPTIONS = frozenset(("-i", "-l", "-il", "-li", "--login"))


class Run(Value, frozen=True):
    """One command in one container on a server, in its last known state.

    `exit_code` is None while it runs, or if it can no longer be found out (mostly state "lost").
    `summary` is a text for users: how the run ended (exit, out of memory with limit and peak,
    signal, reboot), or what is wrong while it runs. `gpu_lost_at` is when its container was first
    seen without access to its GPUs, in Unix seconds by the server's clock.
    `stopped_by` names the limit that ended a "lost" run: "ttl", "budget" or "GPU lease"; else "".
    `oom_limit_bytes` is the memory limit at which it was killed: 0 for the server's own memory. It
    is missing in JSON if the run was not, and in records of earlier versions.
    `image_id` is the image that it actually ran in, `image_digest` that image's name in its
    registry; "" for an image that was built on the server. `executor` is "process"
    for a plain process, "slurm" for a job of Slurm, and missing in JSON for a container.
    `container` is its name, or that of the attempt of another executor. `has_checkpoints`: it has
    ended and left files in its directory for checkpoints; missing in JSON otherwise.
    """

    id: str
    lab_id: str
    server_id: str
    state: RunState
    command: tuple[str, ...] = ()
    image: str = ""
    exit_code: int | None = None
    summary: str = msgspec.field(default="", name="told")
    created_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    container: str = ""
    progress: dict[str, float] = {}
    new_files: tuple[str, ...] = ()
    seen_at: float = 0.0
    stopped_by: str = ""
    image_id: str = ""
    image_digest: str = ""
    gpu_lost_at: float | None = None
    oom_limit_bytes: int | UnsetType = UNSET
    executor: str | UnsetType = UNSET
    has_checkpoints: bool | UnsetType = UNSET

    @property
    def is_container(self) -> bool:
        """Whether it is a container; otherwise a plain process, or a job of a cluster."""
        return self.executor_name == "docker"

    @property
    def executor_name(self) -> str:
        return "docker" if self.executor is UNSET else self.executor

    @property
    def has_ended(self) -> bool:
        return self.state in ("exited", "lost", "cancelled")

    @property
    def state_text(self) -> str:
        """The state for people, in American spelling; what is stored keeps its spelling.

        A run that a limit stopped was not lost: its outputs were saved first.
        """
        if self.state == "lost" and self.stopped_by:
            return "stopped"
        if self.state == "starting" and self.executor == "slurm":
            return "queued"
        return "canceled" if self.state == "cancelled" else self.state

    @property
    def is_auxiliary(self) -> bool:
        """Whether labctl measures something with it, so that it never counts as the latest run."""
        return self.id.startswith(AUXILIARY_PREFIXES)

    @property
    def is_shell_session(self) -> bool:
        """Whether its command is a shell or an interpreter to type in, as of `run -it -- bash`."""
        program, *words = self.command or ("",)
        return program.rpartition("/")[2] in SHELLS and all(word in SHELL_OPTIONS for word in words)


class FileEntry(Value, frozen=True):
    """One regular file below a root. `path` is relative, with `/`. `sha256` in hex, or ""."""

    path: str
    size: int
    sha256: str = ""
    mode: int = 0o644
    mtime_ns: int = 0


class Service(Value, frozen=True):
    """A program on a server that listens on a port. `port` is on the server's loopback.

    On a shared server it listens on the Unix socket `socket` instead; `port` is then the
    container's. On a cluster `port` is on the machine to which `node` leads.
    """

    name: str
    port: int
    token: str = ""
    path: str = "/"
    container: str = ""
    socket: str = ""
    node: NodeAccess | None = None


class Forward(Value, frozen=True):
    """A local port that leads to a service. `pid` is the process that holds it, 0 for this one."""

    id: str
    server_id: str
    service: str
    local_port: int
    remote_port: int
    url: str
    pid: int = 0
    created_at: float = 0.0
