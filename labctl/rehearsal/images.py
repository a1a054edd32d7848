"""The image that a rehearsal's machines are containers of, and the directory each is given."""

from __future__ import annotations

import fcntl
import io
import tarfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from labctl.config.directories import environment, paths
from labctl.errors import BuildError
from labctl.model import Value
from labctl.providers.local import image as lab_server

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "labctl-rehearsal"
BUILD_TIMEOUT_S = 1800
# What a machine image at AWS brings or can install: here it is this Python's own, all of it pure
# Python. A distribution's may be too old to be told where this cloud is.
BOTO3 = ("boto3", "botocore", "s3transfer", "jmespath", "python-dateutil", "six", "urllib3")
# What of AWS a machine calls; botocore knows 400 services.
SERVICES = ("ec2", "s3", "sts")


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
    version = metadata.version("boto3")
    name = f"{REPOSITORY}:{lab_server.content_hash(source, f'{below} boto3 {version}')}"
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
        fileobj=_context(source),
        custom_context=True,
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


def _context(source: Path) -> io.BytesIO:
    """The image's directory and, below boto3/, the packages of BOTO3, as a tar."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(source, arcname=".")
        for package in BOTO3:
            for file in metadata.files(package) or ():
                if _wanted(file.parts):
                    tar.add(str(file.locate()), arcname=f"boto3/{file.as_posix()}")
    packed.seek(0)
    return packed


def _wanted(parts: tuple[str, ...]) -> bool:
    if "__pycache__" in parts or parts[0] == "..":
        return False
    if parts[:2] == ("botocore", "data"):
        return len(parts) == 3 or parts[2] in SERVICES
    return True
