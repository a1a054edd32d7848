"""Copy the images of a server on this machine to the volume of a new server.

It takes a fraction of the time that loading an archive takes: the engine writes an archive to its
disk, hashes it, and unpacks it. The layers of an image never change, and the engine that gets the
copy has not started yet, so copying its files is enough.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from labctl.lazy import lazy_imports
from labctl.providers.local import cache, engine
from labctl.providers.local.container import CREATED_AT_LABEL, SERVER_LABEL

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

    from labctl.providers import ProviderContext

with lazy_imports(__name__):
    from docker import errors as docker_errors
    from requests import exceptions

# All images of a server together; more would take longer to copy than one image takes to load.
MOST_BYTES = 6 * 1024**3
# What must remain free on the disk.
SPARE_BYTES = 4 * 1024**3
LONGEST_S = 300
_STEP = "images from another server on this machine"

# Copies the images and their layers from /from to /to, and nothing of any container. What names
# others is read before what it names, and moved into place after it: the new engine finds whole
# images or none. If an image was added or removed meanwhile, the script fails. A copy that is cut
# off costs disk space only.
_SCRIPT = """
set -eu
copy() { cp -R --no-dereference --preserve=mode,ownership,timestamps,links,xattr "$@"; }
cd /from/image/overlay2 || exit 10
bytes=$(awk '{ sum += $1 } END { printf "%.0f", sum }' layerdb/sha256/*/size)
free=$(($(stat -f -c '%a * %S' /to)))
test "$bytes" -le "$MOST_BYTES" || exit 11
test $((bytes + SPARE_BYTES)) -le "$free" || exit 12
staged=/to/.copying
trap 'rm -rf $staged' EXIT
mkdir -p $staged/image/overlay2/layerdb $staged/overlay2
copy repositories.json $staged/image/overlay2/
copy imagedb $staged/image/overlay2/
copy layerdb/sha256 $staged/image/overlay2/layerdb/
copy /from/overlay2/l $staged/overlay2/
for layer in $(awk 1 $staged/image/overlay2/layerdb/sha256/*/cache-id); do
  copy "/from/overlay2/$layer" $staged/overlay2/
done
cmp repositories.json $staged/image/overlay2/repositories.json || exit 13
mv $staged/overlay2 /to/
mv $staged/image /to/
"""
# Why the script ended, by its exit code.
_REASONS = {
    10: "its engine does not use the storage driver overlay2",
    11: f"together they have more than {MOST_BYTES // 1024**3} GiB",
    12: "the disk has too little space",
    13: "an image was added or removed meanwhile",
}


def copy_images(
    docker: DockerClient,
    context: ProviderContext,
    helper_image: str,
    source: str,
    name: str,
    volume: str,
) -> bool:
    """Copy all images of the volume `source` to the new volume `volume`.

    The copying container is called `name`, which claims `volume`. If another process has the
    volume, or if the copy fails, return False; there are no images in it then. A note says why a
    copy failed.
    """
    helper = _create_helper(docker, helper_image, context.cache_owner, name, source, volume)
    if helper is None:
        return False
    context.progress(_STEP, 0, 1)
    try:
        if not cache.is_only_user(docker, helper, volume):
            return False
        if failure := _run(helper):
            text = f"the images of another server were not copied: {failure}"
            context.note(f"{text}. The first run loads or builds its image.")
        return not failure
    finally:
        # v: the anonymous volume that the image declares
        helper.remove(force=True, v=True)
        context.progress(_STEP, 1, 1)


def _run(helper: Container) -> str:
    """Run the copying container; return why it failed, "" if it succeeded."""
    helper.start()
    try:
        code = helper.wait(timeout=LONGEST_S)["StatusCode"]
    except exceptions.RequestException:
        return f"it took longer than {LONGEST_S} s"
    if not code:
        return ""
    output = helper.logs(tail=1).decode(errors="replace").strip()
    return _REASONS.get(code) or f"{output or 'no output'} (exit code {code})"


def _create_helper(
    docker: DockerClient, image: str, owner: str, name: str, source: str, volume: str
) -> Container | None:
    """Create the copying container, with the labels by which a leftover of it is found.

    None if another process has a container of that name, and so the volume.
    """
    labels = {SERVER_LABEL: name, cache.CLAIM_LABEL: owner, CREATED_AT_LABEL: str(time.time())}
    try:
        return docker.containers.create(
            image,
            ["-c", _SCRIPT],
            name=name,
            labels=labels,
            entrypoint="sh",
            environment={"MOST_BYTES": str(MOST_BYTES), "SPARE_BYTES": str(SPARE_BYTES)},
            network_mode="none",
            # To copy the attributes "trusted.overlay.*", which mark directories as replaced.
            cap_add=["SYS_ADMIN"],
            volumes={
                source: {"bind": "/from", "mode": "ro"},
                volume: {"bind": "/to", "mode": "rw"},
            },
        )
    except docker_errors.APIError as error:
        if error.status_code == engine.CONFLICT:
            return None
        raise
