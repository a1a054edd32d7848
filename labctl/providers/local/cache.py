"""Docker layers that outlive a server: a pool of volumes, each used by one server at a time.

Every owner has a separate pool, since layers may hold private data.

The engine is the only thing that all labs, users and processes on this machine share. Container
names are unique in it, so they serve as locks: a server is created under the name of the claim on
its volume, and gets its own name only when no other container has that volume. An earlier claimer
of the volume either still has the claim's name (so creating ours fails) or is seen using it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from labctl.lazy import lazy_imports
from labctl.providers.local import engine

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

with lazy_imports(__name__):
    from docker import errors as docker_errors

LABEL = "labctl.cache"
MOUNT_POINT = "/var/lib/docker"
_SUFFIX = "-claim"


def list_free_volumes(docker: DockerClient, owner: str) -> list[str]:
    """List the owner's volumes that no container uses, the oldest first: they hold the most."""
    used = {
        mount["Name"]
        for container in docker.containers.list(all=True, sparse=True)
        for mount in container.attrs["Mounts"]
        if mount["Type"] == "volume"
    }
    pool = docker.volumes.list(filters={"label": f"{LABEL}={owner}"})
    unused = [volume for volume in pool if volume.name not in used]
    return [volume.name for volume in sorted(unused, key=lambda v: (v.attrs["CreatedAt"], v.name))]


def claim(
    docker: DockerClient,
    owner: str,
    make: Callable[[str, str], Container],
    fill: Callable[[str, str], None] = lambda name, volume: None,
) -> Container:
    """Create a container with `make(name, volume)` that is the only one with its volume.

    If no volume of the pool is free, `fill(name, volume)` may put images into a new one. It works
    in a container of that name, so that no other process claims the volume meanwhile.
    """
    # Another process may be faster, even with a new volume; each time one of the two succeeds.
    for volume in chain(list_free_volumes(docker, owner), _new_volumes(docker, owner, fill)):
        try:
            container = make(volume + _SUFFIX, volume)
        except docker_errors.APIError as error:
            if error.status_code == engine.CONFLICT:
                continue
            raise
        if is_only_user(docker, container, volume):
            return container
        container.remove(force=True)
    raise AssertionError("there is always one more new volume")


def is_claim(container: Container) -> bool:
    """Whether it has claimed its volume but is not a server yet."""
    return str(container.name).endswith(_SUFFIX)


def get_volume(container: Container) -> str:
    """Return the volume of a server's engine; "" if it has none."""
    mounts = (mount for mount in container.attrs["Mounts"] if mount["Type"] == "volume")
    return next((m["Name"] for m in mounts if m["Destination"] == MOUNT_POINT), "")


def _new_volumes(
    docker: DockerClient, owner: str, fill: Callable[[str, str], None]
) -> Iterator[str]:
    first = _create_volume(docker, owner)
    fill(first + _SUFFIX, first)
    yield first
    while True:
        yield _create_volume(docker, owner)


def _create_volume(docker: DockerClient, owner: str) -> str:
    name = f"labctl-cache-{secrets.token_hex(4)}"
    docker.volumes.create(name, labels={LABEL: owner})
    return name


def is_only_user(docker: DockerClient, container: Container, volume: str) -> bool:
    """Whether no other container has the volume."""
    users = docker.containers.list(all=True, sparse=True, filters={"volume": volume})
    return all(user.id == container.id for user in users)
