"""Connect to this machine's Docker Engine, and explain what to do without one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from labctl.decoding import convert_value
from labctl.errors import EngineError, ProviderError
from labctl.lazy import lazy_imports
from labctl.model import Value

if TYPE_CHECKING:
    from docker import DockerClient

with lazy_imports(__name__):
    import docker
    from docker import errors as docker_errors
    from requests import exceptions

# HTTP status of the engine's API if another process has done or is doing the same.
CONFLICT = 409
NOT_FOUND = 404
# Seconds for one reply of the engine; clearing a server's containers takes longest.
TIMEOUT_S = 120


class EngineInfo(Value, frozen=True):
    """The part of the engine's `GET /info` that labctl uses."""

    version: str = msgspec.field(name="ServerVersion")
    os: str = msgspec.field(name="OSType")
    root: str = msgspec.field(name="DockerRootDir")
    # Engines before 20.10 have no such key.
    cgroup_version: str = msgspec.field(name="CgroupVersion", default="1")


def inspect_engine(docker: DockerClient) -> EngineInfo:
    return convert_value(docker.info(), EngineInfo)


@contextmanager
def connect(timeout_s: int = TIMEOUT_S) -> Iterator[DockerClient]:
    """Connect to the engine that the docker command uses (DOCKER_HOST or the current context).

    Raises EngineError if no engine answers, ProviderError with its message if it refuses.
    """
    try:
        client = docker.from_env(timeout=timeout_s)
    except docker_errors.DockerException as error:
        raise make_unusable_error(error) from error
    try:
        yield client
    except docker_errors.APIError as error:
        raise ProviderError(
            "Docker Engine refused the request",
            why=error.explanation or str(error),
            hint="labctl doctor",
        ) from error
    except (docker_errors.DockerException, exceptions.RequestException) as error:
        raise make_unusable_error(error) from error
    finally:
        client.close()


def iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and all its causes; requests keeps the cause in `args`."""
    yield error
    inner = error.__cause__ or error.__context__
    for below in (inner, *error.args):
        if isinstance(below, BaseException):
            yield from iterate_causes(below)


def make_unusable_error(
    error: BaseException,
    platform: str = sys.platform,
    installed: Callable[[str], object] = shutil.which,
) -> EngineError:
    """Turn a failure to reach the engine into an EngineError with the command that fixes it."""
    kinds = {type(cause) for cause in iterate_causes(error)}
    if PermissionError in kinds:
        return EngineError(
            "you have no access to Docker Engine",
            why="your user may not open its socket",
            hint='sudo usermod -aG docker "$USER"\nnewgrp docker   # or log in again',
        )
    if not installed("dockerd") and not installed("docker"):
        return EngineError(
            "Docker Engine is not installed on this machine",
            why="the local provider runs each lab server as a container",
            hint=_suggest_install_command(platform, has_apt=bool(installed("apt-get"))),
        )
    if kinds & {FileNotFoundError, ConnectionRefusedError}:
        return EngineError(
            "Docker Engine is not running",
            why="nothing answers on its socket",
            hint=_get_start_command(platform),
        )
    return EngineError("Docker Engine does not answer", why=str(error), hint="docker version")


def _suggest_install_command(platform: str, *, has_apt: bool) -> str:
    if platform == "darwin":
        return "brew install --cask docker-desktop && open -a Docker"
    if has_apt:
        return "sudo apt-get update && sudo apt-get install --yes docker.io"
    return "install Docker Engine: https://docs.docker.com/engine/install/"


def _get_start_command(platform: str) -> str:
    if platform == "darwin":
        return "open -a Docker"
    if Path("/run/systemd/system").is_dir():
        return "sudo systemctl start docker"
    return "sudo service docker start"
