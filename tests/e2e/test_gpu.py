"""What `gpu:` in lab.yaml does to a run, on a server with stand-in GPUs and on one without."""

from __future__ import annotations

import pytest
from lab_directory import LabDirectory

pytest_plugins = ["lab_fixture"]
pytestmark = pytest.mark.engine


@pytest.mark.parametrize("need", ["auto", "any", "T4", "T4:2"])
def test_a_run_sees_the_gpus(gpu_lab: LabDirectory, need: str) -> None:
    run = "gpu-" + need.lower().replace(":", "-")
    with gpu_lab.gpu(need):
        done = gpu_lab.labctl("run", "--id", run, "--", "nvidia-smi", "-L")
    assert done.stdout.count("Tesla T4 (UUID: GPU-") == 2
    (asked,) = gpu_lab.inspected(run)["HostConfig"]["DeviceRequests"]
    assert asked["Count"] == -1
    assert asked["Capabilities"] == [["gpu"]]


def test_a_run_that_wants_none_has_none(gpu_lab: LabDirectory) -> None:
    with gpu_lab.gpu("none"):
        gpu_lab.labctl("run", "--id", "gpu-none", "--", "nvidia-smi", code=127)
    assert not gpu_lab.inspected("gpu-none")["HostConfig"]["DeviceRequests"]


def refused(lab: LabDirectory, need: str) -> str:
    """What is said; nothing was pushed and no run directory made."""
    with lab.holding("unsent.txt", "unsent\n"), lab.gpu(need):
        said = lab.labctl("run", "--id", "refused", "--", "true", code=255).stderr
    assert "refused" not in lab.student(f"ls -a {lab.place('')}").split()
    code = f"/home/student/labctl/{lab.name}/code"
    assert "unsent.txt" not in lab.student(f"ls -a {code}").split()
    return said


@pytest.mark.parametrize("need", ["any", "H100"])
def test_without_a_gpu_what_needs_one_is_refused(lab: LabDirectory, need: str) -> None:
    said = refused(lab, need)
    assert "GPU" in said
    assert "next:" in said


@pytest.mark.parametrize("need", ["H100", "T4:3", ">=40GB"])
def test_another_gpu_than_there_is_is_refused(gpu_lab: LabDirectory, need: str) -> None:
    assert "T4" in refused(gpu_lab, need)


def test_auto_without_a_gpu_says_that_it_runs_on_the_cpu(lab: LabDirectory) -> None:
    done = lab.run("echo on the cpu", "--id", "gpu-auto")
    assert done.stdout == "on the cpu\n"
    assert "no GPU: it runs on the CPU" in done.stderr
    assert not lab.inspected("gpu-auto")["HostConfig"]["DeviceRequests"]
