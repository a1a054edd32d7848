"""The command lines of the runtimes that run the image of a job's run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from labctl.agent.runs.executor import JobImage, NewAttempt
from labctl.agent.runs.job_containers import (
    JobContainer,
    JobMount,
    build_container_enter_script,
    build_container_words,
)
from labctl.wire.runs import SLURM, JobRequest, RunSpec

CONTAINER = JobContainer(
    image="python:3.12",
    mounts=(JobMount("/home/ann/run", "/lab/run"), JobMount("/data", "/lab/data/big", True)),
    variables={"COLOR": "two, words"},
    inherited=("TOKEN",),
    has_gpu=True,
)
ENTRY = "/lab/run/.labctl/entry.sh"
WORK = "/lab/run/code"


def test_apptainer_gets_its_variables_by_their_prefix() -> None:
    """https://apptainer.org/docs/user/main/environment_and_metadata.html"""
    before, after = build_container_words("apptainer", CONTAINER)
    assert before == ["env", "APPTAINERENV_COLOR=two, words", "apptainer", "exec"]
    assert after == [
        *("--nv", "--no-home", "--bind", "/home/ann/run:/lab/run"),
        *("--bind", "/data:/lab/data/big:ro", "--pwd", WORK),
        *("docker://python:3.12", "sh", ENTRY),
    ]
    before, _ = build_container_words("singularity", CONTAINER)
    assert before[1:3] == ["SINGULARITYENV_COLOR=two, words", "singularity"]


@pytest.mark.parametrize(
    ("image", "source"),
    [
        ("/shared/base.sif", "/shared/base.sif"),
        ("/shared/base.tar", "docker-archive:/shared/base.tar"),
        ("registry.example/ml:1", "docker://registry.example/ml:1"),
    ],
)
def test_apptainer_runs_files_and_images_of_registries(image: str, source: str) -> None:
    _, after = build_container_words("apptainer", CONTAINER._replace(image=image))
    assert after[-3:] == [source, "sh", ENTRY]


def test_podman_keeps_the_user_and_the_control_group_of_the_job() -> None:
    before, after = build_container_words("podman", CONTAINER)
    assert before == ["podman", "run", "--rm", "-i"]
    assert after == [
        *("--userns=keep-id", "--cgroups=disabled", "--device=nvidia.com/gpu=all"),
        *("--network=host", f"--workdir={WORK}", "--env", "COLOR=two, words", "--env", "TOKEN"),
        *("--volume", "/home/ann/run:/lab/run", "--volume", "/data:/lab/data/big:ro"),
        *("--entrypoint=sh", "python:3.12", ENTRY),
    ]
    _, after = build_container_words("podman", CONTAINER._replace(image="/a.tar", has_gpu=False))
    assert after[-2:] == ["docker-archive:/a.tar", ENTRY]
    assert "--device=nvidia.com/gpu=all" not in after


def test_the_broker_is_asked_for_the_gpus_of_the_job_and_mounts_one_by_one() -> None:
    before, after = build_container_words("broker", CONTAINER._replace(shm_bytes=1 << 30))
    assert before == ["docker", "run", "-i"]
    assert after == [
        *("--gpus=all", f"--shm-size={1 << 30}", f"--workdir={WORK}"),
        *("--env", "COLOR=two, words", "--env", "TOKEN"),
        *("--mount", "type=bind,source=/home/ann/run,target=/lab/run"),
        *("--mount", "type=bind,source=/data,target=/lab/data/big,readonly"),
        *("--entrypoint=sh", "python:3.12", ENTRY),
    ]


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("python:3.12", "python:3.12"),
        ("nvcr.io/nvidia/pytorch:24.05-py3", "nvcr.io#nvidia/pytorch:24.05-py3"),
        ("/shared/base.sqsh", "/shared/base.sqsh"),
    ],
)
def test_pyxis_gets_options_of_srun(image: str, name: str) -> None:
    """https://github.com/NVIDIA/pyxis/wiki/Usage"""
    before, after = build_container_words("pyxis", CONTAINER._replace(image=image))
    assert before == [
        *("env", "COLOR=two, words", "srun", "--quiet", "--overlap", "--nodes=1", "--ntasks=1")
    ]
    assert after == [
        f"--container-image={name}",
        "--container-mounts=/home/ann/run:/lab/run,/data:/lab/data/big:ro",
        *(f"--container-workdir={WORK}", "--container-env=COLOR,TOKEN"),
        *("--no-container-mount-home", "sh", ENTRY),
    ]


@pytest.mark.parametrize(
    ("runtime", "programs", "output"),
    [
        ("auto", ("podman", "singularity"), "singularity exec --no-home"),
        ("auto", ("podman",), "podman run --rm -i --name labctl-7-"),
        ("apptainer", ("singularity",), "singularity exec"),
        # Docker's daemon would start the container outside of the job.
        ("auto", ("docker",), "has none of apptainer singularity podman pyxis to run a container"),
        ("podman", ("singularity",), "has no podman to run a container"),
        ("broker", ("docker",), "has no broker to run a container"),
    ],
)
def test_the_runtime_is_looked_for_on_the_machine_of_the_job(
    runtime: str,
    programs: tuple[str, ...],
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    job = JobRequest(runtime=runtime)
    spec = RunSpec("night", "digits", "0f1e", ("sh",), "python:3.12", {}, executor=SLURM, job=job)
    attempt = NewAttempt("digits-night-1", tmp_path, tmp_path / "run", spec, JobImage(runtime))
    script = tmp_path / "enter.sh"
    script.write_text(build_container_enter_script(attempt, JobImage(runtime)))
    programs_dir = tmp_path / "bin"
    programs_dir.mkdir()
    for name in ("env", "hostname", "grep", "sh"):
        (programs_dir / name).symlink_to(Path("/usr/bin") / name)
    for name in programs:
        (programs_dir / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (programs_dir / name).chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", str(script), "python", "train.py"],
        env={"PATH": str(programs_dir), "SLURM_JOB_ID": "7"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert output in done.stdout + done.stderr
    assert done.returncode == (126 if output.startswith("has no") else 0)
