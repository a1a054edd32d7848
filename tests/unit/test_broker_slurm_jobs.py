"""Which job of Slurm a process is in, and what its containers get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from broker_bed import ALICE, BOB

from labctl.agent.broker import cgroup, slurm_jobs
from labctl.agent.broker.account_containers import AccountContainer
from labctl.agent.broker.gpu_leases import GpuIdentity, list_leases
from labctl.agent.broker.http import HttpRefusal
from labctl.agent.broker.rules import GPUS, JOB
from labctl.agent.broker.slurm_jobs import RunningJob

ALL_BYTES = cgroup.read_total_memory_bytes()
# Of Slurm 22.05 on a machine with cgroup v1, without controllers that say the same
V1 = """\
9:name=systemd:/system.slice/slurmd.service
8:pids:/system.slice/slurmd.service
6:freezer:/slurm_gpu1/uid_20000/job_17/step_batch
5:devices:/slurm_gpu1/uid_20000/job_17/step_batch/task_0
4:memory:/slurm_gpu1/uid_20000/job_17/step_batch/task_0
0::/system.slice/slurmd.service
"""
V1_OF_AN_ONLY_DAEMON = "4:memory:/slurm/uid_1004/job_9/step_0/task_0\n"
V1_OF_A_CONTAINER = f"4:memory:/slurm/uid_1004/job_9/{'a5' * 32}\n"
# https://slurm.schedmd.com/cgroup_v2.html#hierarchy_overview
V2 = "0::/system.slice/slurmstepd.scope/job_17/step_0/user/task_0\n"
V2_OF_ONE_DAEMON_OF_SEVERAL = (
    "0::/system.slice/gpu1_slurmstepd.scope/job_17/step_extern/user/task_special\n"
)
GPU_LIST = [GpuIdentity("GPU-a", "0", "T4"), GpuIdentity("GPU-b", "1", "T4")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (V1, ("17", "/slurm_gpu1/uid_20000/job_17")),
        (V1_OF_AN_ONLY_DAEMON, ("9", "/slurm/uid_1004/job_9")),
        (V1_OF_A_CONTAINER, ("9", "/slurm/uid_1004/job_9")),
        (V2, ("17", "/system.slice/slurmstepd.scope/job_17")),
        (V2_OF_ONE_DAEMON_OF_SEVERAL, ("17", "/system.slice/gpu1_slurmstepd.scope/job_17")),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", None),
        # An account may make groups of any name, but only below its own.
        ("0::/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_17/step_0\n", None),
        ("4:memory:/user.slice/slurm/uid_1004/job_9/step_0\n", None),
        ("4:memory:/slurm/uid_1004/job_9x/step_0\n", None),
        ("", None),
    ],
)
def test_a_job_is_known_by_its_control_group(text: str, found: tuple[str, str] | None) -> None:
    assert slurm_jobs.parse_cgroups(text) == found


def test_a_job_runs_as_long_as_slurm_has_a_record_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_jobs, "JOBS", tmp_path)
    (tmp_path / "17").write_text(f"{ALICE.uid} 0,2\n")
    (tmp_path / "18").write_text(f"{ALICE.uid} \n")
    assert slurm_jobs.read_job("17") == RunningJob("17", ALICE.uid, gpus=("0", "2"))
    assert slurm_jobs.read_job("18") == RunningJob("18", ALICE.uid)
    assert slurm_jobs.read_job("19") is None
    assert not slurm_jobs.has_ended({JOB: "17"}, ALICE.uid)
    assert not slurm_jobs.has_ended({JOB: ""}, ALICE.uid)
    slurm_jobs.require_running({JOB: "17"}, ALICE)
    for labels, account in (({JOB: "19"}, ALICE), ({JOB: "17"}, BOB)):
        with pytest.raises(HttpRefusal, match="has ended, and its containers with it"):
            slurm_jobs.require_running(labels, account)
    # A record that cannot be read ends no container.
    (tmp_path / "17").unlink()
    (tmp_path / "17").mkdir()
    with pytest.raises(OSError, match="directory"):
        slurm_jobs.has_ended({JOB: "17"}, ALICE.uid)


@pytest.mark.parametrize(
    ("gpus", "wanted", "chosen"),
    [
        (("1",), ["*"], ["GPU-b"]),
        (("0", "1"), ["*"], ["GPU-a", "GPU-b"]),
        # Inside of the job it is the first one.
        (("1",), ["0"], ["GPU-b"]),
        (("1",), ["GPU-b"], ["GPU-b"]),
        (("1",), [], []),
        ((), [], []),
    ],
)
def test_a_container_gets_the_gpus_of_its_job(
    gpus: tuple[str, ...], wanted: list[str], chosen: list[str]
) -> None:
    assert (
        slurm_jobs.choose_gpus(RunningJob("17", ALICE.uid, gpus=gpus), wanted, GPU_LIST) == chosen
    )


@pytest.mark.parametrize(
    ("gpus", "wanted", "message"),
    [
        ((), ["*"], "srun --gres=gpu:1"),
        (("1",), ["GPU-a"], "only the GPUs of its job"),
        (("1",), ["1"], "the job has GPU-b, not 1"),
    ],
)
def test_a_container_gets_no_other_gpu(
    gpus: tuple[str, ...], wanted: list[str], message: str
) -> None:
    with pytest.raises(HttpRefusal, match=message):
        slurm_jobs.choose_gpus(RunningJob("17", ALICE.uid, gpus=gpus), wanted, GPU_LIST)


def test_the_driver_numbers_device_files_in_an_order_of_its_own(tmp_path: Path) -> None:
    for bus, uuid, minor in (("0000:01:00.0", "GPU-a", 1), ("0000:02:00.0", "GPU-b", 0)):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(
            f"Model: \t\t Tesla T4\nIRQ:   \t\t 35\nGPU UUID: \t {uuid}\nVideo BIOS: \t ??.??\n"
            f"Bus Location: \t {bus}\nDevice Minor: \t {minor}\n"
        )
    assert slurm_jobs.read_minor_numbers(tmp_path) == {"GPU-a": "1", "GPU-b": "0"}
    assert slurm_jobs.read_minor_numbers(tmp_path / "none") == {}


def test_a_container_of_a_job_has_no_lease() -> None:
    labels = {GPUS: "GPU-a", JOB: "17"}
    assert list_leases([AccountContainer("c", "c", "running", 0.0, ALICE.uid, labels)]) == []


@pytest.mark.parametrize(
    ("files", "memory_bytes", "cpus"),
    [
        (
            {
                "memory/g/memory.limit_in_bytes": "209715200\n",
                "cpuset/g/cpuset.cpus": "1\n",
            },
            209715200,
            1,
        ),
        (
            {"g/memory.max": "209715200\n", "g/cpuset.cpus.effective": "0-3,8\n"},
            209715200,
            5,
        ),
        ({"g/memory.max": "max\n", "g/cpuset.cpus.effective": "0\n"}, ALL_BYTES, 1),
        (
            {
                "memory/g/memory.limit_in_bytes": "9223372036854771712\n",
                "cpuset/g/cpuset.cpus": "2-3\n",
            },
            ALL_BYTES,
            2,
        ),
    ],
)
def test_the_limits_of_a_job_are_those_of_its_control_group(
    files: dict[str, str],
    memory_bytes: int,
    cpus: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cgroup.read_memory_limit("/g") == memory_bytes
    assert cgroup.count_cpus("/g") == cpus


def test_a_control_group_that_is_gone_is_not_taken_for_one_without_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step of the job has ended meanwhile: runc would make the group again, unlimited."""
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    job = RunningJob("7", os.getuid(), "/slurm/uid_1000/job_7")
    with pytest.raises(HttpRefusal) as caught:
        slurm_jobs.read_share(job, 100)
    assert caught.value.status == 409
    with pytest.raises(HttpRefusal, match="its job has just ended"):
        slurm_jobs.prepare_start(job.cgroup)
    slurm_jobs.prepare_start("labctl-job7.slice")
