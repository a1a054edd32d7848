"""The lab server image: named after its content, built once, through the engine's API."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from labctl.decoding import convert_value
from labctl.errors import BuildError, ProviderError
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.providers.local.engine import TIMEOUT_S

if TYPE_CHECKING:
    from docker import DockerClient

with lazy_imports(__name__):
    import hashlib
    import tempfile

    from docker import errors as docker_errors
    from requests import exceptions

REPOSITORY = "labctl-lab-server"
DEFAULT_BASE = "debian:bookworm-slim"
# What to type where no container registry can be reached.
BUILD_BASE = """\
scripts/base-image   # in your clone of labctl: builds a base image from Debian packages
export LABCTL_BASE_IMAGE=labctl-base:bookworm"""
# seconds that `labctl doctor` waits for the registry
REGISTRY_S = 5
BUILD_TIMEOUT_S = 1800
Progress = Callable[[str, float, float], None]
_STEP = r"^Step (\d+)/(\d+) : (.*)"


class BuildLine(Value, frozen=True):
    """One line of the engine's reply to a build; most have one of the two."""

    stream: str = ""
    error: str = ""


def content_hash(source: Path, base: str) -> str:
    """Hash the files below `source` and the base name; 12 hex digits."""
    digest = hashlib.sha256(base.encode())
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"\0{path.relative_to(source).as_posix()}\0{content}".encode())
    return digest.hexdigest()[:12]


def reference(source: Path, base: str = "") -> str:
    """Return the name of the image built from `source` and this base; "" is the default base."""
    return f"{REPOSITORY}:{content_hash(source, base or DEFAULT_BASE)}"


def has_image(docker: DockerClient, image: str) -> bool:
    try:
        docker.images.get(image)
    except docker_errors.ImageNotFound:
        return False
    return True


def ensure(docker: DockerClient, source: Path, base: str, progress: Progress) -> str:
    """Build the image if it is missing (about a minute), and return its name.

    A failed build is a BuildError whose `log_path` is the complete log, on this machine.
    """
    image = reference(source, base)
    if has_image(docker, image):
        return image
    with lock_package_file(source / "Dockerfile"):
        if not has_image(docker, image):
            _build(docker, image, source, base or DEFAULT_BASE, progress)
    return image


def find_base_problem(docker: DockerClient, base: str) -> str:
    """Return why the engine cannot get the base image; "" if it can, or does not answer in time."""
    base = base or DEFAULT_BASE
    if has_image(docker, base):
        return ""
    docker.api.timeout = REGISTRY_S
    try:
        docker.api.inspect_distribution(base)  # type: ignore[no-untyped-call]
    except docker_errors.APIError as error:
        return f"{base} is not available: {error.explanation or error}"
    except exceptions.Timeout:
        pass
    finally:
        docker.api.timeout = TIMEOUT_S
    return ""


def require_image(docker: DockerClient, image: str) -> str:
    """Return `image`, the user's own; ProviderError if the engine does not have it."""
    if not has_image(docker, image):
        raise ProviderError(
            f"Docker Engine has no image {image!r}",
            why="the setting server.local.image names it",
            hint=f"docker pull {image}",
        )
    return image


def list_unused_images(docker: DockerClient) -> list[str]:
    """List all lab server images, of any content and base, that no container uses."""
    used = {c.attrs["ImageID"] for c in docker.containers.list(all=True, sparse=True)}
    return sorted(
        tag
        for image in docker.images.list(name=REPOSITORY)
        if image.id not in used
        for tag in image.tags
    )


@contextmanager
def lock_package_file(file: Path) -> Iterator[None]:
    """Lock a file, if its file system has locks, so that two labs build an image only once."""
    # Not filelock, which opens the file for writing: it belongs to the installed package.
    with file.open() as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(docker: DockerClient, image: str, source: Path, base: str, progress: Progress) -> None:
    step = ""
    log: list[str] = []
    lines: Iterable[object] = docker.api.build(
        path=str(source),
        tag=image,
        buildargs={"BASE": base, "STAMP": image},
        rm=True,
        forcerm=True,
        decode=True,
        timeout=BUILD_TIMEOUT_S,
    )
    for body in lines:
        line = convert_value(body, BuildLine)
        text = line.stream or line.error
        log.append(text)
        if match := re.match(_STEP, text):
            if step:
                progress(_describe_step(step), 1, 1)
            step = match[3].strip()
            progress(_describe_step(step), int(match[1]) - 1, int(match[2]))
        if line.error:
            raise _make_build_error(step, base, text.strip(), "".join(log))
    progress(_describe_step(step), 1, 1)


def _describe_step(step: str) -> str:
    """Name the bar of one step of the Dockerfile."""
    return f"lab server image: {step[:60]}"


def _make_build_error(step: str, base: str, reason: str, log: str) -> BuildError:
    with tempfile.NamedTemporaryFile(
        "w", prefix="labctl-build-", suffix=".log", delete=False
    ) as file:
        file.write(log)
    if step.startswith("FROM"):
        return BuildError(
            f"the base image {base!r} is not available",
            why=reason,
            hint=f"{BUILD_BASE}\nlabctl up",
            log_path=file.name,
        )
    return BuildError(
        f"the lab server image did not build: {step}",
        why="\n".join(log.splitlines()[-8:]),
        hint=f"less {file.name}",
        log_path=file.name,
    )
