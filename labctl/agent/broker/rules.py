"""The rules for what an account on a shared server may request: pure functions, no I/O.

A container's request body is never passed on: it is rebuilt from the few allowed fields.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from ..host import engine
from ..host.engine_objects import Image, Mount
from .http import HttpRefusal

OWNER = "labctl.uid"
GPUS = "labctl.gpus"
ENDS = "labctl.lease-ends"
SOCKET = "labctl.service-socket"
SOURCES = "labctl.sources"
# Labels that only the broker sets. It always sets all of them, to override those of an image.
OWN_LABELS = (OWNER, GPUS, ENDS, SOCKET, SOURCES)
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,120}")
ID = re.compile(r"[0-9a-f]{12,64}")
TARGET = re.compile(r"/(lab(/[\w.-]+)+|etc/passwd|run/labctl-[a-z]+(/[\w.-]+)*)")
PORT = re.compile(r"[0-9]{1,5}")
TMPFS = ("/tmp", "/var/tmp")
GIB = 1024**3
LARGEST_TMP = GIB
MOST_MOUNTS = 32
MOST_TARGET = 255  # characters of a path in a container
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
    """The variable parts of a requested container: its mounts, GPUs and service port."""

    binds: list[BindMount]
    # UUIDs; ["*"] for as many as the account may have, [] for no GPU.
    gpus: list[str]
    # port of its service, 0 without one
    port: int


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


def parse_container_request(account: BrokerAccount, request: dict[str, Any]) -> ContainerRequest:
    """Parse the requested container. Refusal (403) if it exceeds what a shared server allows."""
    host = _get_host_config(request)
    _refuse_others(
        request, (*KNOWN, *BOOLS, *WITHOUT_EFFECT, "StopSignal", "OnBuild", "ArgsEscaped"), ""
    )
    _refuse_others(host, (*HOST_KNOWN, *_LIMITS, *HOST_WITHOUT_EFFECT), "HostConfig.")
    if request.get("User") not in (None, "", str(account.uid), f"{account.uid}:{account.gid}"):
        raise HttpRefusal(403, "a container on a shared server can run only as the account itself")
    if request.get("Volumes"):
        raise HttpRefusal(403, "a shared server does not allow volumes")
    restart = (host.get("RestartPolicy") or {}).get("Name")
    if restart not in (None, "", "no"):
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
    if host.get("PortBindings") and not number:
        raise HttpRefusal(403, "a shared server does not publish ports: services use Unix sockets")
    return ContainerRequest(_parse_binds(host), _parse_gpus(host), number)


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


def build_container_body(
    account: BrokerAccount,
    request: dict[str, Any],
    *,
    image: str,
    mounts: list[Mount],
    gpus: list[str],
    gpu_groups: list[str],
    labels: dict[str, str],
    share: AccountShare,
    network: str,
    parent: str,
) -> dict[str, Any]:
    """Return the complete body for the engine. `image` is an id, `mounts` are in its format."""
    host = _get_host_config(request)
    is_isolated = host.get("NetworkMode") == "none"
    container: dict[str, Any] = {key: bool(request.get(key)) for key in BOOLS}
    container.update(
        {
            "Image": image,
            "User": f"{account.uid}:{account.gid}",
            "Env": [*_parse_env(request), f"NVIDIA_VISIBLE_DEVICES={','.join(gpus) or 'void'}"],
            "Labels": {
                **pick_labels(request),
                **dict.fromkeys(OWN_LABELS, ""),
                **labels,
                OWNER: str(account.uid),
            },
            "StopTimeout": _parse_number(request, "StopTimeout", 120) or 10,
        }
    )
    for key in ("Cmd", "Entrypoint"):
        if request.get(key) is not None:
            container[key] = _parse_words(request, key)
    for key in ("Hostname", "WorkingDir"):
        if request.get(key):
            container[key] = _parse_text(request, key)
    container["HostConfig"] = {
        "Mounts": mounts,
        "SecurityOpt": ["no-new-privileges"],
        "CapDrop": ["ALL"],
        "Runtime": "runc",
        "IpcMode": "private",
        "GroupAdd": gpu_groups,
        "ReadonlyRootfs": True,
        "Tmpfs": {path: _tmpfs_options(share) for path in TMPFS},
        "LogConfig": {"Type": "json-file", "Config": LOG},
        "DeviceRequests": _device_requests(gpus),
        "NetworkMode": "none" if is_isolated else network,
        "CgroupParent": parent,
        "Init": bool(host.get("Init")),
        "AutoRemove": bool(host.get("AutoRemove")),
        **_limits(host, share),
    }
    return container


def build_exec_body(account: BrokerAccount, request: dict[str, Any]) -> dict[str, Any]:
    """Return the body for a command in a running container: as the account, without privileges."""
    if request.get("User") not in (None, "", str(account.uid), f"{account.uid}:{account.gid}"):
        raise HttpRefusal(403, "a command on a shared server can run only as the account itself")
    if request.get("Privileged"):
        raise HttpRefusal(403, "a shared server does not allow privileged commands")
    spec: dict[str, Any] = {key: bool(request.get(key)) for key in BOOLS if key.startswith("A")}
    spec.update(
        {
            "Tty": bool(request.get("Tty")),
            "User": f"{account.uid}:{account.gid}",
            "Env": _parse_env(request),
            "Cmd": _parse_words(request, "Cmd"),
        }
    )
    if request.get("WorkingDir"):
        spec["WorkingDir"] = _parse_text(request, "WorkingDir")
    return spec


def pick_labels(request: dict[str, Any]) -> dict[str, str]:
    """Return labctl's own labels, without those that only the broker sets."""
    labels = request.get("Labels") or {}
    if not isinstance(labels, dict):
        raise HttpRefusal(400, "Labels must be an object")
    return {
        str(key): str(value)[:256]
        for key, value in labels.items()
        if str(key).startswith("labctl.") and key not in OWN_LABELS
    }


def _get_host_config(request: dict[str, Any]) -> dict[str, Any]:
    host = request.get("HostConfig") or {}
    if not isinstance(host, dict):
        raise HttpRefusal(400, "HostConfig must be an object")
    return host


def _refuse_others(fields: dict[str, Any], allowed: tuple[str, ...], prefix: str) -> None:
    """Refuse by name a field that is set and not allowed."""
    for key, value in fields.items():
        if value and key not in allowed:
            raise HttpRefusal(403, f"a shared server does not allow {prefix}{str(key)[:60]}")


def _parse_binds(host: dict[str, Any]) -> list[BindMount]:
    mounts = host.get("Mounts") or []
    if not isinstance(mounts, list) or len(mounts) > MOST_MOUNTS:
        raise HttpRefusal(400, f"Mounts must be a list of at most {MOST_MOUNTS}")
    binds = []
    for mount in mounts:
        if not isinstance(mount, dict) or mount.get("Type") != "bind":
            raise HttpRefusal(403, "a shared server mounts only directories of the account itself")
        source, target = str(mount.get("Source", "")), str(mount.get("Target", ""))
        has_dots = "/../" in f"{target}/" or "/./" in f"{target}/"
        if not TARGET.fullmatch(target) or has_dots or len(target) > MOST_TARGET:
            raise HttpRefusal(403, f"a shared server does not allow a mount at {target[:100]!r}")
        binds.append(BindMount(source, target, bool(mount.get("ReadOnly"))))
    if len({mount.target for mount in binds}) != len(binds):
        raise HttpRefusal(400, "two mounts have the same target")
    return binds


def _parse_gpus(host: dict[str, Any]) -> list[str]:
    uuids: list[str] = []
    for device_request in host.get("DeviceRequests") or []:
        groups = (device_request or {}).get("Capabilities")
        if device_request.get("Driver") not in (None, "", "nvidia") or groups != [["gpu"]]:
            raise HttpRefusal(403, "a shared server allows GPUs, but no other devices")
        ids = device_request.get("DeviceIDs") or []
        uuids += [str(uuid) for uuid in ids] if ids else ["*"]
    return ["*"] if "*" in uuids else list(dict.fromkeys(uuids))


def _device_requests(gpus: list[str]) -> list[dict[str, Any]]:
    if not gpus:
        return []
    device_request = {"Driver": "", "Capabilities": [["gpu"]], "Options": {}}
    return [{**device_request, "Count": 0, "DeviceIDs": gpus}]


def _limits(host: dict[str, Any], share: AccountShare) -> dict[str, int]:
    """Return limits within the account's share; one container may use all of it."""
    memory = min(_parse_number(host, "Memory", share.memory_bytes) or share.memory_bytes, 1 << 62)
    limit = round(share.cpus * 1e9)
    cpus = min(_parse_number(host, "NanoCpus", 1 << 50) or limit, limit)
    return {
        "Memory": memory,
        "MemorySwap": memory,
        "NanoCpus": cpus,
        "PidsLimit": _parse_number(host, "PidsLimit", share.pids) or share.pids,
        "ShmSize": min(_parse_number(host, "ShmSize", 1 << 50) or 64 * 1024**2, memory),
    }


def _tmpfs_options(share: AccountShare) -> str:
    """Return options for a directory in memory: the root is read-only, and memory has a quota."""
    return f"rw,exec,nosuid,nodev,mode=1777,size={limit_tmp_bytes(share)}"


def limit_tmp_bytes(share: AccountShare) -> int:
    return min(LARGEST_TMP, share.memory_bytes // 4)


def _parse_env(request: dict[str, Any]) -> list[str]:
    """Return the variables without NVIDIA's, which would choose devices."""
    variables = _parse_words(request, "Env") if request.get("Env") else []
    return [
        variable
        for variable in variables
        if "=" in variable and not variable.startswith("NVIDIA_VISIBLE_DEVICES")
    ]


def _parse_words(request: dict[str, Any], key: str) -> list[str]:
    value = request.get(key)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise HttpRefusal(400, f"{key} must be a list of strings")
    return list(value)


def _parse_text(request: dict[str, Any], key: str) -> str:
    value = request[key]
    if not isinstance(value, str) or len(value) > 4096 or "\0" in value:
        raise HttpRefusal(400, f"{key} must be a string of at most 4096 characters")
    return value


def _parse_number(request: dict[str, Any], key: str, limit: int) -> int:
    """Return a number of the request, at most `limit`; 0 if it has none."""
    value = request.get(key) or 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise HttpRefusal(400, f"{key} must be an integer")
    return min(max(value, 0), limit)
