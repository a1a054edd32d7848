"""What an account on a shared server may have of the engine: pure rules, no I/O.

A container's body is never passed on: it is made anew out of the few things that are known.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from ..host import engine
from .http import Refusal

OWNER = "labctl.uid"
GPUS = "labctl.gpus"
ENDS = "labctl.lease-ends"
SOCKET = "labctl.service-socket"
SOURCES = "labctl.sources"
# Labels that only the broker sets: all of them each time, or an image's own would stand there.
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
# Labels and command of a container, which each list of containers repeats: the broker reads one of
# all accounts' every few seconds.
MOST_LISTED_BYTES = 16 * 1024
# Of each container, on the server's disk outside of quotas. A run's whole log is its own file.
LOG = {"max-size": "5m", "max-file": "2"}

BOOLS = ("Tty", "OpenStdin", "StdinOnce", "AttachStdin", "AttachStdout", "AttachStderr")
KNOWN = ("Image", "Cmd", "Entrypoint", "Hostname", "WorkingDir", "Env", "Labels", "StopTimeout")
WITHOUT_EFFECT = ("Domainname", "User", "ExposedPorts", "HostConfig", "NetworkingConfig", "Volumes")
_LIMITS = ("Memory", "NanoCpus", "ShmSize", "PidsLimit")
HOST_KNOWN = ("Mounts", "DeviceRequests", "Init", "NetworkMode", "AutoRemove", "PortBindings")
_SETTLED = ("SecurityOpt", "LogConfig", "ReadonlyRootfs", "CapDrop", "MemorySwap", "Tmpfs")
_USUAL = ("MemorySwappiness", "ConsoleSize", "RestartPolicy", "IpcMode")
# What every container on a shared server gets the same, whatever is asked.
HOST_WITHOUT_EFFECT = (*_SETTLED, *_USUAL, "MaskedPaths", "ReadonlyPaths")


class Account(NamedTuple):
    """Who asks: what SO_PEERCRED and the passwd file say. `home` has no link in it."""

    uid: int
    gid: int
    name: str
    home: str


class Share(NamedTuple):
    """The most that one account has at once."""

    memory_bytes: int
    cpus: float
    pids: int


class Bind(NamedTuple):
    """A directory or file of the account's, and where it is seen in the container."""

    source: str
    target: str
    read_only: bool


class Wish(NamedTuple):
    """What is left to decide for a container: what it mounts, and its GPUs."""

    binds: list[Bind]
    # UUIDs; ["*"] for as many as the account may have, [] for none.
    gpus: list[str]
    # Of the service in it, 0 for none.
    port: int


def own_name(account: Account, name: str) -> str:
    """What a container of the account's is called in the engine: two may use the same name."""
    if not NAME.fullmatch(name):
        raise Refusal(400, f"bad name {name!r}")
    return f"u{account.uid}.{name}"


def shown_name(account: Account, name: str) -> str:
    """The reverse, of `/u1001.name` or `u1001.name`."""
    slash = "/" if name.startswith("/") else ""
    bare = name.lstrip("/")
    prefix = f"u{account.uid}."
    return slash + (bare[len(prefix) :] if bare.startswith(prefix) else bare)


def wish(account: Account, asked: dict[str, Any]) -> Wish:
    """Refusal (403) where more is asked than a shared server gives."""
    host = _host(asked)
    _only(asked, (*KNOWN, *BOOLS, *WITHOUT_EFFECT, "StopSignal", "OnBuild", "ArgsEscaped"), "")
    _only(host, (*HOST_KNOWN, *_LIMITS, *HOST_WITHOUT_EFFECT), "HostConfig.")
    if asked.get("User") not in (None, "", str(account.uid), f"{account.uid}:{account.gid}"):
        raise Refusal(403, "a container on a shared server runs as its own account")
    if asked.get("Volumes"):
        raise Refusal(403, "a shared server gives no volumes")
    restart = (host.get("RestartPolicy") or {}).get("Name")
    if restart not in (None, "", "no"):
        raise Refusal(403, "a shared server restarts no containers")
    if host.get("IpcMode") not in (None, "", "none", "private"):
        raise Refusal(403, "a container on a shared server shares nothing with another")
    if host.get("NetworkMode") not in (None, "", "default", "bridge", "none"):
        raise Refusal(403, "a container on a shared server is in its account's own network")
    labels = labels_of(asked)
    listed = [labels, asked.get("Cmd"), asked.get("Entrypoint")]
    if len(json.dumps(listed)) > MOST_LISTED_BYTES:
        most = f"{MOST_LISTED_BYTES >> 10} KiB"
        raise Refusal(
            413, f"labels and command of a container on a shared server are {most} at most"
        )
    port = labels.get("labctl.service-port", "0")
    number = int(port) if PORT.fullmatch(port) and int(port) < 65536 else 0
    if host.get("PortBindings") and not number:
        raise Refusal(403, "a shared server publishes no ports: services are on Unix sockets")
    return Wish(_binds(host), _gpus(host), number)


def covers(image: dict[str, Any], binds: list[Bind], share: Share) -> list[dict[str, Any]]:
    """Memory in place of the volumes that an image names; Refusal for too many, or no paths."""
    found = engine.covers(image, {one.target for one in binds} | set(TMPFS), tmp_bytes(share))
    if len(found) > MOST_MOUNTS or not all(_is_path(one["Target"]) for one in found):
        raise Refusal(403, "a shared server does not give the volumes that this image names")
    return found


def _is_path(target: str) -> bool:
    return target.startswith("/") and len(target) <= MOST_TARGET


def body(
    account: Account,
    asked: dict[str, Any],
    *,
    image: str,
    mounts: list[dict[str, Any]],
    gpus: list[str],
    gpu_groups: list[str],
    labels: dict[str, str],
    share: Share,
    network: str,
    parent: str,
) -> dict[str, Any]:
    """The whole of what the engine is asked to make. `image` is an id, `mounts` the engine's."""
    host = _host(asked)
    alone = host.get("NetworkMode") == "none"
    made: dict[str, Any] = {key: bool(asked.get(key)) for key in BOOLS}
    made.update(
        {
            "Image": image,
            "User": f"{account.uid}:{account.gid}",
            "Env": [*_env(asked), f"NVIDIA_VISIBLE_DEVICES={','.join(gpus) or 'void'}"],
            "Labels": {
                **labels_of(asked),
                **dict.fromkeys(OWN_LABELS, ""),
                **labels,
                OWNER: str(account.uid),
            },
            "StopTimeout": _whole(asked, "StopTimeout", 120) or 10,
        }
    )
    for key in ("Cmd", "Entrypoint"):
        if asked.get(key) is not None:
            made[key] = _words(asked, key)
    for key in ("Hostname", "WorkingDir"):
        if asked.get(key):
            made[key] = _text(asked, key)
    made["HostConfig"] = {
        "Mounts": mounts,
        "SecurityOpt": ["no-new-privileges"],
        "CapDrop": ["ALL"],
        "Runtime": "runc",
        "IpcMode": "private",
        "GroupAdd": gpu_groups,
        "ReadonlyRootfs": True,
        "Tmpfs": {path: _tmp(share) for path in TMPFS},
        "LogConfig": {"Type": "json-file", "Config": LOG},
        "DeviceRequests": _requests(gpus),
        "NetworkMode": "none" if alone else network,
        "CgroupParent": parent,
        "Init": bool(host.get("Init")),
        "AutoRemove": bool(host.get("AutoRemove")),
        **_limits(host, share),
    }
    return made


def exec_body(account: Account, asked: dict[str, Any]) -> dict[str, Any]:
    """What is started in a container that runs: as the account, with no further rights."""
    if asked.get("User") not in (None, "", str(account.uid), f"{account.uid}:{account.gid}"):
        raise Refusal(403, "a command on a shared server runs as its own account")
    if asked.get("Privileged"):
        raise Refusal(403, "a shared server gives no privileges")
    made: dict[str, Any] = {key: bool(asked.get(key)) for key in BOOLS if key.startswith("A")}
    made.update(
        {
            "Tty": bool(asked.get("Tty")),
            "User": f"{account.uid}:{account.gid}",
            "Env": _env(asked),
            "Cmd": _words(asked, "Cmd"),
        }
    )
    if asked.get("WorkingDir"):
        made["WorkingDir"] = _text(asked, "WorkingDir")
    return made


def labels_of(asked: dict[str, Any]) -> dict[str, str]:
    """labctl's own labels, less those that only the broker sets."""
    found = asked.get("Labels") or {}
    if not isinstance(found, dict):
        raise Refusal(400, "Labels is no object")
    return {
        str(key): str(value)[:256]
        for key, value in found.items()
        if str(key).startswith("labctl.") and key not in OWN_LABELS
    }


def _host(asked: dict[str, Any]) -> dict[str, Any]:
    host = asked.get("HostConfig") or {}
    if not isinstance(host, dict):
        raise Refusal(400, "HostConfig is no object")
    return host


def _only(found: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    """Anything that is set, and is not known, is refused by name."""
    for key, value in found.items():
        if value and key not in known:
            raise Refusal(403, f"a shared server does not give {where}{str(key)[:60]}")


def _binds(host: dict[str, Any]) -> list[Bind]:
    found = host.get("Mounts") or []
    if not isinstance(found, list) or len(found) > MOST_MOUNTS:
        raise Refusal(400, "those are no mounts")
    made = []
    for one in found:
        if not isinstance(one, dict) or one.get("Type") != "bind":
            raise Refusal(403, "a shared server mounts directories of the account's own only")
        source, target = str(one.get("Source", "")), str(one.get("Target", ""))
        dots = "/../" in f"{target}/" or "/./" in f"{target}/"
        if not TARGET.fullmatch(target) or dots or len(target) > MOST_TARGET:
            raise Refusal(403, f"a shared server mounts nothing at {target[:100]!r}")
        made.append(Bind(source, target, bool(one.get("ReadOnly"))))
    if len({one.target for one in made}) != len(made):
        raise Refusal(400, "two mounts at one place")
    return made


def _gpus(host: dict[str, Any]) -> list[str]:
    wanted: list[str] = []
    for one in host.get("DeviceRequests") or []:
        groups = (one or {}).get("Capabilities")
        if one.get("Driver") not in (None, "", "nvidia") or groups != [["gpu"]]:
            raise Refusal(403, "a shared server gives GPUs, and no other devices")
        ids = one.get("DeviceIDs") or []
        wanted += [str(each) for each in ids] if ids else ["*"]
    return ["*"] if "*" in wanted else list(dict.fromkeys(wanted))


def _requests(gpus: list[str]) -> list[dict[str, Any]]:
    if not gpus:
        return []
    asked = {"Driver": "", "Capabilities": [["gpu"]], "Options": {}}
    return [{**asked, "Count": 0, "DeviceIDs": gpus}]


def _limits(host: dict[str, Any], share: Share) -> dict[str, int]:
    """Within the account's share, of which one container may have all."""
    memory = min(_whole(host, "Memory", share.memory_bytes) or share.memory_bytes, 1 << 62)
    most = round(share.cpus * 1e9)
    cpus = min(_whole(host, "NanoCpus", 1 << 50) or most, most)
    return {
        "Memory": memory,
        "MemorySwap": memory,
        "NanoCpus": cpus,
        "PidsLimit": _whole(host, "PidsLimit", share.pids) or share.pids,
        "ShmSize": min(_whole(host, "ShmSize", 1 << 50) or 64 * 1024**2, memory),
    }


def _tmp(share: Share) -> str:
    """Memory, since it is the account's own share of something; the root is read-only."""
    return f"rw,exec,nosuid,nodev,mode=1777,size={tmp_bytes(share)}"


def tmp_bytes(share: Share) -> int:
    return min(LARGEST_TMP, share.memory_bytes // 4)


def _env(asked: dict[str, Any]) -> list[str]:
    """NVIDIA's variables choose devices, and so are the broker's."""
    found = _words(asked, "Env") if asked.get("Env") else []
    return [one for one in found if "=" in one and not one.startswith("NVIDIA_VISIBLE_DEVICES")]


def _words(asked: dict[str, Any], key: str) -> list[str]:
    found = asked.get(key)
    if isinstance(found, str):
        return [found]
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise Refusal(400, f"{key} is no list of words")
    return list(found)


def _text(asked: dict[str, Any], key: str) -> str:
    found = asked[key]
    if not isinstance(found, str) or len(found) > 4096 or "\0" in found:
        raise Refusal(400, f"{key} is no text")
    return found


def _whole(asked: dict[str, Any], key: str, most: int) -> int:
    """A number of the request, at most `most`; 0 where none is asked."""
    found = asked.get(key) or 0
    if isinstance(found, bool) or not isinstance(found, int):
        raise Refusal(400, f"{key} is no whole number")
    return min(max(found, 0), most)
