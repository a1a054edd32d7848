"""The rules for what an account on a shared server may request: pure functions, no I/O.

A container's request body is never passed on: it is rebuilt from the few allowed fields.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from ..host import engine
from ..host.engine_objects import (
    ContainerLog,
    DeviceRequest,
    Image,
    Mount,
    NewContainer,
    NewExec,
    NewHostConfig,
)
from .http import HttpRefusal
from .request_fields import RequestFields

OWNER = "labctl.uid"
GPUS = "labctl.gpus"
ENDS = "labctl.lease-ends"
SOCKET = "labctl.service-socket"
SOURCES = "labctl.sources"
JOB = "labctl.slurm-job"
# Which of the starts of its job a container belongs to: Slurm may start a job again.
ATTEMPT = "labctl.slurm-attempt"
# Labels that only the broker sets. It always sets all of them, to override those of an image.
OWN_LABELS = (OWNER, GPUS, ENDS, SOCKET, SOURCES, JOB, ATTEMPT)
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,120}")
ID = re.compile(r"[0-9a-f]{12,64}")
TARGET = re.compile(r"/(lab(/[\w.-]+)+|etc/passwd|run/labctl-[a-z]+(/[\w.-]+)*)")
PORT = re.compile(r"[0-9]{1,5}")
TMPFS = ("/tmp", "/var/tmp")
GIB = 1024**3
LARGEST_TMP = GIB
MOST_MOUNTS = 32
MOST_TARGET = 255  # characters of a path in a container
MOST_NUMBER = 1 << 62  # fits the engine's integers
LONGEST_STOP_S, DEFAULT_STOP_S = 120, 10
DEFAULT_SHM_BYTES = 64 * 1024**2
# bytes of a container's labels and command, which every listing repeats: the broker lists the
# containers of all accounts every few seconds
MOST_LISTED_BYTES = 16 * 1024
# The log of each container is on the server's disk, outside of quotas. A run has its own log file.
LOG = {"max-size": "5m", "max-file": "2"}

BOOLS = ("Tty", "OpenStdin", "StdinOnce", "AttachStdin", "AttachStdout", "AttachStderr")
KNOWN = ("Image", "Cmd", "Entrypoint", "Hostname", "WorkingDir", "Env", "Labels", "StopTimeout")
WITHOUT_EFFECT = ("Domainname", "User", "ExposedPorts", "HostConfig", "NetworkingConfig", "Volumes")
_LIMITS = ("Memory", "NanoCpus", "ShmSize", "PidsLimit")
HOST_KNOWN = ("Mounts", "DeviceRequests", "Init", "NetworkMode", "AutoRemove", "PortBindings")
_SETTLED = ("SecurityOpt", "LogConfig", "ReadonlyRootfs", "CapDrop", "MemorySwap", "Tmpfs")
_USUAL = ("MemorySwappiness", "ConsoleSize", "RestartPolicy", "IpcMode")
# Fields that are the same for every container on a shared server, whatever the request says.
HOST_WITHOUT_EFFECT = (*_SETTLED, *_USUAL, "MaskedPaths", "ReadonlyPaths")


class BrokerAccount(NamedTuple):
    """The client's account, by SO_PEERCRED and the passwd file. `home` contains no link."""

    uid: int
    gid: int
    name: str
    home: str


class AccountShare(NamedTuple):
    """The most that one account may use at once."""

    memory_bytes: int
    cpus: float
    pids: int


class BindMount(NamedTuple):
    """A directory or file of the account, and its path in the container."""

    source: str
    target: str
    read_only: bool


class ContainerRequest(NamedTuple):
    """A container as an account requests it. 0 and "" are what the request leaves open."""

    image: str
    binds: list[BindMount]
    # UUIDs; ["*"] for as many as the account may have, [] for no GPU.
    gpus: list[str]
    # port of its service, 0 without one
    port: int
    labels: dict[str, str]
    env: list[str]
    # None for those of the image
    command: list[str] | None
    entrypoint: list[str] | None
    hostname: str
    directory: str
    stop_s: int
    # Whether it has no network at all.
    is_isolated: bool
    has_init: bool
    is_removed_at_end: bool
    memory_bytes: int
    nano_cpus: int
    pids: int
    shm_bytes: int
    streams: StreamFlags


class StreamFlags(NamedTuple):
    """How a container is connected to whoever starts it."""

    tty: bool
    open_stdin: bool
    stdin_once: bool
    attach_stdin: bool
    attach_stdout: bool
    attach_stderr: bool


def build_own_name(account: BrokerAccount, name: str) -> str:
    """Return the container's name in the engine: two accounts may use the same name."""
    if not NAME.fullmatch(name):
        raise HttpRefusal(400, f"bad name {name!r}")
    return f"u{account.uid}.{name}"


def strip_own_prefix(account: BrokerAccount, name: str) -> str:
    """Return the account's name for `/u1001.name` or `u1001.name`."""
    slash = "/" if name.startswith("/") else ""
    bare = name.lstrip("/")
    prefix = f"u{account.uid}."
    return slash + (bare[len(prefix) :] if bare.startswith(prefix) else bare)


def parse_container_request(account: BrokerAccount, request: RequestFields) -> ContainerRequest:
    """Parse the requested container. Refusal (403) if it exceeds what a shared server allows."""
    host = request.read_object("HostConfig")
    request.refuse_others(
        (*KNOWN, *BOOLS, *WITHOUT_EFFECT, "StopSignal", "OnBuild", "ArgsEscaped"), ""
    )
    host.refuse_others((*HOST_KNOWN, *_LIMITS, *HOST_WITHOUT_EFFECT), "HostConfig.")
    if not _is_own_user(account, request):
        raise HttpRefusal(403, "a container on a shared server can run only as the account itself")
    if request.is_set("Volumes"):
        raise HttpRefusal(403, "a shared server does not allow volumes")
    if host.read_object("RestartPolicy").get("Name") not in (None, "", "no"):
        raise HttpRefusal(403, "a shared server does not allow restart policies")
    if host.get("IpcMode") not in (None, "", "none", "private"):
        raise HttpRefusal(403, "a shared server does not allow containers to share IPC")
    if host.get("NetworkMode") not in (None, "", "default", "bridge", "none"):
        raise HttpRefusal(403, "a shared server allows only the account's own network")
    labels = pick_labels(request)
    listed = [labels, request.get("Cmd"), request.get("Entrypoint")]
    if len(json.dumps(listed)) > MOST_LISTED_BYTES:
        limit = f"{MOST_LISTED_BYTES >> 10} KiB"
        raise HttpRefusal(
            413, f"the labels and command of a container on a shared server exceed {limit}"
        )
    port = labels.get("labctl.service-port", "0")
    number = int(port) if PORT.fullmatch(port) and int(port) < 65536 else 0
    if host.is_set("PortBindings") and not number:
        raise HttpRefusal(403, "a shared server does not publish ports: services use Unix sockets")
    return ContainerRequest(
        image=str(request.get("Image") or ""),
        binds=_parse_binds(host),
        gpus=_parse_gpus(host),
        port=number,
        labels=labels,
        env=_parse_env(request),
        command=None if request.get("Cmd") is None else request.read_words("Cmd"),
        entrypoint=None if request.get("Entrypoint") is None else request.read_words("Entrypoint"),
        hostname=request.read_text("Hostname"),
        directory=request.read_text("WorkingDir"),
        stop_s=request.read_number("StopTimeout", LONGEST_STOP_S),
        is_isolated=host.get("NetworkMode") == "none",
        has_init=host.is_set("Init"),
        is_removed_at_end=host.is_set("AutoRemove"),
        memory_bytes=host.read_number("Memory", MOST_NUMBER),
        nano_cpus=host.read_number("NanoCpus", MOST_NUMBER),
        pids=host.read_number("PidsLimit", MOST_NUMBER),
        shm_bytes=host.read_number("ShmSize", MOST_NUMBER),
        streams=StreamFlags(*(request.is_set(key) for key in BOOLS)),
    )


def build_volume_mounts(image: Image, binds: list[BindMount], share: AccountShare) -> list[Mount]:
    """Return tmpfs mounts for the volumes that an image declares.

    Refusal for too many, or for invalid paths.
    """
    mounts = engine.build_volume_mounts(
        image, {mount.target for mount in binds} | set(TMPFS), limit_tmp_bytes(share)
    )
    if len(mounts) > MOST_MOUNTS or not all(_is_path(mount.Target) for mount in mounts):
        raise HttpRefusal(
            403, "a shared server does not allow the volumes that this image declares"
        )
    return mounts


def _is_path(target: str) -> bool:
    return target.startswith("/") and len(target) <= MOST_TARGET


def build_container(
    account: BrokerAccount,
    request: ContainerRequest,
    *,
    image: str,
    mounts: list[Mount],
    gpus: list[str],
    gpu_groups: list[str],
    labels: dict[str, str],
    share: AccountShare,
    network: str,
    parent: str,
) -> NewContainer:
    """Return the complete container for the engine. `image` is an id."""
    # Limits are within the account's share; one container may use all of it.
    memory_bytes = min(request.memory_bytes or share.memory_bytes, share.memory_bytes, MOST_NUMBER)
    nano_cpus = round(share.cpus * 1e9)
    return NewContainer(
        Image=image,
        User=f"{account.uid}:{account.gid}",
        Env=(*request.env, f"NVIDIA_VISIBLE_DEVICES={','.join(gpus) or 'void'}"),
        Labels={
            **request.labels,
            **dict.fromkeys(OWN_LABELS, ""),
            **labels,
            OWNER: str(account.uid),
        },
        StopTimeout=request.stop_s or DEFAULT_STOP_S,
        Cmd=None if request.command is None else tuple(request.command),
        Entrypoint=None if request.entrypoint is None else tuple(request.entrypoint),
        Hostname=request.hostname,
        WorkingDir=request.directory,
        Tty=request.streams.tty,
        OpenStdin=request.streams.open_stdin,
        StdinOnce=request.streams.stdin_once,
        AttachStdin=request.streams.attach_stdin,
        AttachStdout=request.streams.attach_stdout,
        AttachStderr=request.streams.attach_stderr,
        HostConfig=NewHostConfig(
            Mounts=tuple(mounts),
            SecurityOpt=("no-new-privileges",),
            CapDrop=("ALL",),
            Runtime="runc",
            IpcMode="private",
            GroupAdd=tuple(gpu_groups),
            ReadonlyRootfs=True,
            Tmpfs={path: _tmpfs_options(share) for path in TMPFS},
            LogConfig=ContainerLog("json-file", LOG),
            DeviceRequests=_build_device_requests(gpus),
            NetworkMode="none" if request.is_isolated else network,
            CgroupParent=parent,
            Init=request.has_init,
            AutoRemove=request.is_removed_at_end,
            Memory=memory_bytes,
            MemorySwap=memory_bytes,
            NanoCpus=min(request.nano_cpus or nano_cpus, nano_cpus),
            PidsLimit=min(request.pids or share.pids, share.pids),
            ShmSize=min(request.shm_bytes or DEFAULT_SHM_BYTES, memory_bytes),
        ),
    )


def parse_exec_request(account: BrokerAccount, request: RequestFields) -> NewExec:
    """Parse a command for a running container: as the account, without privileges."""
    if not _is_own_user(account, request):
        raise HttpRefusal(403, "a command on a shared server can run only as the account itself")
    if request.is_set("Privileged"):
        raise HttpRefusal(403, "a shared server does not allow privileged commands")
    return NewExec(
        Cmd=tuple(request.read_words("Cmd")),
        User=f"{account.uid}:{account.gid}",
        Env=tuple(_parse_env(request)),
        WorkingDir=request.read_text("WorkingDir"),
        Tty=request.is_set("Tty"),
        AttachStdin=request.is_set("AttachStdin"),
        AttachStdout=request.is_set("AttachStdout"),
        AttachStderr=request.is_set("AttachStderr"),
    )


def pick_labels(request: RequestFields) -> dict[str, str]:
    """Return labctl's own labels, without those that only the broker sets."""
    return {
        key: value[:256]
        for key, value in request.read_texts("Labels").items()
        if key.startswith("labctl.") and key not in OWN_LABELS
    }


def _is_own_user(account: BrokerAccount, request: RequestFields) -> bool:
    own = (None, "", str(account.uid), f"{account.uid}:{account.gid}")
    return request.get("User") in own


def _parse_binds(host: RequestFields) -> list[BindMount]:
    mounts = host.get("Mounts") or []
    if not isinstance(mounts, list) or len(mounts) > MOST_MOUNTS:
        raise HttpRefusal(400, f"Mounts must be a list of at most {MOST_MOUNTS}")
    binds = []
    for document in mounts:
        mount = RequestFields(document if isinstance(document, dict) else {})
        if mount.get("Type") != "bind":
            raise HttpRefusal(403, "a shared server mounts only directories of the account itself")
        source, target = str(mount.get("Source") or ""), str(mount.get("Target") or "")
        has_dots = "/../" in f"{target}/" or "/./" in f"{target}/"
        if not TARGET.fullmatch(target) or has_dots or len(target) > MOST_TARGET:
            raise HttpRefusal(403, f"a shared server does not allow a mount at {target[:100]!r}")
        binds.append(BindMount(source, target, mount.is_set("ReadOnly")))
    if len({mount.target for mount in binds}) != len(binds):
        raise HttpRefusal(400, "two mounts have the same target")
    return binds


def _parse_gpus(host: RequestFields) -> list[str]:
    documents = host.get("DeviceRequests") or []
    if not isinstance(documents, list):
        raise HttpRefusal(400, "DeviceRequests must be a list")
    uuids: list[str] = []
    for document in documents:
        device = RequestFields(document if isinstance(document, dict) else {})
        is_nvidia = device.get("Driver") in (None, "", "nvidia")
        if not is_nvidia or device.get("Capabilities") != [["gpu"]]:
            raise HttpRefusal(403, "a shared server allows GPUs, but no other devices")
        uuids += device.read_words("DeviceIDs") if device.is_set("DeviceIDs") else ["*"]
    return ["*"] if "*" in uuids else list(dict.fromkeys(uuids))


def _build_device_requests(gpus: list[str]) -> tuple[DeviceRequest, ...]:
    if not gpus:
        return ()
    return (DeviceRequest(DeviceIDs=tuple(gpus), Capabilities=(("gpu",),)),)


def _tmpfs_options(share: AccountShare) -> str:
    """Return options for a directory in memory: the root is read-only, and memory has a quota."""
    return f"rw,exec,nosuid,nodev,mode=1777,size={limit_tmp_bytes(share)}"


def limit_tmp_bytes(share: AccountShare) -> int:
    return min(LARGEST_TMP, share.memory_bytes // 4)


def _parse_env(request: RequestFields) -> list[str]:
    """Return the variables without NVIDIA's, which would choose devices."""
    variables = request.read_words("Env") if request.is_set("Env") else []
    return [
        variable
        for variable in variables
        if "=" in variable and not variable.startswith("NVIDIA_VISIBLE_DEVICES")
    ]
