"""One lab server as a container: what it is created with, and what can be read from it.

Its labels are the truth about it, so that a lost state directory is rebuilt from them.
"""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, Any

from labctl.model import CreateRequest, Endpoint, Offer, Server, ServerState
from labctl.providers.local import cache
from labctl.retry import retry_on

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

SERVER_LABEL = "labctl.server"
TOKEN_LABEL = "labctl.token"
LAB_LABEL = "labctl.lab"
LAB_ID_LABEL = "labctl.lab-id"
OWNER_LABEL = "labctl.owner"
IDENTITY_LABEL = "labctl.identity"
CREATED_AT_LABEL = "labctl.created-at"

OFFER = Offer(provider="local", type="container")
# Three for an engine inside a container; SYS_PTRACE for its `docker exec` into containers that do
# not run as root, since joining another user's namespaces is a ptrace right.
CAPABILITIES = ("SYS_ADMIN", "NET_ADMIN", "MKNOD", "SYS_PTRACE")
# A server that shuts down gives its containers ten seconds, then ends its engine.
STOP_TIMEOUT_S = 30
CLEAR_TIMEOUT_S = 60

_STATES: dict[str, ServerState] = {
    # Whoever made it ended before starting it; `start` does that.
    "created": "stopped",
    "restarting": "starting",
    "running": "running",
    "paused": "stopped",
    "exited": "stopped",
    "removing": "terminated",
    "dead": "terminated",
}


def server_id_of(request: CreateRequest) -> str:
    """The server's id and the container's name, the same for the same attempt."""
    return f"labctl-{request.lab}-{request.lab_id[:6]}-{request.token[:4]}"


def labels_of(request: CreateRequest, owner: str) -> dict[str, str]:
    return {
        **request.tags,
        SERVER_LABEL: server_id_of(request),
        TOKEN_LABEL: request.token,
        LAB_LABEL: request.lab,
        LAB_ID_LABEL: request.lab_id,
        OWNER_LABEL: owner,
        IDENTITY_LABEL: request.identity,
        CREATED_AT_LABEL: f"{time.time():.3f}",
    }


def options(*, volume: str, cgroup_v1: bool, capabilities: tuple[str, ...]) -> dict[str, Any]:
    """What `docker run` would be told for an engine inside a container.

    No --privileged: these are enough, and allowed more often. With cgroup v1 the engine inside
    needs the host's tree; with v2 a namespace of its own does, and nothing is mounted.
    """
    volumes = {volume: {"bind": cache.MOUNT_POINT, "mode": "rw"}}
    if cgroup_v1:
        volumes["/sys/fs/cgroup"] = {"bind": "/sys/fs/cgroup", "mode": "rw"}
    return {
        "init": True,
        "cap_add": [*CAPABILITIES, *capabilities],
        "security_opt": ["seccomp=unconfined", "apparmor=unconfined", "label=disable"],
        "cgroupns": "host" if cgroup_v1 else "private",
        "volumes": volumes,
        "tmpfs": {"/run": ""},
        "ports": {"22/tcp": ("127.0.0.1", 0)},
    }


def all_labelled(docker: DockerClient, label: str) -> list[Container]:
    """Every container with that label, whatever its state.

    The list inspects each container, and the engine fails to inspect one whose removal has begun
    (moby/moby#49227: status 500). A moment later the list is without it.
    """
    from docker.errors import APIError

    patient = retry_on(APIError, pause_s=0.2, longest_pause_s=1.0, tries=6)
    return patient(docker.containers.list, all=True, ignore_removed=True, filters={"label": label})


def labelled(docker: DockerClient, label: str, value: str) -> Container | None:
    """The server with that label. A claim is none yet: its maker is at work, or has died."""
    found = all_labelled(docker, f"{label}={value}")
    return next((container for container in found if not cache.is_claim(container)), None)


def age_s(container: Container) -> float:
    return time.time() - float(container.labels[CREATED_AT_LABEL])


def server_of(container: Container) -> Server:
    labels = container.labels
    return Server(
        id=labels[SERVER_LABEL],
        provider="local",
        lab=labels[LAB_LABEL],
        lab_id=labels[LAB_ID_LABEL],
        alias=labels[LAB_LABEL],
        endpoint=Endpoint(
            host="127.0.0.1",
            port=_published_port(container),
            user="student",
            identity=labels[IDENTITY_LABEL],
            host_key=_host_key(container),
        ),
        state=_STATES[container.status],
        offer=OFFER,
        created_at=float(labels[CREATED_AT_LABEL]),
    )


def start(container: Container) -> None:
    """Start it; one that the engine cannot start does not stay."""
    from docker.errors import APIError

    try:
        container.start()
    except APIError:
        container.remove(force=True)
        raise
    container.reload()


def clear_and_stop(container: Container) -> None:
    """Containers and their data end with the server; images stay in the volume. Should clearing
    fail, the next server with this volume does it at its first boot."""
    if container.status == "running":
        clear = "/usr/local/lib/lab-server/clear.sh"
        container.exec_run(["timeout", str(CLEAR_TIMEOUT_S), clear])
        container.stop(timeout=STOP_TIMEOUT_S)


def put_first_boot(container: Container, script: str) -> None:
    """Leave `script` where the first boot runs it, as root."""
    import tarfile

    content = script.encode()
    member = tarfile.TarInfo("first-boot")
    member.size = len(content)
    member.mode = 0o700
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        archive.addfile(member, io.BytesIO(content))
    container.put_archive("/var/lib/labctl", whole.getvalue())


def _published_port(container: Container) -> int:
    """0 while it is stopped; another one after each start."""
    published = container.attrs["NetworkSettings"]["Ports"].get("22/tcp")
    return int(published[0]["HostPort"]) if published else 0


def _host_key(container: Container) -> str:
    """The server's public key, read through the engine; "" until its first boot made it."""
    import tarfile

    from docker.errors import NotFound

    try:
        chunks, _ = container.get_archive("/etc/ssh/ssh_host_ed25519_key.pub")
    except NotFound:
        return ""
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
        file = archive.extractfile(archive.next() or "")
        words = file.read().decode().split() if file else []
    return " ".join(words[:2])
