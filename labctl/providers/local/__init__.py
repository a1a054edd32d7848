"""Lab servers as containers on this machine, through its Docker Engine.

Everything on the host is named `labctl-...`. A server's own /var/lib/docker is a volume of the
pool in cache.py: the next server finds the images that this one built.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from labctl.config.reader import Parsed
from labctl.config.scalars import parse_cpus
from labctl.config.schema import Reference, Size
from labctl.errors import EngineError, NoOfferError, ProviderError
from labctl.model import Check, CreateRequest, Need, Offer, ProviderAccount, Resource, Server, Value
from labctl.providers import Surroundings
from labctl.providers.local import cache, checks, engine, image
from labctl.providers.local.container import (
    OFFER,
    SERVER_LABEL,
    STOP_TIMEOUT_S,
    TOKEN_LABEL,
    age_s,
    all_labelled,
    clear_and_stop,
    labelled,
    labels_of,
    options,
    put_first_boot,
    server_id_of,
    server_of,
    start,
)

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

# A claim is settled within a second; one this old is nobody's any more.
CLAIM_S = 60


class LocalSettings(Value, frozen=True):
    """lab.yaml's `server.local`.

    `memory` ("8GB") and `cpus` limit the server with all that runs in it; 0 is no limit. `image`
    is your own lab-server image, made FROM the one that labctl builds, and `extra_capabilities`
    what it needs beyond the three that an engine inside a container does.
    """

    memory_bytes: Size = msgspec.field(default=0, name="memory")
    cpus: Annotated[float, Parsed(parse_cpus)] = 0.0
    image: Reference = ""
    extra_capabilities: tuple[str, ...] = ()


class LocalProvider:
    """A Provider that is also Stoppable, Reclaim, and has a Console. Its servers cost nothing."""

    name: ClassVar[str] = "local"
    no_notice: ClassVar[str] = ""
    settings_type: ClassVar[type[Value]] = LocalSettings
    settle_s: float = 0.0

    def __init__(self, settings: LocalSettings, surroundings: Surroundings) -> None:
        self.settings = settings
        self.surroundings = surroundings
        self._source = surroundings.data_dir / "images" / "lab-server"

    def get_account(self) -> ProviderAccount:
        """A container on this machine costs nothing and is found again by its label."""
        return ProviderAccount()

    def check(self, need: Need | None = None) -> list[Check]:
        wanted = image.reference(self._source, self.surroundings.base_image)
        try:
            with engine.connected() as docker:
                return checks.of_engine(docker.info(), built=image.exists(docker, wanted))
        except EngineError as error:
            return checks.without_engine(error)

    def offers(self, need: Need) -> list[Offer]:
        if need.gpu.required:
            raise NoOfferError(
                f"local has no GPU for `gpu: {need.gpu.kind}`",
                why="a container on this machine runs on the CPU",
                hint="labctl up --gpu auto, or --provider static with this machine as a host",
            )
        return [OFFER]

    def create(self, offer: Offer, request: CreateRequest) -> Server:
        """The first one on this machine builds the server's image, which takes about a minute."""
        with engine.connected() as docker:
            container = labelled(docker, TOKEN_LABEL, request.token)
            if container is None:
                container = self._made(docker, request)
            if container.status == "created":
                start(container)
            return server_of(container)

    def find(self, server_id: str) -> Server | None:
        with engine.connected() as docker:
            container = labelled(docker, SERVER_LABEL, server_id)
            return None if container is None else server_of(container)

    def servers(self) -> list[Server]:
        with engine.connected() as docker:
            found = all_labelled(docker, SERVER_LABEL)
            return [server_of(container) for container in found if not cache.is_claim(container)]

    def terminate(self, server_id: str) -> None:
        from docker.errors import APIError, NotFound

        with engine.connected() as docker:
            container = labelled(docker, SERVER_LABEL, server_id)
            if container is None:
                return
            with suppress(NotFound):
                clear_and_stop(container)
                try:
                    container.remove(force=True, v=True)
                except APIError as error:
                    # Somebody else is removing it at this moment.
                    if error.status_code != engine.CONFLICT:
                        raise

    def leftovers(self) -> list[Resource]:
        """Caches, of kind "cache": they cost disk space and make the next `up` quick. And any
        container that a `create` killed midway never named."""
        with engine.connected() as docker:
            volumes = cache.free(docker, self.surroundings.owner)
            claims = [c for c in all_labelled(docker, SERVER_LABEL) if cache.is_claim(c)]
            images = image.unused(docker)
        return [
            *(
                Resource(provider="local", kind="container", id=str(claim.name))
                for claim in claims
                if age_s(claim) > CLAIM_S
            ),
            *map(self._layers, volumes),
            *(_cached(tag, f"the server's own image: docker image rm {tag}") for tag in images),
        ]

    def remove(self, resource: Resource) -> None:
        from docker.errors import NotFound

        with engine.connected() as docker, suppress(NotFound):
            if resource.kind == "container":
                docker.containers.get(resource.id).remove(force=True)
            elif resource.id.startswith(f"{image.REPOSITORY}:"):
                docker.images.remove(resource.id)
            else:
                docker.volumes.get(resource.id).remove()

    def stop(self, server_id: str) -> None:
        with engine.connected() as docker:
            _present(docker, server_id).stop(timeout=STOP_TIMEOUT_S)

    def start(self, server_id: str) -> None:
        """The server gets another port: ask `find` for it."""
        with engine.connected() as docker:
            _present(docker, server_id).start()

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        """No process in it gets a chance."""
        if notice_s:
            return False
        with engine.connected() as docker:
            _present(docker, server_id).remove(force=True, v=True)
        return True

    def console(self, server_id: str) -> str:
        with engine.connected() as docker:
            return _present(docker, server_id).logs(tail=200).decode(errors="replace")

    def _made(self, docker: DockerClient, request: CreateRequest) -> Container:
        """A new container of this attempt under its own name, all but started."""
        from docker.errors import APIError

        server_image = self._image(docker)
        cgroup_v1 = docker.info().get("CgroupVersion", "1") == "1"

        def make(name: str, volume: str) -> Container:
            return docker.containers.create(
                server_image,
                name=name,
                hostname=request.lab,
                labels=labels_of(request, self.surroundings.owner),
                environment={"LABCTL_AUTHORIZED_KEY": request.public_key},
                **options(
                    volume=volume,
                    cgroup_v1=cgroup_v1,
                    capabilities=self.settings.extra_capabilities,
                ),
                **self._limits(),
            )

        container = cache.claim(docker, self.surroundings.owner, make)
        try:
            if request.first_boot:
                put_first_boot(container, request.first_boot)
            container.rename(server_id_of(request))
        except APIError:
            container.remove(force=True)
            # The same attempt, running twice, was quicker; any other reason stands.
            if (twin := labelled(docker, TOKEN_LABEL, request.token)) is not None:
                return twin
            raise
        container.reload()
        return container

    def _image(self, docker: DockerClient) -> str:
        if self.settings.image:
            return image.given(docker, self.settings.image)
        around = self.surroundings
        return image.ensure(docker, self._source, around.base_image, around.progress)

    def _layers(self, name: str) -> Resource:
        note = f"images and layers: docker volume rm {name}"
        return _cached(name, note, lab=self.surroundings.owner)

    def _limits(self) -> dict[str, Any]:
        limits: dict[str, Any] = {}
        if self.settings.memory_bytes:
            limits["mem_limit"] = self.settings.memory_bytes
        if self.settings.cpus:
            limits["nano_cpus"] = int(self.settings.cpus * 1e9)
        return limits


def _present(docker: DockerClient, server_id: str) -> Container:
    container = labelled(docker, SERVER_LABEL, server_id)
    if container is None:
        raise ProviderError(f"there is no server {server_id!r} here", hint="labctl status")
    return container


def _cached(name: str, note: str, lab: str = "") -> Resource:
    note = f"kept for the next up; {note}"
    return Resource(provider="local", kind="cache", id=name, note=note, lab=lab)
