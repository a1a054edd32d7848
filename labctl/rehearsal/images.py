"""The image that a rehearsal's machines are containers of, and the directory each is given."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from labctl.config.places import environment, paths
from labctl.errors import BuildError
from labctl.model import Value
from labctl.providers.local import image as lab_server

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "labctl-rehearsal"
BUILD_TIMEOUT_S = 1800


class Building(Value, frozen=True):
    """What an image is built from. `stands_on` "" is the lab server's own image.

    `progress` is told what is done, how much of it and of how much.
    """

    data_dir: Path
    base_image: str
    progress: Callable[[str, float, float], None]
    stands_on: str = ""


def here(progress: Callable[[str, float, float], None] = lambda text, done, of: None) -> Building:
    """From labctl's own directories and the switches of this process's environment."""
    base = environment().get("LABCTL_BASE_IMAGE", "")
    return Building(data_dir=paths().data_dir, base_image=base, progress=progress)


def ensure(docker: DockerClient, building: Building) -> str:
    """The image's name, after building what is missing (a minute each)."""
    source = building.data_dir / "images" / "rehearsal"
    below = building.stands_on or lab_server.ensure(
        docker, building.data_dir / "images" / "lab-server", building.base_image, building.progress
    )
    name = f"{REPOSITORY}:{lab_server.content_hash(source, below)}"
    with (source / "Dockerfile").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not lab_server.exists(docker, name):
            building.progress("the rehearsal's machine image", 0, 1)
            _build(docker, source, name, below)
            building.progress("the rehearsal's machine image", 1, 1)
    return name


def _build(docker: DockerClient, source: Path, name: str, below: str) -> None:
    log: list[str] = []
    lines = docker.api.build(
        path=str(source),
        tag=name,
        buildargs={"LAB_SERVER": below},
        rm=True,
        forcerm=True,
        decode=True,
        timeout=BUILD_TIMEOUT_S,
    )
    for line in lines:
        log.append(str(line.get("stream", "") or line.get("error", "")))
        if "error" in line:
            raise BuildError(
                "the rehearsal's machine image did not build",
                why="".join(log)[-2000:],
                hint="labctl rehearse aws --set boot=none needs no image",
            )
