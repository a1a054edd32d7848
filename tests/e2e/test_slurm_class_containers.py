"""Containers in the jobs of a class whose engine is Slurm: the broker has Docker start them inside.

Behind the GPUs are device files that a container cannot open unless it was given them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from course_bed import CourseBed, keeping
from slurm_class_bed import LIMITS, MARKS, bring_up, find_lab, join, make_staff, run_class
from slurm_machine import CLOSED_DEVICES, slurm_machine
from sshd_container import Sshd, wait_for
from systemd_machine import load_image

from labctl.courses.seat_operations import SeatOperations

pytestmark = MARKS
IMAGE = "labctl-test-small:1"
UUID = "GPU-5b1d6f0e-0000-4000-8000-00000000000"
# Takes up this much memory, in MB, for some seconds.
EAT = "{{ head -c {size}000000 /dev/zero; sleep 5; }} | tail >/dev/null"
TRAIN = """\
trap 'echo weights >"$LABCTL_CHECKPOINT_DIR/model"; exit 143' TERM
nvidia-smi -L
echo "as $(id -un) in $(pwd) with $COLOR"
touch /lab/data/x 2>/dev/null || echo "data cannot be changed"
while :; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def box(server_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_machine(server_image, folder, devices=CLOSED_DEVICES) as box:
        load_image(box, IMAGE, folder)
        yield box


@pytest.fixture(scope="module")
def bed(box: Sshd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CourseBed]:
    folder = tmp_path_factory.mktemp("class")
    settings = f"{LIMITS.format(minutes=1200)}image: {IMAGE}\n"
    with run_class([box], folder, settings) as bed:
        bring_up(bed)
        with keeping(bed, SeatOperations(make_staff(bed, "keeper"))):
            for student in ("alice", "bob"):
                bed.labctl(student, "up", "--yes", cwd=join(bed, student))
            yield bed


def shell(bed: CourseBed, student: str, line: str, code: int = 0) -> str:
    """What a student's line on the machine prints."""
    words = ("ssh", "--", f"{line} 2>&1")
    return "".join(bed.labctl(student, *words, cwd=find_lab(bed, student), code=code))


def list_containers(box: Sshd) -> list[str]:
    return box.sh("docker ps -aq --filter label=labctl.slurm-job").split()


def submit(bed: CourseBed, student: str, line: str, options: str = "") -> str:
    """Submit a job that starts a container in the background; return its number."""
    words = f"sbatch --parsable {options} --wrap '{line}'"
    return shell(bed, student, words).split()[-1]


def test_a_shell_outside_of_a_job_starts_no_container(bed: CourseBed) -> None:
    refusal = shell(bed, "alice", f"docker run --rm {IMAGE} true", 125)
    assert "a container is a part of a job of Slurm" in refusal
    assert "srun --pty bash" in refusal
    assert "CONTAINER ID" in shell(bed, "alice", "docker ps")
    line = "mkdir -p empty && echo FROM scratch >empty/Dockerfile && docker build empty"
    assert "docker save NAME | labctl ssh -- docker load" in shell(bed, "alice", line, 1)


def test_a_student_sends_an_image_that_nobody_else_sees(bed: CourseBed, box: Sshd) -> None:
    box.sh(f"docker tag {IMAGE} own:1 && docker save own:1 >/tmp/own.tar && docker rmi own:1")
    shell(bed, "alice", "docker load </tmp/own.tar")
    run = "srun docker run --rm own:1 echo started"
    assert "started" in shell(bed, "alice", run)
    assert "started" not in shell(bed, "bob", run, 125)


def test_a_container_has_the_gpu_the_memory_and_the_processors_of_its_job(
    bed: CourseBed, box: Sshd
) -> None:
    look = (
        "nvidia-smi -L; ls /dev; head -c 0 /dev/nvidia0 && echo opened; nproc; "
        "grep devices /proc/self/cgroup"
    )
    output = shell(
        bed,
        "alice",
        f'srun --gres=gpu:1 --mem=200M docker run --rm --gpus all {IMAGE} sh -c "{look}"',
    )
    assert f"{UUID}0" in output
    assert f"{UUID}1" not in output
    assert "nvidia1" not in output
    assert "opened" in output
    assert "\n1\n" in output
    assert "/job_" in output
    # The number of a GPU is that inside of the job.
    one = f"docker run --rm --gpus device={{name}} {IMAGE} nvidia-smi -L"
    assert f"{UUID}0" in shell(bed, "alice", f"srun --gres=gpu:1 {one.format(name=0)}")
    other = shell(bed, "alice", f"srun --gres=gpu:1 {one.format(name=f'{UUID}1')}", 125)
    assert "only the GPUs of its job" in other
    refusal = shell(bed, "alice", f"srun docker run --rm --gpus all {IMAGE} true", 125)
    assert "srun --gres=gpu:1" in refusal
    none = shell(bed, "alice", f"srun --gres=gpu:1 docker run --rm {IMAGE} ls /dev")
    assert "nvidia" not in none


def test_another_student_gets_the_other_gpu(bed: CourseBed, box: Sshd) -> None:
    held = submit(bed, "alice", "sleep 600", "--gres=gpu:1")
    wait_for(lambda: box.sh(f"squeue -h -j {held} -o %t").strip() == "R")
    look = "sh -c 'nvidia-smi -L; head -c 0 /dev/nvidia1 && echo opened; ls /dev'"
    output = shell(bed, "bob", f"srun --gres=gpu:1 docker run --rm --gpus all {IMAGE} {look}")
    assert f"{UUID}1" in output
    assert f"{UUID}0" not in output
    assert "nvidia0" not in output
    assert "opened" in output
    shell(bed, "alice", f"scancel {held}")


def test_all_containers_of_a_job_share_its_memory(bed: CourseBed) -> None:
    run = f"docker run --rm {IMAGE} sh -c"
    shell(bed, "alice", f'srun --mem=200M {run} "{EAT.format(size=100)}"')
    shell(bed, "alice", f'srun --mem=200M {run} "{EAT.format(size=300)}"', 137)
    part = f'{run} "{EAT.format(size=130)}"'
    script = f"{part} & {part} & wait -n; one=$?; wait -n; echo codes $one $?"
    output = shell(bed, "alice", f"srun --mem=200M bash -c '{script}'")
    assert "137" in output.partition("codes")[2]


def test_a_container_ends_with_its_job(bed: CourseBed, box: Sshd) -> None:
    detached = f"docker run -d --name mine {IMAGE} sleep 600"
    waiting = submit(bed, "alice", f"{detached}; sleep 600")
    wait_for(lambda: list_containers(box))
    ended = submit(bed, "bob", detached)
    wait_for(lambda: not box.sh(f"squeue -h -j {ended} 2>/dev/null || true"))
    assert len(list_containers(box)) == 1
    # The other job's container is nobody else's, and nobody chooses another job.
    assert "No such container" in shell(bed, "bob", "docker exec mine true", 1)
    parent = f"docker run --rm --cgroup-parent /slurm/uid_20000/job_{waiting} {IMAGE} true"
    assert "HostConfig.CgroupParent" in shell(bed, "bob", f"srun {parent}", 125)
    assert "mine" in shell(bed, "alice", "docker exec mine hostname; docker ps --format {{.Names}}")
    shell(bed, "alice", f"scancel {waiting}")
    wait_for(lambda: not list_containers(box))
    wait_for(lambda: not box.sh("squeue -h"))
    assert "No such container" in shell(bed, "alice", "docker exec mine true", 1)
    wait_for(lambda: not box.sh("ls /run/labctl/jobs"))
    assert not box.sh(f"find /sys/fs/cgroup -name job_{waiting} 2>/dev/null || true")


def test_a_process_that_is_in_the_job_of_another_student_is_refused(
    bed: CourseBed, box: Sshd
) -> None:
    job = submit(bed, "alice", "sleep 600")
    wait_for(lambda: box.sh(f"ls /run/labctl/jobs/{job} 2>/dev/null || true"))
    group = box.sh(f"ls -d /sys/fs/cgroup/memory/slurm*/uid_*/job_{job}").strip()
    line = f"echo $$ >{group}/cgroup.procs; runuser -u lab-{{name}} -- {{run}} 2>&1 || true"
    run = f"docker -H unix:///run/labctl/broker.sock run --rm {IMAGE} echo within"
    assert "within" in box.sh(line.format(name="alice", run=run))
    assert "a container is a part of a job" in box.sh(line.format(name="bob", run=run))
    shell(bed, "alice", f"scancel {job}")


def test_the_time_limit_ends_a_container_although_the_broker_is_down(
    bed: CourseBed, box: Sshd
) -> None:
    job = submit(bed, "alice", f"docker run -d {IMAGE} sleep 600; sleep 600", "--time=1")
    wait_for(lambda: list_containers(box))
    box.sh("systemctl stop labctl-broker")
    try:
        wait_for(lambda: not list_containers(box), timeout_s=240)
    finally:
        box.sh("systemctl start labctl-broker")
        listing = "runuser -u lab-alice -- docker -H unix:///run/labctl/broker.sock ps 2>&1 || true"
        wait_for(lambda: "CONTAINER ID" in box.sh(listing))
    states = box.sh(f"sacct -n -X -P -j {job} --format=State")
    assert "TIMEOUT" in states


def test_the_broker_removes_what_the_epilog_has_left(bed: CourseBed, box: Sshd) -> None:
    job = submit(bed, "alice", f"docker run -d {IMAGE} sleep 600; sleep 600")
    wait_for(lambda: list_containers(box))
    box.sh(f"rm /run/labctl/jobs/{job}.containers")
    shell(bed, "alice", f"scancel {job}")
    wait_for(lambda: not list_containers(box))


def test_the_containers_of_a_job_share_a_limit_of_processes(bed: CourseBed, box: Sshd) -> None:
    job = submit(bed, "alice", f"docker run -d {IMAGE} sleep 600; sleep 600")
    wait_for(lambda: list_containers(box))
    pid = box.sh(f"docker inspect --format {{{{.State.Pid}}}} {list_containers(box)[0]}").strip()
    group = box.sh(f"grep :pids: /proc/{pid}/cgroup").strip().rpartition(":")[2]
    above, job_name, _ = group.partition(f"/job_{job}/")
    assert job_name, group
    assert box.sh(f"cat /sys/fs/cgroup/pids{above}{job_name}pids.max") == "4096\n"
    shell(bed, "alice", f"scancel {job}")
    wait_for(lambda: not list_containers(box))


def test_a_container_does_not_survive_a_new_start_of_its_job(bed: CourseBed, box: Sshd) -> None:
    job = submit(bed, "alice", f"docker run -d {IMAGE} sleep 600; sleep 600", "--requeue")
    wait_for(lambda: list_containers(box))
    first = box.sh(f"cat /run/labctl/jobs/{job}").split()[-1]
    box.sh(f"scontrol requeue {job}")
    wait_for(lambda: not list_containers(box))
    # Slurm waits two minutes. One that is made to start at once may do so before its own epilog.
    wait_for(lambda: list_containers(box), timeout_s=240)
    assert box.sh(f"cat /run/labctl/jobs/{job}").split()[-1] != first
    (own,) = list_containers(box)
    # As if the first start had asked for it just before it ended, and the engine was slow.
    label = f"--label labctl.uid=$(id -u lab-alice) --label labctl.slurm-job={job}"
    box.sh(f"docker run -d {label} --label labctl.slurm-attempt={first} {IMAGE} sleep 600")
    wait_for(lambda: list_containers(box) == [own])
    shell(bed, "alice", f"scancel {job}")
    wait_for(lambda: not list_containers(box))


def test_a_container_from_before_the_class_used_slurm_ends(bed: CourseBed, box: Sshd) -> None:
    line = f"docker run -d --label labctl.uid=$(id -u lab-alice) {IMAGE} sleep 600"
    container = box.sh(line).strip()
    wait_for(lambda: container not in box.sh("docker ps -aq --no-trunc"))


def test_a_run_with_an_image_is_a_container_in_its_job(bed: CourseBed, box: Sshd) -> None:
    lab = find_lab(bed, "alice")
    assert f'image: "{IMAGE}"' in (lab / "lab.yaml").read_text()
    (lab / "train.sh").write_text(TRAIN)
    run = ("run", "--detach", "--id", "boxed", "--", "sh", "train.sh")
    bed.labctl("alice", *run, cwd=lab)

    def read_log() -> str:
        return bed.labctl("alice", "logs", "boxed", cwd=lab)[0]

    wait_for(lambda: "data cannot be changed" in read_log())
    assert f"{UUID}0" in read_log()
    assert "as lab in /lab/run/code" in read_log()
    assert len(list_containers(box)) == 1
    exec_words = ("exec", "boxed", "--", "sh", "-c", "echo $LABCTL_RUN_ID; ls /lab/run")
    beside = bed.labctl("alice", *exec_words, cwd=lab)[0]
    assert beside.split()[:2] == ["boxed", "checkpoints"]
    assert "canceled (SIGTERM)" in bed.labctl("alice", "cancel", "boxed", cwd=lab)[0]
    wait_for(lambda: not list_containers(box))
    bed.labctl("alice", "pull", "boxed", cwd=lab)
    assert (lab / "runs" / "boxed" / "checkpoints" / "model").read_text() == "weights\n"
    failing = ("run", "--id", "failing", "--", "sh", "-c", "exit 7")
    bed.labctl("alice", *failing, cwd=lab, code=7)


def test_a_run_that_needs_more_memory_than_its_job_says_so(bed: CourseBed) -> None:
    lab = find_lab(bed, "alice")
    with (lab / "lab.yaml").open("a") as file:
        file.write("limits: {memory: 200MB}\n")
    bed.labctl("alice", "trust", "--yes", cwd=lab)
    hungry = ("run", "--id", "hungry", "--", "sh", "-c", EAT.format(size=400))
    output = bed.labctl("alice", *hungry, cwd=lab, code=137)
    assert "memory" in "".join(output)
    status = bed.labctl("alice", "status", "--refresh", cwd=lab)[0]
    assert "memory" in status


def test_a_class_may_have_more_accounts_than_the_engine_has_networks(
    bed: CourseBed, box: Sshd
) -> None:
    box.sh("docker network ls -q --filter label=labctl.uid | xargs -r docker network rm")
    fill = "docker network create --label labctl.uid=9 other$n 2>/dev/null"
    box.sh(f"n=0; while {fill}; do n=$((n + 1)); done; test $n -gt 9")
    assert "within" in shell(bed, "alice", f"srun docker run --rm {IMAGE} echo within")
    assert "other" not in box.sh("docker network ls")


def test_with_dockers_systemd_driver_a_job_has_a_slice_with_its_limits(
    bed: CourseBed, box: Sshd
) -> None:
    """The last one: it leaves Docker so."""
    script = (
        "import json; p = '/etc/docker/daemon.json'; settings = json.load(open(p)); "
        "settings['exec-opts'] = ['native.cgroupdriver=systemd']; json.dump(settings, open(p, 'w'))"
    )
    box.sh(f'python3 -c "{script}"')
    box.sh("systemctl restart docker && docker info --format '{{.CgroupDriver}}' | grep systemd")
    run = f"docker run --rm {IMAGE} sh -c"
    shell(bed, "alice", f'srun --mem=200M {run} "{EAT.format(size=100)}"')
    shell(bed, "alice", f'srun --mem=200M {run} "{EAT.format(size=300)}"', 137)
    gpu = f"srun --gres=gpu:1 docker run --rm --gpus all {IMAGE} nvidia-smi -L"
    assert f"{UUID}0" in shell(bed, "alice", gpu)
    job = submit(bed, "alice", f"docker run -d {IMAGE} sleep 600; sleep 600")
    show = f"systemctl show -P ActiveState labctl-job{job}.slice"
    wait_for(lambda: box.sh(show).strip() == "active")
    # With cgroup v2 these are its processors; here systemd only stores them.
    cpus = box.sh(f"cat /sys/fs/cgroup/cpuset/slurm*/uid_*/job_{job}/cpuset.cpus").strip()
    assert box.sh(f"systemctl show -P AllowedCPUs labctl-job{job}.slice").strip() == cpus
    shell(bed, "alice", f"scancel {job}")
    wait_for(lambda: not list_containers(box))
    wait_for(lambda: box.sh(show).strip() == "inactive")
    assert not box.sh("ls /run/systemd/system.control | grep labctl-job || true")
