"""Which volumes of the pool have an image: read from the files in which their engines list it.

The files are read through a container that is never started. Nothing is recorded elsewhere, so
this holds for every user of the pool and after a server was killed.
"""

from __future__ import annotations

import io
import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from labctl.lazy import lazy_imports
from labctl.providers.local import cache
from labctl.providers.local.container import (
    CREATED_AT_LABEL,
    SERVER_LABEL,
    age_s,
    list_labeled,
)

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

with lazy_imports(__name__):
    import secrets
    import tarfile

    from docker import errors as docker_errors
    from docker import utils as docker_utils

# The names of an engine's images, below its directory; of the storage driver that labctl's own
# server image uses. A volume without this file counts as one without images.
_NAMES = "image/overlay2/repositories.json"
# bytes of a volume's list, in a tar archive; one image takes some hundred
_MOST_BYTES = 16 * 1024**2
# A reader exists for seconds; after this many seconds its process has died.
ABANDONED_S = 600


def list_volumes_with(
    docker: DockerClient, helper_image: str, owner: str, reference: str
) -> list[str]:
    """List the owner's volumes that have the image, also those that servers use."""
    volumes = cache.list_volumes(docker, owner)
    if not volumes:
        return []
    _remove_abandoned_readers(docker, owner)
    reader = _create_reader(docker, helper_image, owner, volumes)
    try:
        wanted = _complete_name(reference)
        return [volume for volume in volumes if wanted in _read_names(reader, volume)]
    finally:
        reader.remove(force=True, v=True)


def _remove_abandoned_readers(docker: DockerClient, owner: str) -> None:
    """Remove the readers of processes that were killed: Docker removes no volume that one has."""
    for reader in list_labeled(docker, f"{cache.READER_LABEL}={owner}"):
        if age_s(reader) > ABANDONED_S:
            with suppress(docker_errors.APIError):  # another process is removing it
                reader.remove(force=True, v=True)


def _create_reader(docker: DockerClient, image: str, owner: str, volumes: list[str]) -> Container:
    """Create the container, with the labels by which a leftover of it is found."""
    name = f"labctl-reader-{secrets.token_hex(4)}{cache.CLAIM_SUFFIX}"
    return docker.containers.create(
        image,
        name=name,
        labels={
            cache.READER_LABEL: owner,
            SERVER_LABEL: name,
            cache.CLAIM_LABEL: owner,
            CREATED_AT_LABEL: str(time.time()),
        },
        network_mode="none",
        volumes={volume: {"bind": f"/pool/{volume}", "mode": "ro"} for volume in volumes},
    )


def _read_names(reader: Container, volume: str) -> set[str]:
    try:
        chunks, _ = reader.get_archive(f"/pool/{volume}/{_NAMES}")
    except docker_errors.NotFound:
        return set()
    # Whoever is root on a server can put anything there: a link, a directory, a file without end.
    content = bytearray()
    for chunk in chunks:
        content += chunk
        if len(content) > _MOST_BYTES:
            return set()
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            file = archive.extractfile(archive.next() or "")
            text = file.read() if file else b""
        repositories = json.loads(text)["Repositories"]
        return {name for names in repositories.values() for name in names}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, tarfile.TarError):
        return set()


def _complete_name(reference: str) -> str:
    """Return the name under which an engine lists the image: with a tag, without Docker Hub's."""
    repository, tag = docker_utils.parse_repository_tag(reference)
    short = repository.removeprefix("docker.io/").removeprefix("library/")
    return f"{short}{'@' if ':' in (tag or '') else ':'}{tag or 'latest'}"
