"""Lab servers as containers on this machine, through its Docker Engine.

Everything on the host is named `labctl-...`. A server's own /var/lib/docker is a volume of the
pool in cache.py: the next server finds the images that this one built.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from labctl.config.reader import Parsed
from labctl.config.scalars import parse_cpus
from labctl.config.schema import Reference, Size
from labctl.errors import EngineError, NoOfferError, ProviderError
from labctl.errors.subject import Subject
from labctl.lazy import lazy_imports
from labctl.model import (
    Check,
    CreateServerRequest,
    Need,
    Offer,
    ProviderAccount,
    Resource,
    Server,
    Value,
)
from labctl.providers import ProviderContext
from labctl.providers.local import cache, checks, engine, image
from labctl.providers.local.container import (
    OFFER,
    SERVER_LABEL,
    STOP_TIMEOUT_S,
    TOKEN_LABEL,
    age_s,
    clear_and_stop,
    copy_first_boot_script,
    create,
    find_labeled,
    list_labeled,
    list_servers,
    make_labels,
    make_server_id,
    parse_server,
    show_part,
    start,
)
from labctl.providers.local.image_copy import copy_images
from labctl.providers.local.volume_images import list_volumes_with

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

with lazy_imports(__name__):
    from docker import errors as docker_errors
    from requests import exceptions

# The engine lists no volumes while it deletes one, which takes minutes for a large one.
LIST_VOLUMES_S = 5
# A claim becomes a server within a second; after this many seconds its creator has died.
CLAIM_S = 60


class LocalSettings(Value, frozen=True):
    """lab.yaml's `server.local`.

    `memory` ("8GB") and `cpus` limit the server with everything that runs in it; 0 is no limit.
    `image` is your own lab-server image, built FROM the one that labctl builds, and
    `extra_capabilities` are capabilities that it needs beyond those of an engine in a container.
    """

    memory_bytes: Size = msgspec.field(default=0, name="memory")
    cpus: Annotated[float, Parsed(parse_cpus)] = 0.0
    image: Reference = ""
    extra_capabilities: tuple[str, ...] = ()


class LocalProvider:
    """A Provider, OnThisMachine, Stoppable, Reclaimable, ConsoleSource. Its servers are free."""

    name: ClassVar[str] = "local"
    on_this_machine: ClassVar[bool] = True
    no_notice: ClassVar[str] = ""
    settings_type: ClassVar[type[Value]] = LocalSettings
    settle_s: float = 0.0

    def __init__(self, settings: LocalSettings, context: ProviderContext) -> None:
        self.settings = settings
        self.context = context
        self._source = context.data_dir / "images" / "lab-server"

    def get_account(self) -> ProviderAccount:
        """Return no account: containers on this machine are free and found by their labels."""
        return ProviderAccount()

    def check(self, need: Need | None = None) -> list[Check]:
        server_image = image.reference(self._source, self.context.base_image)
        try:
            with engine.connect() as docker:
                built = image.has_image(docker, server_image)
                base = self.context.base_image
                return checks.list_engine_checks(
                    engine.inspect_engine(docker),
                    built=built,
                    base_problem="" if built else image.find_base_problem(docker, base),
                    owner=self.context.cache_owner,
                )
        except EngineError as error:
            return checks.make_no_engine_checks(error)

    def offers(self, need: Need) -> list[Offer]:
        if need.gpu.is_required:
            raise NoOfferError(
                f"local has no GPU for `gpu: {need.gpu.kind}`",
                why="a container on this machine runs on the CPU",
                hint=_render_gpu_hint,
            )
        return [OFFER]

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        """Create a server. The first one on this machine builds its image, for about a minute."""
        with engine.connect() as docker:
            container = find_labeled(docker, TOKEN_LABEL, request.token)
            if container is None:
                container = self._create_container(docker, request)
            if container.status == "created":
                start(container)
            return parse_server(container)

    def find(self, server_id: str) -> Server | None:
        with engine.connect() as docker:
            return next(iter(list_servers(docker, f"{SERVER_LABEL}={server_id}")), None)

    def servers(self) -> list[Server]:
        with engine.connect() as docker:
            return list_servers(docker, SERVER_LABEL)

    def terminate(self, server_id: str) -> None:
        with engine.connect() as docker:
            container = find_labeled(docker, SERVER_LABEL, server_id)
            if container is None:
                return
            with suppress(docker_errors.NotFound):
                clear_and_stop(container, self.context.progress)
                try:
                    with show_part(self.context.progress, f"deleting {container.name}"):
                        container.remove(force=True, v=True)
                except docker_errors.APIError as error:
                    # Another process is removing it at this moment.
                    if error.status_code != engine.CONFLICT:
                        raise

    def leftovers(self) -> list[Resource]:
        """List caches, which use disk space and make the next `up` faster, and abandoned claims.

        An abandoned claim is a container of a `create` that was killed halfway.
        """
        with engine.connect() as docker:
            owner = self.context.cache_owner
            every = list_labeled(docker, SERVER_LABEL)
            owned = [one for one in every if one.labels.get(cache.CLAIM_LABEL, owner) == owner]
            claims = [container for container in owned if cache.is_claim(container)]
            images = image.list_unused_images(docker)
        return [
            *(
                Resource(
                    provider="local",
                    kind="container",
                    id=str(claim.name),
                    note=f"abandoned: docker rm {claim.name}",
                )
                for claim in claims
                if age_s(claim) > CLAIM_S
            ),
            *map(self._describe_layers, self._list_free_volumes()),
            *(
                _describe_cache(tag, f"the server's own image; to remove it: docker image rm {tag}")
                for tag in images
            ),
        ]

    def remove(self, resource: Resource) -> None:
        with engine.connect() as docker, suppress(docker_errors.NotFound):
            if resource.kind == "container":
                docker.containers.get(resource.id).remove(force=True)
            elif resource.id.startswith(f"{image.REPOSITORY}:"):
                docker.images.remove(resource.id)
            else:
                docker.volumes.get(resource.id).remove()

    def stop(self, server_id: str) -> None:
        with engine.connect() as docker:
            _get_container(docker, server_id).stop(timeout=STOP_TIMEOUT_S)

    def start(self, server_id: str) -> None:
        """Start a stopped server. It gets another port, which `find` returns."""
        with engine.connect() as docker:
            _get_container(docker, server_id).start()

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        """Kill the server at once; its processes get no signal to end themselves."""
        if notice_s:
            return False
        with engine.connect() as docker:
            _get_container(docker, server_id).remove(force=True, v=True)
        return True

    def read_console(self, server_id: str) -> str:
        with engine.connect() as docker:
            return _get_container(docker, server_id).logs(tail=200).decode(errors="replace")

    def _create_container(self, docker: DockerClient, request: CreateServerRequest) -> Container:
        """Create the container of this attempt under its own name, without starting it."""
        container = self._claim_volume(docker, request)
        try:
            if request.first_boot:
                copy_first_boot_script(container, request.first_boot)
            container.rename(make_server_id(request))
        except docker_errors.APIError:
            container.remove(force=True)
            # A second process with the same attempt was faster; any other error is raised.
            if (twin := find_labeled(docker, TOKEN_LABEL, request.token)) is not None:
                return twin
            raise
        container.reload()
        return container

    def _claim_volume(self, docker: DockerClient, request: CreateServerRequest) -> Container:
        """Create the container under the name of its claim, with the best volume for its image."""
        server_image = self._ensure_image(docker)
        owner, wanted = self.context.cache_owner, request.image
        suitable = list_volumes_with(docker, server_image, owner, wanted) if wanted else []

        def make(name: str, volume: str) -> Container:
            return create(
                docker,
                server_image,
                name,
                volume,
                request,
                make_labels(request, self.context.owner, owner),
                capabilities=self.settings.extra_capabilities,
                memory_bytes=self.settings.memory_bytes,
                cpus=self.settings.cpus,
            )

        def fill(name: str, volume: str) -> bool:
            source = suitable[0]
            return copy_images(docker, self.context, server_image, source, name, volume)

        return cache.claim(docker, owner, make, suitable, fill)

    def _ensure_image(self, docker: DockerClient) -> str:
        if self.settings.image:
            return image.require_image(docker, self.settings.image)
        context = self.context
        return image.ensure(docker, self._source, context.base_image, context.progress)

    def _list_free_volumes(self) -> list[str]:
        with engine.connect(LIST_VOLUMES_S) as docker:
            try:
                return cache.list_free_volumes(docker, self.context.cache_owner)
            except exceptions.ReadTimeout:
                busy = "Docker Engine is busy, for example deleting a volume"
                self.context.note(f"image caches, which are free, are not listed: {busy}")
                return []

    def _describe_layers(self, name: str) -> Resource:
        note = f"to remove its images and layers: docker volume rm {name}"
        return _describe_cache(name, note, lab=self.context.owner)


def _render_gpu_hint(subject: Subject) -> str:
    if subject.kind != "lab":
        return f"change `gpu:` under `server:` in {subject.config_file}"
    return "labctl up --gpu auto\nlabctl up --provider static   # with this machine as a host"


def _get_container(docker: DockerClient, server_id: str) -> Container:
    container = find_labeled(docker, SERVER_LABEL, server_id)
    if container is None:
        raise ProviderError(
            f"this machine has no container of the server {server_id!r}",
            hint=lambda subject: subject.status,
        )
    return container


def _describe_cache(name: str, note: str, lab: str = "") -> Resource:
    note = f"kept for the next up; {note}"
    return Resource(provider="local", kind="cache", id=name, note=note, lab=lab)
