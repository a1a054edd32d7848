"""Docker layers that outlive a server: a pool of volumes, each used by one server at a time.

Every owner has a separate pool, since layers may hold private data. `owner` is
`ProviderContext.cache_owner`: a login name alone would give all containers' root users one pool.

The engine is the only thing that all labs, users and processes on this machine share. Container
names are unique in it, so they serve as locks: a server is created under the name of the claim on
its volume, and gets its own name only when no other container has that volume. An earlier claimer
of the volume either still has the claim's name (so creating ours fails) or is seen using it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from labctl.lazy import lazy_imports
from labctl.providers.local import engine

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

with lazy_imports(__name__):
    import secrets

    from docker import errors as docker_errors

LABEL = "labctl.cache"
# A container with this label reads volumes and never starts, so it does not use them.
READER_LABEL = "labctl.cache-reader"
# On every container that claims a volume: the owner of the pool.
CLAIM_LABEL = "labctl.cache-owner"
MOUNT_POINT = "/var/lib/docker"
CLAIM_SUFFIX = "-claim"


def list_volumes(docker: DockerClient, owner: str) -> list[str]:
    """List the owner's volumes, the oldest first: they hold the most."""
    pool = docker.volumes.list(filters={"label": f"{LABEL}={owner}"})
    return [volume.name for volume in sorted(pool, key=lambda v: (v.attrs["CreatedAt"], v.name))]


def list_free_volumes(docker: DockerClient, owner: str) -> list[str]:
    """List the owner's volumes that no container uses, the oldest first."""
    used = {
        mount["Name"]
        for container in docker.containers.list(all=True, sparse=True)
        for mount in container.attrs["Mounts"]
        if mount["Type"] == "volume" and not _is_reader(container)
    }
    return [name for name in list_volumes(docker, owner) if name not in used]


def claim(
    docker: DockerClient,
    owner: str,
    make: Callable[[str, str], Container],
    suitable: Collection[str] = (),
    fill: Callable[[str, str], bool] = lambda name, volume: False,
) -> Container:
    """Create a container with `make(name, volume)` that is the only one with its volume.

    The first choice is a free volume among `suitable`. If all of those are in use,
    `fill(name, volume)` may make a new one as good, and returns whether it has. It works in a
    container of that name, so that no other process claims the volume meanwhile.
    """
    # Another process may be faster, even with a new volume; each time one of the two succeeds.
    for volume in _list_candidates(docker, owner, suitable, fill):
        try:
            container = make(volume + CLAIM_SUFFIX, volume)
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
    return str(container.name).endswith(CLAIM_SUFFIX)


def get_volume(container: Container) -> str:
    """Return the volume of a server's engine; "" if it has none."""
    mounts = (mount for mount in container.attrs["Mounts"] if mount["Type"] == "volume")
    return next((m["Name"] for m in mounts if m["Destination"] == MOUNT_POINT), "")


def _list_candidates(
    docker: DockerClient,
    owner: str,
    suitable: Collection[str],
    fill: Callable[[str, str], bool],
) -> Iterator[str]:
    free = list_free_volumes(docker, owner)
    yield from (volume for volume in free if volume in suitable)
    if suitable:
        yield from _fill_new_volume(docker, owner, fill)
    yield from (volume for volume in free if volume not in suitable)
    while True:
        yield _create_volume(docker, owner)


def _fill_new_volume(
    docker: DockerClient, owner: str, fill: Callable[[str, str], bool]
) -> Iterator[str]:
    volume = _create_volume(docker, owner)
    if fill(volume + CLAIM_SUFFIX, volume):
        yield volume
        return
    try:
        docker.volumes.get(volume).remove()
    except docker_errors.APIError as error:
        # Another process has claimed the empty volume.
        if error.status_code not in (engine.CONFLICT, engine.NOT_FOUND):
            raise


def _create_volume(docker: DockerClient, owner: str) -> str:
    name = f"labctl-cache-{secrets.token_hex(4)}"
    docker.volumes.create(name, labels={LABEL: owner})
    return name


def is_only_user(docker: DockerClient, container: Container, volume: str) -> bool:
    """Whether no other container uses the volume."""
    users = docker.containers.list(all=True, sparse=True, filters={"volume": volume})
    return all(user.id == container.id or _is_reader(user) for user in users)


def _is_reader(listed: Container) -> bool:
    return READER_LABEL in (listed.attrs["Labels"] or {})
