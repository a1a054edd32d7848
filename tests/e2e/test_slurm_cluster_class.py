"""A class on two machines that Slurm makes one cluster, as its staff and students use it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from course_bed import CourseBed, keeping
from slurm_class_bed import (
    CLUSTER_LIMITS,
    HOMES,
    MARKS,
    bring_up,
    count_changes,
    join,
    list_users,
    make_staff,
    run_class,
    run_course,
    run_machines,
)
from slurm_machine import CLOSED_DEVICES
from sshd_container import Sshd, wait_for
from systemd_machine import load_image

from labctl.courses.seat_operations import SeatOperations
from labctl.courses.teardown import end_seats

pytestmark = MARKS
IMAGE = "labctl-test-small:1"


@pytest.fixture(scope="module")
def boxes(server_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sshd]]:
    """The controller, and another node."""
    with run_machines(server_image, tmp_path_factory, ("gpu1", "gpu2"), CLOSED_DEVICES) as boxes:
        yield boxes


@pytest.fixture(scope="module")
def bed(boxes: list[Sshd], tmp_path_factory: pytest.TempPathFactory) -> Iterator[CourseBed]:
    folder = tmp_path_factory.mktemp("class")
    settings = CLUSTER_LIMITS.format(port=boxes[0].port, homes=HOMES)
    with run_class(boxes[::-1], folder, settings) as bed:
        yield bed


def with_setting(bed: CourseBed, before: str, after: str) -> subprocess.CompletedProcess[str]:
    """What `course plan` says with another course.yaml, which is then as it was."""
    path = bed.folder / "ml" / "course.yaml"
    text = path.read_text()
    assert before in text
    try:
        path.write_text(text.replace(before, after))
        return run_course(bed, "plan")
    finally:
        path.write_text(text)


def test_what_cannot_work_is_refused_before_anything_changes(
    bed: CourseBed, boxes: list[Sshd]
) -> None:
    apart = with_setting(bed, f"homes: {HOMES}", "homes: /home")
    assert apart.returncode == 1
    words = " ".join((apart.stdout + apart.stderr).split())
    first, second = (f"127.0.0.1:{box.port}" for box in boxes)
    assert f"/home on {second} is not the /home of {first}" in words
    away = with_setting(bed, f"port: {boxes[1].port}", "port: 1")
    assert away.returncode == 1
    assert "127.0.0.1:1" in away.stdout + away.stderr
    for box in boxes:
        state = "ls -A /home /srv/class; getent passwd; ls /etc/slurm/slurm.conf 2>&1; true"
        listing = box.sh(state)
        assert "labctl-shared" not in listing
        assert "lab-alice" not in listing
        assert "No such file" in listing


def test_the_machines_become_one_cluster_and_its_accounts_have_one_number(
    bed: CourseBed, boxes: list[Sshd]
) -> None:
    shown = run_course(bed, "plan")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "one cluster: controller" in shown.stdout
    bring_up(bed)
    shown = run_course(bed, "plan")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert boxes[0].sh("sinfo -h -N -o '%N %t'").split() == ["gpu1", "idle", "gpu2", "idle"]
    records = [box.sh("getent passwd lab-alice lab-bob") for box in boxes]
    assert records[0] == records[1]
    assert [line.split(":")[2] for line in records[0].splitlines()] == ["20000", "20001"]
    assert f"{HOMES}/lab-alice" in records[0]
    # One of the four GPUs of both machines has a quarter of their processors.
    cpus = int(boxes[0].sh("sinfo -h -o %C").strip().rpartition("/")[2])
    qos = boxes[0].sh("sacctmgr -nP show qos course-ml-2026 format=MaxTRESPU")
    assert f"cpu={max(1, -(-cpus // 4))}," in qos


def test_two_processes_that_begin_at_once_give_each_student_a_number_of_their_own(
    bed: CourseBed, boxes: list[Sshd]
) -> None:
    endings = end_seats(make_staff(bed), bed.course.list_seats(active_only=False))
    assert all(ending.ended for ending in endings)
    for box in boxes:
        box.sh("userdel lab-alice; userdel lab-bob; rm -rf /srv/class/lab-*")
    runs = []
    for name in ("alice", "bob"):
        argv, environ = bed.command("up", "--only", name, "--yes")
        runs.append(
            subprocess.Popen(
                argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    for run in runs:
        output = run.communicate()[0]
        assert run.returncode == 0, output
    uids = [box.sh("id -u lab-alice; id -u lab-bob").split() for box in boxes]
    assert uids[0] == uids[1]
    assert sorted(uids[0]) == ["20000", "20001"]


def test_two_runs_of_course_up_at_once_change_nothing(bed: CourseBed, boxes: list[Sshd]) -> None:
    marks = [box.sh("stat -c %Y /etc/slurm/slurm.conf /etc/munge/munge.key") for box in boxes]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: bring_up(bed), range(2)))
    assert count_changes(bed) == 0
    same = [box.sh("stat -c %Y /etc/slurm/slurm.conf /etc/munge/munge.key") for box in boxes]
    assert same == marks


def test_a_run_uses_the_other_machine_and_its_results_come_back(
    bed: CourseBed, boxes: list[Sshd]
) -> None:
    with keeping(bed, SeatOperations(make_staff(bed, "keeper"))):
        lab = join(bed, "alice")
        bed.labctl("alice", "up", "--yes", cwd=lab)
        boxes[0].sh("scontrol update nodename=gpu1 state=drain reason=test")
        script = 'echo "on $(hostname) GPU $CUDA_VISIBLE_DEVICES"; echo 1 >"$LABCTL_RUN_DIR/x"'
        output = bed.labctl("alice", "run", "--id", "far", "--", "sh", "-c", script, cwd=lab)[0]
        assert "on gpu2 GPU 0" in output
        bed.labctl("alice", "pull", "far", cwd=lab)
        boxes[0].sh("scontrol update nodename=gpu1 state=resume")


def test_a_run_with_an_image_is_a_container_on_the_other_machine(
    bed: CourseBed, boxes: list[Sshd], tmp_path: Path
) -> None:
    for box in boxes:
        load_image(box, IMAGE, tmp_path)
    with keeping(bed, SeatOperations(make_staff(bed, "keeper"))):
        lab = join(bed, "bob")
        with (lab / "lab.yaml").open("a") as file:
            file.write(f"image: {IMAGE}\n")
        bed.labctl("bob", "up", "--yes", cwd=lab)
        boxes[0].sh("scontrol update nodename=gpu1 state=drain reason=test")
        script = "echo on $SLURMD_NODENAME; nvidia-smi -L; echo 1 >$LABCTL_RUN_DIR/x"
        output = bed.labctl("bob", "run", "--id", "boxed", "--", "sh", "-c", script, cwd=lab)[0]
        assert "on gpu2" in output
        assert output.count("GPU-") == 1
        bed.labctl("bob", "pull", "boxed", cwd=lab)
        boxes[0].sh("scontrol update nodename=gpu1 state=resume")


def test_class_hours_are_reserved_and_a_run_needs_no_option(
    bed: CourseBed, boxes: list[Sshd]
) -> None:
    path = bed.folder / "ml" / "course.yaml"
    text = path.read_text()
    days = "[mon, tue, wed, thu, fri, sat, sun]"
    hours = f"hours: [{{days: {days}, from: '0:00', to: '24:00', zone: UTC}}]\n"
    path.write_text(text + hours)
    bring_up(bed)
    assert count_changes(bed) == 0
    names = boxes[0].sh("scontrol -o show reservation | cut -d' ' -f1").split()
    assert len(names) >= 8
    assert all(name.startswith("ReservationName=course-ml-2026-2") for name in names)
    lab = bed.folder / "alice-home"
    lab = next(lab.rglob("lab.yaml")).parent
    run = ("run", "--detach", "--id", "inside", "--", "sleep", "600")
    with keeping(bed, SeatOperations(make_staff(bed, "keeper"))):
        bed.labctl("alice", *run, cwd=lab)
        wait_for(lambda: "course-ml-2026-2" in boxes[0].sh("squeue -h -t R -o %v"))
        # Without hours nothing stays reserved, and the run goes on.
        path.write_text(text)
        bring_up(bed)
        assert "R" in boxes[0].sh("squeue -h -o %t")
        bed.labctl("alice", "cancel", "inside", cwd=lab)
    ended = "scontrol -o show reservation | grep -c ReservationName || true"
    wait_for(lambda: boxes[0].sh(ended).strip() == "0", timeout_s=120)


def test_students_cannot_pass_their_limits_by_slurms_own_commands(
    bed: CourseBed, boxes: list[Sshd]
) -> None:
    box = boxes[0]
    for words, refusal in (
        ("--gres=gpu:2", "QOSMax"),
        ("--nodes=2 --gres=gpu:1", "QOSMax"),
        ("--time=1:00:00", "QOSMaxWallDurationPerJobLimit"),
        ("--account=root", "Invalid account"),
        ("--qos=normal", "Invalid qos"),
        ("--uid=lab-bob", ""),
    ):
        line = f"cd /tmp; sbatch {words} --wrap id 2>&1 && echo submitted || true"
        output = box.sh(line, user="lab-alice")
        assert "submitted" not in output, (words, output)
        assert refusal in output
    job = box.sh("cd /tmp; sbatch --parsable --gres=gpu:1 --wrap 'sleep 600'", user="lab-bob")
    wait_for(lambda: "R" in box.sh("squeue -h -o %t"))
    assert "denied" in box.sh(f"scancel {job.strip()} 2>&1 || true", user="lab-alice")
    assert box.sh("squeue -h", user="lab-alice") == ""
    assert box.sh("squeue -h -o %i") == job
    more = "sacctmgr -i modify user lab-alice set GrpTRESMins=gres/gpu=-1 2>&1 || true"
    box.sh(more, user="lab-alice")
    assert "lab-alice|course-ml-2026|gres/gpu=1200" in list_users(box)


def test_a_student_who_leaves_during_a_job_loses_it(bed: CourseBed, boxes: list[Sshd]) -> None:
    assert boxes[0].sh("squeue -h -o %u") == "lab-bob\n"
    roster = bed.folder / "ml" / "roster.csv"
    text = roster.read_text()
    roster.write_text(text.replace("bob,Bob,,,,yes", "bob,Bob,,,,no"))
    bring_up(bed)
    assert boxes[0].sh("squeue -h") == ""
    assert list_users(boxes[0]) == ["lab-alice|course-ml-2026|gres/gpu=1200"]
    roster.write_text(text)


def test_the_end_of_the_course_frees_all_machines(bed: CourseBed, boxes: list[Sshd]) -> None:
    # As after a fault of the controller: `course up` starts what does not run.
    boxes[0].sh("systemctl stop slurmctld slurmdbd")
    boxes[1].sh("systemctl stop slurmd")
    bring_up(bed)
    assert boxes[0].sh("sinfo -h -N -o %t").split() == ["idle", "idle"]
    endings = end_seats(make_staff(bed), bed.course.list_seats(active_only=False))
    assert all(ending.ended for ending in endings)
    argv, environ = bed.command("status", "--json")
    shown = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True).stdout
    assert not any(seat.get("server") for seat in json.loads(shown)["seats"])
    for box in boxes:
        assert box.sh("id -nG lab-alice").split()[-1] == "labctl-ended"
    assert make_staff(bed).course(plain=True).provider.servers() == []
