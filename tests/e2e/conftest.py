"""Lab servers that the end-to-end tests share; see lab_servers.py for what they can do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import lab_servers
import pytest
from lab_servers import GPU_SETTINGS, LabServer, StartLabServer

from labctl.providers.local import LocalSettings


@pytest.fixture(scope="session")
def base_image() -> str:
    return lab_servers.base_image()


@pytest.fixture(scope="session")
def small_image() -> str:
    return lab_servers.small_image()


@pytest.fixture(scope="session")
def image_with_pytest() -> str:
    return lab_servers.image_with_pytest()


@pytest.fixture(scope="session")
def server_image(base_image: str) -> str:
    return lab_servers.build_server_image(base_image)


@pytest.fixture(scope="session")
def gpu_image(server_image: str) -> str:
    return lab_servers.build_gpu_image(server_image)


@pytest.fixture(scope="session")
def start_lab_server(
    server_image: str, base_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartLabServer]:
    """`start_lab_server(lab="mine", settings=LocalSettings(...))`: one more server, ready.

    It ends with the session at the latest; `terminate()` ends it before.
    """
    lab_servers.sweep(base_image)
    with ExitStack() as ends:

        def one(lab: str = "extra", settings: LocalSettings | None = None) -> LabServer:
            directory = tmp_path_factory.mktemp(lab)
            server = lab_servers.start(directory, base_image, lab, settings or LocalSettings())
            ends.callback(server.terminate)
            return server

        yield one


@pytest.fixture(scope="session")
def lab_server(start_lab_server: StartLabServer) -> LabServer:
    """One server for the whole session. Leave it as it was: tests after this one use it."""
    return start_lab_server("shared")


@pytest.fixture(scope="session")
def gpu_server(start_lab_server: StartLabServer, gpu_image: str) -> LabServer:
    """The same, with two stand-in GPUs."""
    return start_lab_server("gpus", LocalSettings(image=gpu_image, **GPU_SETTINGS))
