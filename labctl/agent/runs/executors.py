"""The executors of this server, by name."""

from __future__ import annotations

from .docker_executor import DockerExecutor
from .executor import Executor

DOCKER = DockerExecutor()


def get_executor() -> Executor:
    """Return the executor that runs start with on this server."""
    return DOCKER
