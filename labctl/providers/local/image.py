"""The lab server's image: named after its content, built once, through the engine's API."""

from __future__ import annotations

import fcntl
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labctl.errors import BuildError, ProviderError

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "labctl-lab-server"
DEFAULT_BASE = "debian:bookworm-slim"
BUILD_TIMEOUT_S = 1800
Progress = Callable[[str, float, float], None]
_STEP = r"^Step (\d+)/(\d+) : (.*)"


def content_hash(source: Path, base: str) -> str:
    """Changes when a file below `source` or the base does; 12 hex digits."""
    digest = hashlib.sha256(base.encode())
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"\0{path.relative_to(source).as_posix()}\0{content}".encode())
    return digest.hexdigest()[:12]


def reference(source: Path, base: str = "") -> str:
    """The name of the image made of `source` and this base; "" is the default base."""
    return f"{REPOSITORY}:{content_hash(source, base or DEFAULT_BASE)}"


def exists(docker: DockerClient, image: str) -> bool:
    from docker.errors import ImageNotFound

    try:
        docker.images.get(image)
    except ImageNotFound:
        return False
    return True


def ensure(docker: DockerClient, source: Path, base: str, progress: Progress) -> str:
    """The image's name, after building it if it is missing (about a minute).

    A failed build is a BuildError whose `log_path` is the whole log, on this machine.
    """
    image = reference(source, base)
    if exists(docker, image):
        return image
    with _alone(source / "Dockerfile"):
        if not exists(docker, image):
            _build(docker, image, source, base or DEFAULT_BASE, progress)
    return image


def given(docker: DockerClient, image: str) -> str:
    """`image`, the user's own, if the engine has it."""
    if not exists(docker, image):
        raise ProviderError(
            f"there is no image {image!r} here",
            why="lab.yaml's server.local.image names it",
            hint=f"docker pull {image}",
        )
    return image


def unused(docker: DockerClient) -> list[str]:
    """Every lab server image, of any content and base, that no container was made from."""
    used = {found.attrs["ImageID"] for found in docker.containers.list(all=True, sparse=True)}
    return sorted(
        tag
        for found in docker.images.list(name=REPOSITORY)
        if found.id not in used
        for tag in found.tags
    )


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Two labs that come up at once build the image once, where the file system knows locks."""
    with file.open() as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(docker: DockerClient, image: str, source: Path, base: str, progress: Progress) -> None:
    step = ""
    log: list[str] = []
    lines: Iterator[dict[str, Any]] = docker.api.build(
        path=str(source),
        tag=image,
        buildargs={"BASE": base, "STAMP": image},
        rm=True,
        forcerm=True,
        decode=True,
        timeout=BUILD_TIMEOUT_S,
    )
    for line in lines:
        text = str(line.get("stream", "") or line.get("error", ""))
        log.append(text)
        if found := re.match(_STEP, text):
            step = found[3].strip()
            progress(f"lab server image: {step[:60]}", int(found[1]) - 1, int(found[2]))
        if "error" in line:
            raise _failed(step, base, text.strip(), "".join(log))
    progress("lab server image", 1, 1)


def _failed(step: str, base: str, reason: str, log: str) -> BuildError:
    from tempfile import NamedTemporaryFile

    with NamedTemporaryFile("w", prefix="labctl-build-", suffix=".log", delete=False) as file:
        file.write(log)
    if step.startswith("FROM"):
        return BuildError(
            f"the base image {base!r} cannot be had",
            why=reason,
            hint="without a container registry: scripts/base-image, then "
            "LABCTL_BASE_IMAGE=labctl-base:bookworm labctl up",
            log_path=file.name,
        )
    return BuildError(
        f"the lab server's image did not build: {step}",
        why="\n".join(log.splitlines()[-8:]),
        hint=f"less {file.name}",
        log_path=file.name,
    )
