"""Slurm's accounting of a class: what sacctmgr and sshare print, and which commands change it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from labctl.commands.slurm_accounting import (
    ClassAccounting,
    ClassLimits,
    ClassMachines,
    ClassQos,
    ClassUser,
    build_changes,
    build_close,
    class_account,
    compute_qos,
    parse_accounting,
)

ACCOUNT = class_account("ml")
LIMITS = ClassLimits(gpus=1, gpu_minutes=1200, wall_s=7200)
# As Slurm 22.05 prints it
OUTPUT = """\
--- qos
cpu=8,gres/gpu=1,mem=15G|02:00:00|100
--- users
|normal||
lab-ann|course-ml|gres/gpu=1200|
lab-bob|course-ml||
--- use
|cpu=2,mem=15000,energy=0,node=1,billing=2,fs/disk=0,vmem=0,pages=0,gres/gpu=31
lab-ann|cpu=1,mem=14101,energy=0,node=1,billing=1,fs/disk=0,vmem=0,pages=0,gres/gpu=30
lab-bob|cpu=1,mem=899,energy=0,node=0,billing=1,fs/disk=0,vmem=0,pages=0,gres/gpu=1
--- machines
gpu1|32|61440|2|gpu:a100:4(S:0-1)
"""


def test_what_slurm_prints_is_read() -> None:
    assert parse_accounting(OUTPUT) == ClassAccounting(
        qos=ClassQos(gpus=1, wall_s=7200, cpus=8, memory_mib=15_360, jobs=100),
        users=(
            ClassUser("lab-ann", ACCOUNT, 1200, 30),
            ClassUser("lab-bob", ACCOUNT, None, 1),
        ),
        machines=ClassMachines(cpus=32, memory_mib=61_440, gpus=4, threads=2),
    )
    assert parse_accounting("--- qos\n--- users\n--- use\n") == ClassAccounting()
    long = parse_accounting("--- qos\ngres/gpu=2|1-00:10:00|\n--- users\n--- use\n")
    assert long.qos == ClassQos(gpus=2, wall_s=87_000)


def test_a_new_class_gets_its_qos_account_and_users() -> None:
    qos, account, users = build_changes(ACCOUNT, LIMITS, ["lab-ann", "lab-bob"], ClassAccounting())
    assert qos == (
        "sacctmgr -i add qos course-ml MaxTRESPerUser=cpu=-1,mem=-1,gres/gpu=1 "
        "MaxSubmitJobsPerUser=100 MaxWall=120 Flags=DenyOnLimit"
    )
    assert account == "sacctmgr -i add account course-ml Description=course"
    assert users == (
        "sacctmgr -i add user lab-ann,lab-bob Account=course-ml QOS=course-ml "
        "DefaultQOS=course-ml GrpTRESMins=gres/gpu=1200"
    )


@pytest.mark.parametrize(
    ("gpus", "machines", "share"),
    [
        (1, ClassMachines(cpus=8, memory_mib=1000, gpus=8, threads=2), (2, 125)),
        (9, ClassMachines(cpus=8, memory_mib=1000, gpus=8, threads=2), (8, 1000)),
        (1, ClassMachines(cpus=8, memory_mib=1000), (None, None)),
    ],
)
def test_an_account_has_processors_and_memory_in_proportion_to_its_gpus(
    gpus: int, machines: ClassMachines, share: tuple[int | None, int | None]
) -> None:
    """A job gets whole cores, so a share is not smaller than one."""
    qos = compute_qos(ClassLimits(gpus=gpus), machines)
    assert (qos.cpus, qos.memory_mib) == share


def test_only_what_differs_is_changed() -> None:
    present = parse_accounting(OUTPUT)
    (change,) = build_changes(ACCOUNT, LIMITS, ["lab-ann", "lab-bob"], present)
    assert change.startswith("sacctmgr -i modify user where name=lab-bob account=course-ml set")
    unlimited = msgspec.structs.replace(LIMITS, gpu_minutes=None, wall_s=None)
    qos, user = build_changes(ACCOUNT, unlimited, ["lab-ann", "lab-bob"], present)
    assert qos.endswith(
        "set MaxTRESPerUser=cpu=8,mem=15360M,gres/gpu=1 MaxSubmitJobsPerUser=100 MaxWall=-1"
    )
    assert user.endswith("GrpTRESMins=gres/gpu=-1")
    assert "name=lab-ann" in user


def test_who_is_not_in_the_class_any_more_loses_jobs_and_association() -> None:
    present = parse_accounting(OUTPUT.replace("course-ml||\n", "course-ml|gres/gpu=1200|\n"))
    close, removal = build_changes(ACCOUNT, LIMITS, ["lab-ann"], present)
    assert "scancel -u lab-bob -A course-ml" in close
    assert removal == "sacctmgr -i delete user where name=lab-bob account=course-ml"
    assert build_changes(ACCOUNT, LIMITS, ["lab-ann", "lab-bob"], present) == []


def test_an_ended_account_can_submit_nothing_before_its_jobs_are_canceled() -> None:
    present = parse_accounting(OUTPUT.replace("course-ml||\n", "course-ml|gres/gpu=1200|\n"))
    both = ["lab-ann", "lab-bob"]
    (close,) = build_changes(ACCOUNT, LIMITS, both, present, ended=["lab-bob"])
    limit, cancel, _ = close.split(" && ", 2)
    assert limit == (
        "sacctmgr -i modify user where name=lab-bob account=course-ml set GrpSubmitJobs=0"
    )
    assert cancel == "scancel -u lab-bob -A course-ml"
    closed = parse_accounting(OUTPUT.replace("course-ml||\n", "course-ml|gres/gpu=1200|0\n"))
    assert build_changes(ACCOUNT, LIMITS, both, closed, ended=["lab-bob"]) == []
    (back,) = build_changes(ACCOUNT, LIMITS, both, closed)
    assert back.endswith("name=lab-bob account=course-ml set GrpSubmitJobs=-1")


@pytest.mark.parametrize(
    ("program", "fails"), [("sacctmgr", True), ("scancel", True), ("squeue", True), ("", False)]
)
def test_a_step_that_slurm_refuses_is_not_hidden(program: str, fails: bool, tmp_path: Path) -> None:
    for name in ("sacctmgr", "scancel", "squeue"):
        code = 1 if name == program else 0
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    script = build_close(ACCOUNT, ["lab-bob"])
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", script], env=environ, check=False)
    assert (done.returncode != 0) == fails


def test_an_account_that_is_being_brought_back_keeps_its_association_and_gets_no_new_one() -> None:
    """Without the association, its used minutes would be forgotten."""
    closed = parse_accounting(OUTPUT.replace("course-ml||\n", "course-ml|gres/gpu=1200|0\n"))
    names = ["lab-ann", "lab-bob", "lab-new"]
    assert build_changes(ACCOUNT, LIMITS, names, closed, ended=["lab-bob", "lab-new"]) == []
