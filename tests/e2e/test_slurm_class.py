"""A class on one machine whose engine is Slurm, by the commands of its staff and its students."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from course_bed import CourseBed, keeping
from slurm_class_bed import (
    LIMITS,
    MARKS,
    ROSTER,
    bring_up,
    count_changes,
    join,
    list_users,
    make_staff,
    run_class,
    run_course,
)
from slurm_machine import slurm_machine
from sshd_container import Sshd, wait_for

from labctl.courses.seat_operations import SeatOperations
from labctl.courses.teardown import end_seats

pytestmark = MARKS
# Shows which GPU the run has, and uses it for a while.
RUN = "echo on GPU $CUDA_VISIBLE_DEVICES as $(id -un); sleep {seconds}"


@pytest.fixture(scope="module")
def box(server_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with slurm_machine(server_image, tmp_path_factory.mktemp("slurm")) as box:
        yield box


@pytest.fixture(scope="module")
def bed(box: Sshd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CourseBed]:
    folder = tmp_path_factory.mktemp("class")
    with run_class([box], folder, LIMITS.format(minutes=1200)) as bed:
        yield bed


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """uv and one small package; None if this machine has no wheelhouse."""
    wheels = Path(os.environ.get("LABCTL_WHEELHOUSE", ""))
    if not any(wheels.glob("uv-*.whl")):
        return None
    folder = tmp_path_factory.mktemp("wheelhouse")
    for wheel in (*wheels.glob("uv-*.whl"), *wheels.glob("iniconfig-*.whl")):
        shutil.copy(wheel, folder)
    return folder


def read_share(box: Sshd, name: str) -> float:
    """The factor by which Slurm decides whose job is next."""
    rows = box.sh("sshare -nP -a -A course-ml-2026 -o User,FairShare").splitlines()
    return float(next(row for row in rows if row.startswith(f"{name}|")).partition("|")[2])


def check_jobs(bed: CourseBed) -> None:
    """What Slurm's accounting has of alice's ended runs, and of bob's."""
    seats = json.loads(run_course(bed, "status", "--json").stdout)["seats"]
    alice, bob = (seat["gpu_minutes"]["jobs"] for seat in seats)
    assert alice["completed"] in (1, 2), alice
    assert (alice["canceled"], alice["failed"]) == (2, 0), alice
    assert (bob["completed"], bob["timed_out"], bob["canceled"]) == (0, 1, 1), bob
    assert 0 < alice["gpu_hours"] < bob["gpu_hours"] < 0.1
    assert alice["median_wait_s"] < 60
    assert alice["last_end_at"] < bob["last_end_at"] < time.time() + 5
    shown = run_course(bed, "status", "--jobs").stdout
    assert re.search(r"^alice +0.0 +[12] +- +2 +", shown, re.MULTILINE), shown


def check_packages(bed: CourseBed, lab: Path, wheelhouse: Path) -> None:
    """A job of alice has the packages of her list, in an environment that is no container."""
    settings = bed.home("alice") / ".config" / "labctl" / "config.yaml"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(f"wheelhouse: {wheelhouse}\n")
    file = lab / "lab.yaml"
    text = file.read_text()
    file.write_text(f"{text}image: {{requirements: requirements.txt}}\n")
    (lab / "requirements.txt").write_text("iniconfig\n")
    bed.labctl("alice", "trust", "--yes", cwd=lab)
    program = "import iniconfig, os; print(iniconfig.__file__, os.environ['SLURM_JOB_ID'])"
    output = bed.labctl("alice", "run", "--", "python", "-c", program, cwd=lab)[0]
    assert "/home/lab-alice/labctl/.environments/" in output
    file.write_text(text)
    bed.labctl("alice", "trust", "--yes", cwd=lab)
    settings.unlink()


def test_the_roster_becomes_associations_with_limits(bed: CourseBed, box: Sshd) -> None:
    bring_up(bed)
    limits = "course-ml-2026|gres/gpu=1200"
    assert list_users(box) == [f"lab-alice|{limits}", f"lab-bob|{limits}"]
    qos = box.sh("sacctmgr -nP show qos course-ml-2026 format=MaxTRESPU,MaxWall,Flags,MaxSubmitPU")
    # Half of the processors and of the memory belong to one of the two GPUs.
    pattern = r"cpu=\d+,gres/gpu=1,mem=\d+[MG]\|00:10:00\|DenyOnLimit\|100"
    assert re.fullmatch(pattern, qos.strip()), qos
    bring_up(bed)
    assert count_changes(bed) == 0


def test_students_run_jobs_and_see_why_they_wait(
    bed: CourseBed, box: Sshd, wheelhouse: Path | None
) -> None:
    with keeping(bed, SeatOperations(make_staff(bed, "keeper"))):
        lab = join(bed, "alice")
        assert "executor: slurm" in (lab / "lab.yaml").read_text()
        bed.labctl("alice", "up", "--yes", cwd=lab)
        command = ("--", "sh", "-c", RUN.format(seconds=0))
        output = bed.labctl("alice", "run", "--id", "first", *command, cwd=lab)[0]
        assert "on GPU 0 as lab-alice" in output
        if wheelhouse is not None:
            check_packages(bed, lab, wheelhouse)
        # A shell outside a job opens no GPU, and two at once are more than the course gives.
        closed = "head -c 1 /dev/nvidia0 >/dev/null 2>&1 || echo closed"
        assert bed.labctl("alice", "ssh", "--", closed, cwd=lab)[0].strip() == "closed"
        refusal = bed.labctl(
            "alice", "ssh", "--", "sbatch --gres=gpu:2 --wrap id 2>&1", cwd=lab, code=1
        )
        assert "QOSMaxGRESPerUser" in refusal[0] + refusal[1]
        held = ("--", "sh", "-c", RUN.format(seconds=120))
        bed.labctl("alice", "run", "--detach", "--id", "held", *held, cwd=lab)
        bed.labctl("alice", "run", "--detach", "--id", "next", *held, cwd=lab)
        # Slurm names the processors first where a GPU has few of them.
        wait_for(lambda: re.search("QOSMax(GRES|Cpu|Mem)", box.sh("squeue -h -o %r")) is not None)
        status = bed.labctl("alice", "status", "--refresh", cwd=lab)[0]
        assert "waiting: you already use " in status
        # Staff sees it, too.
        shown = run_course(bed, "status", "--refresh").stdout
        assert re.search(r"next queued; waiting: you already use", " ".join(shown.split())), shown
        bed.labctl("alice", "cancel", "held", cwd=lab)
        # The end of her account cancels what waits, too.
        bed.labctl("alice", "down", "--yes", cwd=lab)
        assert box.sh("squeue -h") == ""
        assert any(user.startswith("lab-alice|") for user in list_users(box))
        closed = "sacctmgr -nP show assoc user=lab-alice format=GrpSubmitJobs"
        assert box.sh(closed) == "0\n"


def test_spent_minutes_are_said_in_words(bed: CourseBed, box: Sshd) -> None:
    path = bed.folder / "ml" / "course.yaml"
    path.write_text(path.read_text().replace("gpu_minutes: 1200", "gpu_minutes: 1"))
    bring_up(bed)
    with keeping(bed, SeatOperations(make_staff(bed, "keeper"))):
        lab = join(bed, "bob")
        bed.labctl("bob", "up", "--yes", cwd=lab)
        # Slurm warns a run two minutes before the minutes are spent; this one does not listen.
        deaf = ("--", "sh", "-c", "trap '' TERM; " + RUN.format(seconds=600))
        bed.labctl("bob", "run", "--detach", "--id", "deaf", *deaf, cwd=lab)
        wait_for(lambda: not box.sh("squeue -h"), timeout_s=240)
        bed.labctl("bob", "run", "--detach", "--id", "more", *deaf, cwd=lab)
        wait_for(lambda: "AssocGrpGRESMinutes" in box.sh("squeue -h -o %r"))
        status = bed.labctl("bob", "status", "--refresh", cwd=lab)[0]
        assert "waiting: the time that you or your group may use is spent" in status
        bed.labctl("bob", "cancel", "more", cwd=lab)
    # Whoever has used less comes first.
    wait_for(lambda: read_share(box, "lab-alice") > read_share(box, "lab-bob"))
    # Staff sees what is spent, also in the costs, and how jobs ended.
    shown = run_course(bed, "status", "--refresh").stdout
    assert re.search(r"^bob .* 1 of 1 ", shown, re.MULTILINE), shown
    shown = run_course(bed, "cost").stdout
    assert re.search(r"^bob +Bob +1 of 1$", shown, re.MULTILINE), shown
    check_jobs(bed)


def test_whoever_has_used_less_is_next(bed: CourseBed, box: Sshd) -> None:
    """Bob has used more, and asks first."""
    with keeping(bed, SeatOperations(make_staff(bed, "keeper"))):
        for name in ("bob", "alice"):
            bed.labctl(name, "up", "--yes", cwd=join(bed, name))
    node = box.sh("sinfo -h -o %n").split()[0]
    box.sh(f"scontrol update nodename={node} state=drain reason=test")
    try:
        for name in ("bob", "alice"):
            box.sh(f"runuser -u lab-{name} -- sbatch -D /tmp -o /dev/null -t 1 --wrap true")
        waiting = dict(line.split() for line in box.sh("squeue -h -t PD -o '%u %Q'").splitlines())
        assert int(waiting["lab-alice"]) > int(waiting["lab-bob"]), waiting
        order = box.sh("squeue -h -t PD --sort=-p -o %u").split()
        assert order == ["lab-alice", "lab-bob"]
    finally:
        box.sh("scancel -u lab-alice; scancel -u lab-bob")
        box.sh(f"scontrol update nodename={node} state=resume")


def test_a_student_who_leaves_loses_the_association(bed: CourseBed, box: Sshd) -> None:
    (bed.folder / "ml" / "roster.csv").write_text(ROSTER.format(alice="no"))
    # As after a fault of the machine: `course up` starts what does not run.
    box.sh("systemctl stop slurmctld slurmdbd mariadb")
    bring_up(bed)
    assert list_users(box) == ["lab-bob|course-ml-2026|gres/gpu=1"]
    endings = end_seats(make_staff(bed), bed.course.list_seats(active_only=False))
    assert all(ending.ended for ending in endings)
    # What bob has used is not forgotten with his account.
    assert list_users(box) == ["lab-bob|course-ml-2026|gres/gpu=1"]
    used = box.sh("sshare -nP -a -A course-ml-2026 -o User,GrpTRESRaw")
    assert re.search(r"^ *lab-bob\|.*gres/gpu=1$", used, re.MULTILINE), used
