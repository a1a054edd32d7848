"""Two students on one server: their runs and services work, and neither sees or stops the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import StartLabServer
from lab_servers import GPU_SETTINGS
from shared_bed import BROKER, IMAGE, Person, SharedServer, shared

from labctl.actions.forwarding import Forwarding, ForwardSpec, _knock
from labctl.actions.services import ServiceRequest, ensure_service, stop_service
from labctl.actions import Silent
from labctl.errors import LabError, PolicyError
from labctl.providers.local import LocalSettings

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def bed(
    start_lab_server: StartLabServer,
    gpu_image: str,
    small_image: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SharedServer]:
    host = start_lab_server("together", LocalSettings(image=gpu_image, **GPU_SETTINGS))
    yield shared(host, tmp_path_factory.mktemp("shared"))


@pytest.fixture
def alice(bed: SharedServer) -> Person:
    return bed.people["lab-alice"]


@pytest.fixture
def bob(bed: SharedServer) -> Person:
    return bed.people["lab-bob"]


def test_a_run_is_its_accounts_own(alice: Person, bob: Person) -> None:
    log, run = alice.run("first", "id -u; id -un; touch /x; cat /proc/self/status")
    assert run["exit_code"] == 0
    assert log.split()[:2] == [alice.said("id -u"), "lab"]
    assert "Read-only file system" in log
    assert "CapEff:\t0000000000000000" in log
    assert "NoNewPrivs:\t1" in log
    # The same lab and the same run of another account is another run.
    log, run = bob.run("first", "id -u")
    assert log.split() == [bob.said("id -u")]
