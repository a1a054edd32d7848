"""Fixtures: `lab` and `gpu_lab`, each made by one `labctl up` and ended by `labctl down`.

Use `pytest_plugins = ["lab_fixture"]` in a test module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from lab_directory import COUNTING, LabDirectory, Process, make_lab, with_server


@pytest.fixture(scope="session")
def lab(
    tmp_path_factory: pytest.TempPathFactory, base_image: str, server_image: str
) -> Iterator[LabDirectory]:
    """One lab without a GPU. Leave its server as it was, and give every run a name of its own."""
    with with_server(make_lab(tmp_path_factory.mktemp("lab"), "e2e", base_image)) as made:
        yield made


@pytest.fixture(scope="session")
def gpu_lab(
    tmp_path_factory: pytest.TempPathFactory, base_image: str, gpu_image: str
) -> Iterator[LabDirectory]:
    """The same on a server with two stand-in GPUs."""
    local = f"  local: {{image: {gpu_image}, extra_capabilities: [SYS_PTRACE]}}\n"
    folder = tmp_path_factory.mktemp("gpu-lab")
    with with_server(make_lab(folder, "e2e-gpu", base_image, local)) as made:
        yield made


@pytest.fixture
def followed(lab: LabDirectory) -> Iterator[Callable[[str, str], Process]]:
    """`followed(run, shell)`: a run that counts, followed; ended with the test whatever happens."""
    begun: list[tuple[str, Process]] = []

    def one(run: str, shell: str = COUNTING) -> Process:
        process = lab.follow(run, shell)
        begun.append((run, process))
        process.said(f"run {run} ")
        return process

    yield one
    for run, process in begun:
        if process.popen.poll() is None:
            process.popen.kill()
            process.end(None)
        lab.student(f"docker rm -f $(docker ps -q --filter label=labctl.run={run})", check=False)
