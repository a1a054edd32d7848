"""The Docker image of a rehearsal's machines."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from labctl.config.directories import copy_environment, find_paths
from labctl.errors import BuildError
from labctl.model import Value
from labctl.providers.local import image as lab_server

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "labctl-rehearsal"
BUILD_TIMEOUT_S = 1800
# boto3 and its dependencies, which AWS's machine images have or can install: copied from this
# Python, all pure Python. A distribution's version may be too old to support AWS_ENDPOINT_URL.
BOTO3 = ("boto3", "botocore", "s3transfer", "jmespath", "python-dateutil", "six", "urllib3")
# the services that a machine calls; botocore has data for 400
SERVICES = ("ec2", "s3", "sts")


class Building(Value, frozen=True):
    """The sources of an image. `stands_on` is its base; "" is the lab server's own image.

    `progress` is called with the step, the amount done, and the total.
    """

    data_dir: Path
    base_image: str
    progress: Callable[[str, float, float], None]
    stands_on: str = ""


def default_building(
    progress: Callable[[str, float, float], None] = lambda text, done, of: None,
) -> Building:
    """Return the building from labctl's own directories and this process's environment."""
    base = copy_environment().get("LABCTL_BASE_IMAGE", "")
    return Building(data_dir=find_paths().data_dir, base_image=base, progress=progress)


def ensure_image(docker: DockerClient, building: Building) -> str:
    """Return the image's name, after building missing images (a minute each)."""
    source = building.data_dir / "images" / "rehearsal"
    base = building.stands_on or lab_server.ensure(
        docker, building.data_dir / "images" / "lab-server", building.base_image, building.progress
    )
    version = metadata.version("boto3")
    name = f"{REPOSITORY}:{lab_server.content_hash(source, f'{base} boto3 {version}')}"
    with lab_server.lock_package_file(source / "Dockerfile"):
        if not lab_server.has_image(docker, name):
            building.progress("the rehearsal's machine image", 0, 1)
            _build(docker, source, name, base)
            building.progress("the rehearsal's machine image", 1, 1)
    return name


def _build(docker: DockerClient, source: Path, name: str, base: str) -> None:
    log: list[str] = []
    lines = docker.api.build(
        fileobj=_context(source),
        custom_context=True,
        tag=name,
        buildargs={"LAB_SERVER": base},
        rm=True,
        forcerm=True,
        decode=True,
        timeout=BUILD_TIMEOUT_S,
    )
    for line in lines:
        log.append(str(line.get("stream", "") or line.get("error", "")))
        if "error" in line:
            raise BuildError(
                "building the rehearsal's machine image failed",
                why="".join(log)[-2000:],
                hint="--boot none needs no image",
            )


def _context(source: Path) -> io.BytesIO:
    """Return a tar of the image's directory, with the packages of BOTO3 below boto3/."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(source, arcname=".")
        for package in BOTO3:
            for file in metadata.files(package) or ():
                if _is_needed_file(file.parts):
                    tar.add(str(file.locate()), arcname=f"boto3/{file.as_posix()}")
    packed.seek(0)
    return packed


def _is_needed_file(parts: tuple[str, ...]) -> bool:
    if "__pycache__" in parts or parts[0] == "..":
        return False
    if parts[:2] == ("botocore", "data"):
        return len(parts) == 3 or parts[2] in SERVICES
    return True
