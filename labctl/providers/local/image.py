"""The lab server's image: named after its content, built once, through the engine's API."""

from __future__ import annotations

import fcntl
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labctl.errors import BuildError, ProviderError

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "labctl-lab-server"
DEFAULT_BASE = "debian:bookworm-slim"
BUILD_TIMEOUT_S = 1800
_STEP = re.compile(r"^Step (\d+)/(\d+) : (.*)")


def directory() -> Path:
    """Where the Dockerfile lies: inside the wheel, or in the clone of an editable install."""
    package = Path(__file__).parents[2]
    installed = package / "_data" / "images" / "lab-server"
    return installed if installed.is_dir() else package.parent / "images" / "lab-server"


def content_hash(source: Path, base: str) -> str:
    """Changes when a file below `source` or the base does; 12 hex digits."""
    digest = hashlib.sha256(base.encode())
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"\0{path.relative_to(source).as_posix()}\0{content}".encode())
    return digest.hexdigest()[:12]


def reference(base: str = "") -> str:
    """The image's name for this base; "" is the default base."""
    return f"{REPOSITORY}:{content_hash(directory(), base or DEFAULT_BASE)}"


def exists(docker: DockerClient, image: str) -> bool:
    from docker.errors import ImageNotFound

    try:
        docker.images.get(image)
    except ImageNotFound:
        return False
    return True


def ensure(
    docker: DockerClient, base: str, log_dir: Path, progress: Callable[[str, float, float], None]
) -> str:
    """The image's name, after building it if it is missing (about a minute).

    A failed build is a BuildError whose `log_path` is the whole log, below `log_dir` here.
    """
    image = reference(base)
    if exists(docker, image):
        return image
    with _alone(log_dir / "lab-server-build.lock"):
        if not exists(docker, image):
            _build(docker, image, base or DEFAULT_BASE, log_dir / "lab-server-build.log", progress)
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


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Two labs that come up at once build the image once."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(
    docker: DockerClient,
    image: str,
    base: str,
    log_path: Path,
    progress: Callable[[str, float, float], None],
) -> None:
    step = ""
    lines: Iterator[dict[str, Any]] = docker.api.build(
        path=str(directory()),
        tag=image,
        buildargs={"BASE": base, "STAMP": image},
        rm=True,
        forcerm=True,
        decode=True,
        timeout=BUILD_TIMEOUT_S,
    )
    with log_path.open("w", encoding="utf-8") as log:
        for line in lines:
            text = str(line.get("stream", "") or line.get("error", ""))
            log.write(text)
            if found := _STEP.match(text):
                step = found[3].strip()
                progress(f"lab server image: {step[:60]}", int(found[1]) - 1, int(found[2]))
            if "error" in line:
                log.flush()
                raise _failed(step, base, text, log_path)
    progress("lab server image", 1, 1)


def _failed(step: str, base: str, reason: str, log_path: Path) -> BuildError:
    if step.startswith("FROM"):
        return BuildError(
            f"the base image {base!r} cannot be had",
            why=reason.strip(),
            hint="without a container registry: scripts/base-image, then "
            "LABCTL_BASE_IMAGE=labctl-base:bookworm labctl up",
            log_path=str(log_path),
        )
    last = log_path.read_text(encoding="utf-8").splitlines()[-8:]
    return BuildError(
        f"the lab server's image did not build: {step}",
        why="\n".join(last),
        hint=f"less {log_path}",
        log_path=str(log_path),
    )
