"""Lab servers as containers on this machine, through its Docker Engine.

Everything on the host is named `labctl-...`; the labels below are the truth about a server, so
that a lost state directory is rebuilt from them. A server's own /var/lib/docker is a volume of the
pool in cache.py: the next server finds the images that this one built.
"""

from __future__ import annotations

import io
import tarfile
import time
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from labctl.errors import EngineError, ProviderError
from labctl.model import (
    GIB,
    Check,
    CreateRequest,
    Endpoint,
    Need,
    Offer,
    Resource,
    Server,
    ServerState,
    Value,
)
from labctl.providers import Surroundings
from labctl.providers.local import cache, engine, image

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

SERVER_LABEL = "labctl.server"
TOKEN_LABEL = "labctl.token"

OFFER = Offer(provider="local", type="container")
CAPABILITIES = ("SYS_ADMIN", "NET_ADMIN", "MKNOD")
STOP_TIMEOUT_S = 30
"""A server that shuts down gives its containers ten seconds, then ends its engine."""
CLEAR_TIMEOUT_S = 60
LOW_DISK_BYTES = 10 * GIB

_STATES: dict[str, ServerState] = {
    "created": "starting",
    "restarting": "starting",
    "running": "running",
    "paused": "stopped",
    "exited": "stopped",
    "removing": "terminated",
    "dead": "terminated",
}


class LocalSettings(Value, frozen=True):
    """lab.yaml's `server.local`.

    `memory` ("8GB") and `cpus` limit the server with all that runs in it. `image` is your own
    lab-server image, made FROM the one that labctl builds, and `extra_capabilities` what it needs
    beyond the three that an engine inside a container does.
    """

    memory: str = ""
    cpus: float = 0.0
    image: str = ""
    extra_capabilities: tuple[str, ...] = ()


class LocalProvider:
    """A Provider that is also Stoppable and has a Console. Its servers cost nothing."""

    name: ClassVar[str] = "local"
    settings_type: ClassVar[type[Value]] = LocalSettings

    def __init__(self, settings: LocalSettings, surroundings: Surroundings) -> None:
        self.settings = settings
        self.surroundings = surroundings
        self._source = surroundings.data_dir / "images" / "lab-server"

    def check(self) -> list[Check]:
        try:
            with engine.connected() as docker:
                info = docker.info()
                base = self.surroundings.base_image
                built = image.exists(docker, image.reference(self._source, base))
        except EngineError as error:
            return [
                Check(
                    name="Docker Engine", ok=False, detail=f"{error}: {error.why}", next=error.hint
                )
            ]
        return [_engine_check(info), *_disk_checks(info), _image_check(built)]

    def offers(self, need: Need) -> list[Offer]:
        return [] if need.gpu.required else [OFFER]

    def create(self, offer: Offer, request: CreateRequest) -> Server:
        """The first one on this machine builds the server's image, which takes about a minute."""
        with engine.connected() as docker:
            container = self._named(docker, request)
            if container.status == "created":
                if request.first_boot:
                    container.put_archive("/var/lib/labctl", _tar("first-boot", request.first_boot))
                container.start()
                container.reload()
            return _server(container)

    def find(self, server_id: str) -> Server | None:
        with engine.connected() as docker:
            container = _labelled(docker, SERVER_LABEL, server_id)
            return None if container is None else _server(container)

    def servers(self) -> list[Server]:
        with engine.connected() as docker:
            return [_server(container) for container in _all_labelled(docker, SERVER_LABEL)]

    def terminate(self, server_id: str) -> None:
        from docker.errors import APIError, NotFound

        with engine.connected() as docker:
            container = _labelled(docker, SERVER_LABEL, server_id)
            if container is None:
                return
            with suppress(NotFound):
                _clear_and_stop(container)
                try:
                    container.remove(force=True, v=True)
                except APIError as error:
                    # Somebody else is removing it at this moment.
                    if error.status_code != HTTPStatus.CONFLICT:
                        raise

    def leftovers(self) -> list[Resource]:
        """Only caches, of kind "cache": they cost disk space and make the next `up` quick."""
        with engine.connected() as docker:
            volumes = cache.free(docker)
            running = {c.attrs["ImageID"] for c in docker.containers.list(all=True, sparse=True)}
            images = [
                tag
                for found in docker.images.list(name=image.REPOSITORY)
                if found.id not in running
                for tag in found.tags
            ]
        return [
            *(_cached(name, f"images and layers: docker volume rm {name}") for name in volumes),
            *(_cached(tag, f"the server's own image: docker image rm {tag}") for tag in images),
        ]

    def remove(self, resource: Resource) -> None:
        from docker.errors import NotFound

        with engine.connected() as docker, suppress(NotFound):
            if resource.id.startswith(f"{image.REPOSITORY}:"):
                docker.images.remove(resource.id)
            else:
                docker.volumes.get(resource.id).remove()

    def stop(self, server_id: str) -> None:
        with engine.connected() as docker:
            self._present(docker, server_id).stop(timeout=STOP_TIMEOUT_S)

    def start(self, server_id: str) -> None:
        """The server gets another port: ask `find` for it."""
        with engine.connected() as docker:
            self._present(docker, server_id).start()

    def console(self, server_id: str) -> str:
        with engine.connected() as docker:
            return self._present(docker, server_id).logs(tail=200).decode(errors="replace")

    def _present(self, docker: DockerClient, server_id: str) -> Container:
        container = _labelled(docker, SERVER_LABEL, server_id)
        if container is None:
            raise ProviderError(f"there is no server {server_id!r} here", hint="labctl status")
        return container

    def _named(self, docker: DockerClient, request: CreateRequest) -> Container:
        """The container of this attempt, under its own name; perhaps not started yet."""
        from docker.errors import APIError

        known = _labelled(docker, TOKEN_LABEL, request.token)
        if known is not None and not cache.is_claim(known):
            return known
        if known is not None:
            known.remove(force=True)
        server_image = self._image(docker)
        cgroup_v1 = docker.info().get("CgroupVersion", "1") == "1"
        container = cache.claim(
            docker,
            lambda name, volume: docker.containers.create(
                server_image, name=name, **self._container(request, volume, cgroup_v1)
            ),
        )
        try:
            container.rename(server_id_of(request))
        except APIError:
            container.remove(force=True)
            known = _labelled(docker, TOKEN_LABEL, request.token)
            if known is None:
                raise
            return known
        container.reload()
        return container

    def _image(self, docker: DockerClient) -> str:
        if self.settings.image:
            return image.given(docker, self.settings.image)
        around = self.surroundings
        return image.ensure(docker, self._source, around.base_image, around.progress)

    def _container(self, request: CreateRequest, volume: str, cgroup_v1: bool) -> dict[str, Any]:
        """What `docker run` would be told. No --privileged: these are enough, and allowed more
        often. With cgroup v1 the engine inside needs the host's tree; with v2 a namespace does."""
        volumes = {volume: {"bind": cache.MOUNT_POINT, "mode": "rw"}}
        if cgroup_v1:
            volumes["/sys/fs/cgroup"] = {"bind": "/sys/fs/cgroup", "mode": "rw"}
        limits: dict[str, Any] = {}
        if self.settings.memory:
            limits["mem_limit"] = self.settings.memory
        if self.settings.cpus:
            limits["nano_cpus"] = int(self.settings.cpus * 1e9)
        return {
            "hostname": request.lab,
            "labels": self._labels(request),
            "environment": {"LABCTL_AUTHORIZED_KEY": request.public_key},
            "init": True,
            "cap_add": [*CAPABILITIES, *self.settings.extra_capabilities],
            "security_opt": ["seccomp=unconfined", "apparmor=unconfined", "label=disable"],
            "cgroupns": "host" if cgroup_v1 else "private",
            "volumes": volumes,
            "tmpfs": {"/run": ""},
            "ports": {"22/tcp": ("127.0.0.1", 0)},
            **limits,
        }

    def _labels(self, request: CreateRequest) -> dict[str, str]:
        return {
            **request.tags,
            SERVER_LABEL: server_id_of(request),
            TOKEN_LABEL: request.token,
            "labctl.lab": request.lab,
            "labctl.lab-id": request.lab_id,
            "labctl.owner": self.surroundings.owner,
            "labctl.identity": request.identity,
            "labctl.created-at": f"{time.time():.3f}",
        }


def server_id_of(request: CreateRequest) -> str:
    """The server's id and the container's name, the same for the same attempt."""
    return f"labctl-{request.lab}-{request.lab_id[:6]}-{request.token[:4]}"


def _all_labelled(docker: DockerClient, label: str) -> list[Container]:
    return docker.containers.list(all=True, ignore_removed=True, filters={"label": label})


def _labelled(docker: DockerClient, label: str, value: str) -> Container | None:
    return next(iter(_all_labelled(docker, f"{label}={value}")), None)


def _server(container: Container) -> Server:
    labels = container.labels
    return Server(
        id=labels[SERVER_LABEL],
        provider="local",
        lab=labels["labctl.lab"],
        lab_id=labels["labctl.lab-id"],
        alias=labels["labctl.lab"],
        endpoint=Endpoint(
            host="127.0.0.1",
            port=_published_port(container),
            user="student",
            identity=labels["labctl.identity"],
            host_key=_host_key(container),
        ),
        state=_STATES[container.status],
        offer=OFFER,
        created_at=float(labels["labctl.created-at"]),
    )


def _published_port(container: Container) -> int:
    """0 while it is stopped; another one after each start."""
    published = container.attrs["NetworkSettings"]["Ports"].get("22/tcp")
    return int(published[0]["HostPort"]) if published else 0


def _host_key(container: Container) -> str:
    """The server's public key, read through the engine; "" until its first boot made it."""
    from docker.errors import NotFound

    try:
        chunks, _ = container.get_archive("/etc/ssh/ssh_host_ed25519_key.pub")
    except NotFound:
        return ""
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
        file = archive.extractfile(archive.next() or "")
        words = file.read().decode().split() if file else []
    return " ".join(words[:2])


def _clear_and_stop(container: Container) -> None:
    """Containers and their data end with the server; images stay in the volume. Should clearing
    fail, the next server with this volume does it at its first boot."""
    if container.status == "running":
        clear = "/usr/local/lib/lab-server/clear.sh"
        container.exec_run(["timeout", str(CLEAR_TIMEOUT_S), clear])
        container.stop(timeout=STOP_TIMEOUT_S)


def _tar(name: str, text: str) -> bytes:
    content = text.encode()
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o700
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        archive.addfile(member, io.BytesIO(content))
    return whole.getvalue()


def _cached(name: str, note: str) -> Resource:
    return Resource(provider="local", kind="cache", id=name, note=f"kept for the next up; {note}")


def _engine_check(info: dict[str, Any]) -> Check:
    version = f"{info['ServerVersion']}, cgroup v{info.get('CgroupVersion', '1')}"
    linux = info["OSType"] == "linux"
    return Check(
        name="Docker Engine",
        ok=linux,
        detail=version if linux else f"{version}, runs {info['OSType']} containers",
        next="" if linux else "switch Docker to Linux containers",
    )


def _disk_checks(info: dict[str, Any]) -> list[Check]:
    """Nothing where the engine's disk is out of sight (Docker Desktop keeps it in a machine)."""
    import shutil

    root = Path(info["DockerRootDir"])
    try:
        free = shutil.disk_usage(root).free
    except (FileNotFoundError, PermissionError):
        return []
    ok = free >= LOW_DISK_BYTES
    return [
        Check(
            name="disk for images",
            ok=ok,
            detail=f"{free / GIB:.0f} GiB free in {root}",
            next="" if ok else "docker system df, then docker image prune",
        )
    ]


def _image_check(built: bool) -> Check:
    detail = "built" if built else "not built yet: the first up does it, in about a minute"
    return Check(name="lab server image", ok=True, detail=detail)
