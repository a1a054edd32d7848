"""The Slurm provider under the contract: a real cluster, and labs on its login node."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from case import Case, wait_for

from labctl.events import SilentReporter
from labctl.model import Resource
from labctl.providers import ProviderContext
from labctl.providers.slurm import SlurmProvider, SlurmSettings
from labctl.providers.static import HostEntry
from labctl.servers.connections import Connections

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
from slurm_cluster import Cluster, run_cluster


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with run_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def slurm_case(slurm_cluster: Cluster, tmp_path: Path) -> Iterator[Case]:
    """The person's own key and known_hosts are what they have for any other ssh."""
    home = tmp_path / "home" / ".ssh"
    home.mkdir(parents=True)
    known = f"[127.0.0.1]:{slurm_cluster.port} {slurm_cluster.host_key}\n"
    (home / "known_hosts").write_text(known)
    connections = Connections(tmp_path / "ssh", home / "config")
    around = ProviderContext(
        data_dir=tmp_path,
        owner="contract",
        connect=connections.connect,
        settle_host_key=lambda endpoint: connections.settle_host_key(endpoint, SilentReporter()),
        progress=lambda text, done, total: None,
        resolve_alias=connections.user_config.resolve_alias,
    )
    login = HostEntry(
        host="127.0.0.1",
        port=slurm_cluster.port,
        user="student",
        identity=str(slurm_cluster.key),
    )
    provider = SlurmProvider(SlurmSettings(login=login), around)

    def leave_job() -> Resource:
        """As a lab whose records are lost leaves one."""
        line = "sbatch --parsable --chdir=/tmp --comment=labctl:lost --wrap 'sleep 600'"
        job_id = slurm_cluster.sh(line, user="student").strip()

        def find_running() -> Resource | None:
            jobs = (one for one in provider.leftovers() if one.note == "running")
            return next((one for one in jobs if one.id == job_id), None)

        left: Resource = wait_for(find_running)
        return left

    case = Case(provider, tmp_path, leave_something=leave_job, shares_machine=True)
    try:
        yield case
    finally:
        case.clean_up()
        connections.connect(provider.login.endpoint).close()
