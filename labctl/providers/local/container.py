"""A lab server as a container: the options of its creation, and its state as a Server.

Its labels hold everything about it, so that a lost state directory can be rebuilt from them.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from labctl.lazy import lazy_imports
from labctl.model import CreateServerRequest, Endpoint, Offer, Server, ServerState
from labctl.providers.local import cache
from labctl.providers.local.engine import inspect_engine
from labctl.retry import retry_on

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

with lazy_imports(__name__):
    import tarfile

    from docker import errors as docker_errors

T = TypeVar("T")

SERVER_LABEL = "labctl.server"
TOKEN_LABEL = "labctl.token"
LAB_LABEL = "labctl.lab"
LAB_ID_LABEL = "labctl.lab-id"
OWNER_LABEL = "labctl.owner"
IDENTITY_LABEL = "labctl.identity"
CREATED_AT_LABEL = "labctl.created-at"
# Labels that `make_labels` gives every server. Other programs made a container without them.
_SERVER_LABELS = {SERVER_LABEL, LAB_LABEL, LAB_ID_LABEL, IDENTITY_LABEL, CREATED_AT_LABEL}

OFFER = Offer(provider="local", type="container")
# Three for an engine inside a container; SYS_PTRACE for its `docker exec` into containers that do
# not run as root, since joining another user's namespaces requires the right to ptrace.
CAPABILITIES = ("SYS_ADMIN", "NET_ADMIN", "MKNOD", "SYS_PTRACE")
# Seconds; a server that shuts down gives its containers ten of them, then ends its engine.
STOP_TIMEOUT_S = 30
CLEAR_TIMEOUT_S = 60

_STATES: dict[str, ServerState] = {
    # Its creator died before starting it; `start` does that.
    "created": "stopped",
    "restarting": "starting",
    "running": "running",
    "paused": "stopped",
    "exited": "stopped",
    "removing": "terminated",
    "dead": "terminated",
}


def make_server_id(request: CreateServerRequest) -> str:
    """Return the server's id, which is also the container's name; the same for one attempt."""
    return f"labctl-{request.lab}-{request.lab_id[:6]}-{request.token[:4]}"


def make_labels(request: CreateServerRequest, owner: str, cache_owner: str) -> dict[str, str]:
    return {
        **request.tags,
        SERVER_LABEL: make_server_id(request),
        TOKEN_LABEL: request.token,
        LAB_LABEL: request.lab,
        LAB_ID_LABEL: request.lab_id,
        OWNER_LABEL: owner,
        cache.CLAIM_LABEL: cache_owner,
        IDENTITY_LABEL: request.identity,
        CREATED_AT_LABEL: f"{time.time():.3f}",
    }


def create(
    docker: DockerClient,
    image: str,
    name: str,
    volume: str,
    request: CreateServerRequest,
    labels: dict[str, str],
    *,
    capabilities: tuple[str, ...] = (),
    memory_bytes: int = 0,
    cpus: float = 0.0,
) -> Container:
    """Create the container of a server, with an engine inside it; 0 is no limit.

    No --privileged: these are enough, and more machines allow them. With cgroup v1 the engine
    inside needs the host's tree; with v2 a private namespace is enough, and nothing is mounted.
    """
    cgroup_v1 = inspect_engine(docker).cgroup_version == "1"
    volumes = {volume: {"bind": cache.MOUNT_POINT, "mode": "rw"}}
    if cgroup_v1:
        volumes["/sys/fs/cgroup"] = {"bind": "/sys/fs/cgroup", "mode": "rw"}
    return docker.containers.create(
        image,
        name=name,
        hostname=request.lab,
        labels=labels,
        environment={"LABCTL_AUTHORIZED_KEY": request.public_key},
        init=True,
        cap_add=[*CAPABILITIES, *capabilities],
        security_opt=["seccomp=unconfined", "apparmor=unconfined", "label=disable"],
        cgroupns="host" if cgroup_v1 else "private",
        volumes=volumes,
        tmpfs={"/run": ""},
        ports={"22/tcp": ("127.0.0.1", 0)},
        mem_limit=memory_bytes or None,
        nano_cpus=int(cpus * 1e9) or None,
    )


def list_labeled(docker: DockerClient, label: str) -> list[Container]:
    """List every container with that label, in any state."""
    return _read_again(lambda: _list_once(docker, label))


def list_servers(docker: DockerClient, label: str) -> list[Server]:
    """List the servers with that label. A claim does not count: it is not a server yet."""

    def read() -> list[Server]:
        return [parse_server(one) for one in _list_once(docker, label) if _is_server(one)]

    return _read_again(read)


def _is_server(container: Container) -> bool:
    return not cache.is_claim(container) and container.labels.keys() >= _SERVER_LABELS


def _list_once(docker: DockerClient, label: str) -> list[Container]:
    return docker.containers.list(all=True, ignore_removed=True, filters={"label": label})


def _read_again(read: Callable[[], list[T]]) -> list[T]:
    """Call `read`, again if the engine fails.

    The engine fails to inspect a container whose removal has begun, and to read a file in it
    (moby/moby#49227: status 500). A moment later the list no longer has it.
    """
    return retry_on(docker_errors.APIError, pause_s=0.2, longest_pause_s=1.0, tries=6)(read)


def find_labeled(docker: DockerClient, label: str, value: str) -> Container | None:
    """Find the server with that label. A claim does not count: it is not a server yet."""
    containers = list_labeled(docker, f"{label}={value}")
    return next((container for container in containers if not cache.is_claim(container)), None)


def age_s(container: Container) -> float:
    return time.time() - float(container.labels[CREATED_AT_LABEL])


def parse_server(container: Container) -> Server:
    labels = container.labels
    return Server(
        id=labels[SERVER_LABEL],
        provider="local",
        lab=labels[LAB_LABEL],
        lab_id=labels[LAB_ID_LABEL],
        alias=labels[LAB_LABEL],
        endpoint=Endpoint(
            host="127.0.0.1",
            port=_get_published_port(container),
            user="student",
            identity=labels[IDENTITY_LABEL],
            host_key=_read_host_key(container),
        ),
        state=_STATES[container.status],
        offer=OFFER,
        created_at=float(labels[CREATED_AT_LABEL]),
        owner=labels.get(OWNER_LABEL, ""),
    )


def start(container: Container) -> None:
    """Start a container; remove it if the engine cannot start it."""
    try:
        container.start()
    except docker_errors.APIError:
        container.remove(force=True)
        raise
    container.reload()


def clear_and_stop(container: Container, progress: Callable[[str, float, float], None]) -> None:
    """Delete the containers in a server and their data, keep the images in the volume, stop it.

    If deleting fails, the next server with this volume does it at its first boot.
    """
    if container.status == "running":
        clear = "/usr/local/lib/lab-server/clear.sh"
        with show_part(progress, f"deleting the containers on {container.name}"):
            container.exec_run(["timeout", str(CLEAR_TIMEOUT_S), clear])
        with show_part(progress, f"stopping {container.name}"):
            container.stop(timeout=STOP_TIMEOUT_S)


@contextmanager
def show_part(progress: Callable[[str, float, float], None], text: str) -> Iterator[None]:
    """Show a part of a long wait while it lasts: on a busy machine, one can take half a minute."""
    progress(text, 0, 0)  # nothing says how far it is
    try:
        yield
    finally:
        progress(text, 1, 1)


def copy_first_boot_script(container: Container, script: str) -> None:
    """Copy `script` to where the first boot runs it, as root."""
    content = script.encode()
    member = tarfile.TarInfo("first-boot")
    member.size = len(content)
    member.mode = 0o700
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(member, io.BytesIO(content))
    container.put_archive("/var/lib/labctl", buffer.getvalue())


def _get_published_port(container: Container) -> int:
    """Return the port of its sshd: 0 while it is stopped, another one after each start."""
    published = container.attrs["NetworkSettings"]["Ports"].get("22/tcp")
    return int(published[0]["HostPort"]) if published else 0


def _read_host_key(container: Container) -> str:
    """Read the server's public key through the engine; "" until its first boot has created it."""
    try:
        chunks, _ = container.get_archive("/etc/ssh/ssh_host_ed25519_key.pub")
    except docker_errors.NotFound:
        return ""
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
        file = archive.extractfile(archive.next() or "")
        words = file.read().decode().split() if file else []
    return " ".join(words[:2])
