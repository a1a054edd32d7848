"""Fixtures: one server that two students share, `alice` and `bob`.

Use `pytest_plugins = ["shared_fixtures"]` in a test module. Every test leaves the GPUs free.
"""

from __future__ import annotations

import pytest
from lab_servers import GPU_SETTINGS, StartLabServer
from shared_bed import Person, SharedServer, shared

from labctl.providers.local import LocalSettings


@pytest.fixture(scope="session")
def bed(
    start_lab_server: StartLabServer,
    gpu_image: str,
    small_image: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> SharedServer:
    host = start_lab_server("together", LocalSettings(image=gpu_image, **GPU_SETTINGS))
    return shared(host, tmp_path_factory.mktemp("shared"))


@pytest.fixture
def alice(bed: SharedServer) -> Person:
    return bed.people["lab-alice"]


@pytest.fixture
def bob(bed: SharedServer) -> Person:
    return bed.people["lab-bob"]
