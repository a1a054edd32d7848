"""The section `slurm:` of lab.yaml, and what a lab on a cluster cannot have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from labctl.config import LabConfig, load_lab
from labctl.errors import ConfigError, UsageError
from labctl.insight import bandwidth
from labctl.model import GpuNeed, Need, Offer
from labctl.providers import ProviderContext
from labctl.providers.slurm import SlurmProvider, SlurmSettings
from labctl.runs.environment import describe_unused_dockerfile
from labctl.runs.run_specs import refuse_gpu_count
from labctl.servers.job_queue import count_gpus
from labctl.servers.provider_traits import read_provider_traits
from labctl.wire.runs import JobRequest

SLURM = """\
lab: digits
server:
  provider: slurm
  gpu: A100:2
  slurm:
    login: alice@login.hpc.example
    partition: gpu
    account: ml2026
    qos: student
    time: 2h
    modules: [cuda/12.4, python/3.11]
    options: {constraint: a100, nice: 10}
"""
OFFER = Offer(provider="slurm", type="debug")


def load(tmp_path: Path, text: str) -> LabConfig:
    (tmp_path / "lab.yaml").write_text(text)
    environ = {"HOME": str(tmp_path)}
    return load_lab(tmp_path, environ=environ, find_provider=read_provider_traits)


def fail(*_: Any) -> Any:
    raise AssertionError("a setting needs no connection")


def make_provider(config: LabConfig, tmp_path: Path) -> SlurmProvider:
    settings = config.server.provider_settings["slurm"]
    assert isinstance(settings, SlurmSettings)
    context = ProviderContext(
        data_dir=tmp_path, owner="ann", connect=fail, settle_host_key=fail, progress=fail
    )
    return SlurmProvider(settings, context)


def test_the_settings_are_those_of_each_job(tmp_path: Path) -> None:
    config = load(tmp_path, SLURM)
    assert config.server.executor == "slurm"
    assert not config.uses_containers
    request = make_provider(config, tmp_path).build_job_request(config.server.need, OFFER)
    assert request == JobRequest(
        partition="gpu",
        account="ml2026",
        qos="student",
        time_s=7200,
        gpus="gpu:a100:2",
        modules=("cuda/12.4", "python/3.11"),
        options={"constraint": "a100", "nice": "10"},
        runtime="auto",
    )


@pytest.mark.parametrize(
    ("gpu", "gres"),
    [
        (GpuNeed(), ""),
        (GpuNeed(kind="none"), ""),
        (GpuNeed(kind="any"), "gpu:1"),
        (GpuNeed(kind="T4", count=4), "gpu:t4:4"),
    ],
)
def test_a_job_has_gpus_only_if_the_lab_requires_them(
    gpu: GpuNeed, gres: str, tmp_path: Path
) -> None:
    """A job that merely could use a GPU would wait for one, and would hold it."""
    provider = make_provider(load(tmp_path, SLURM), tmp_path)
    assert provider.build_job_request(Need(gpu=gpu), OFFER).gpus == gres


def test_without_a_partition_a_job_goes_to_the_one_that_was_offered(tmp_path: Path) -> None:
    provider = make_provider(load(tmp_path, SLURM.replace("    partition: gpu\n", "")), tmp_path)
    assert provider.build_job_request(Need(), OFFER).partition == "debug"


@pytest.mark.parametrize(
    ("line", "path", "words"),
    [
        ("    runtime: conda", "server.slurm.runtime", "write one of auto, apptainer"),
        ("    runtime: docker", "server.slurm.runtime", "outside of the job"),
        ("    base: labs", "server.slurm.base", "write /scratch/$USER/labctl"),
        ("    base: /scratch/$HOME", "server.slurm.base", "write /scratch/$USER/labctl"),
        ("    options: {comment: x}", "server.slurm.options.comment", "labctl sets this option"),
        ("    options: {-n: 1}", "server.slurm.options.-n", "write constraint"),
        ("    partition: 'a b'", "server.slurm.partition", "only letters"),
        ("  executor: process", "server.executor", "each run is a job"),
        ("  ttl: 8h", "server.ttl", "`time` under `slurm`"),
        ("  budget: 5", "server.budget", "`time` under `slurm`"),
        ("image: {build: .}", "image", "a cluster builds no images"),
        ("image: {requirements: r.txt, store: true}", "image.store", "stores no images"),
        ("image: /shared/image", "image", "write /path/on/the/cluster/image.sif"),
        ("limits: {shm: 1GB}", "limits.shm", "share the memory of the job"),
        ("store: s3://bucket/a", "store", "login node"),
        ("  gpu: '>=24GB'", "server.gpu", "write a type that the cluster has"),
        ("  gpu_memory: 24GB", "server.gpu_memory", "write a type that the cluster has"),
    ],
)
def test_what_a_cluster_cannot_do_is_refused_where_it_stands(
    line: str, path: str, words: str, tmp_path: Path
) -> None:
    text = "lab: digits\nserver:\n  provider: slurm\n  slurm:\n    login: hpc\n" + line + "\n"
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    (problem,) = caught.value.problems
    assert (problem.path, problem.line) == (path, 6)
    assert words in problem.message


def test_a_cluster_without_a_login_node_is_refused(tmp_path: Path) -> None:
    config = load(tmp_path, "lab: digits\nserver: {provider: slurm}\n")
    with pytest.raises(Exception, match="names no login node"):
        make_provider(config, tmp_path).check_settings()


def test_a_job_uses_the_gpus_that_it_asks_for_and_not_those_of_the_login_node(
    tmp_path: Path,
) -> None:
    config = load(tmp_path, SLURM)
    request = make_provider(config, tmp_path).build_job_request(config.server.need, OFFER)
    assert count_gpus(request) == 2
    assert count_gpus(JobRequest()) == 0
    with pytest.raises(UsageError, match="each run is a job"):
        refuse_gpu_count(2)
    with pytest.raises(UsageError, match="each run is a job"):
        bandwidth.build_command(config, 8)


CLASS = """\
lab: ml-alice
server:
  provider: course
  executor: slurm
  course:
    course: ml
    student: alice
    keeper: ssh://keeper@keeper.example:22
    host_key: "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPbqxgQ5TnMkHGWcsvDWVqTo0DDxYMXWbMcNCnvt4q5W"
    seat: "0f1e2d3c4b5a"
"""


def test_a_run_of_a_class_has_an_image_or_the_programs_of_the_machine(tmp_path: Path) -> None:
    assert load(tmp_path, CLASS).job_image == ""
    config = load(tmp_path, f"{CLASS}image: registry.example/ml:1\nlimits: {{shm: 1GB}}\n")
    assert config.job_image == "registry.example/ml:1"
    assert not config.uses_containers
    listed = load(tmp_path, f"{CLASS}image: {{requirements: requirements.txt}}\n")
    assert (listed.environment_file, listed.job_image) == ("requirements.txt", "")
    assert listed.image.python == "", "that of the machine"
    assert describe_unused_dockerfile(listed) == ""
    (tmp_path / "Dockerfile").write_text("FROM python:3.11-slim\n")
    assert "the Dockerfile is not used" in describe_unused_dockerfile(load(tmp_path, CLASS))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("image: {build: .}", "build no images: build it on another computer"),
        ("image: {build: .}", "for packages alone: `image: {python"),
        ("image: {requirements: a.txt, registry: r.example/ml}", "not in a container"),
        ("image: {requirements: a.txt}\nlimits: {shm: 1GB}", "needs a container"),
        ("image: /shared/ml.tar", "is a file of a cluster"),
        ("limits: {shm: 1GB}", "needs a container, so write the name of an image"),
        ("store: s3://bucket", "the course saves results"),
    ],
)
def test_machines_of_a_class_build_no_images(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, f"{CLASS}{lines}\n")
    assert message in str(raised.value.problems)
