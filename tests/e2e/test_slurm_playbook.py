"""The playbook `slurm.yml` on two machines, without labctl: what jobs may and may not do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from slurm_machine import run_failing_playbook, run_playbook, slurm_machine, write_inventory
from sshd_container import Sshd, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.long]

# Which device files the account may open
OPENS = (
    "for n in 0 1; do head -c 1 /dev/nvidia$n >/dev/null 2>&1 && echo open $n || echo closed $n; "
    "done"
)


@pytest.fixture(scope="module")
def boxes(server_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sshd]]:
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    with ExitStack() as stack:
        machines = (slurm_machine(server_image, folder) for folder in folders)
        boxes = [stack.enter_context(machine) for machine in machines]
        run_playbook(write_inventory(boxes, folders[0]))
        for box in boxes:
            box.sh("useradd --create-home --uid 2000 ann")
        yield boxes


@pytest.fixture
def box(boxes: list[Sshd]) -> Sshd:
    """The controller."""
    return boxes[0]


def run_job(box: Sshd, script: str, *options: str) -> str:
    """What a job of ann's prints."""
    where = f"--nodelist={box.sh('hostname').strip()}"
    return box.sh(f"cd /tmp; srun --quiet {where} {' '.join(options)} {script}", user="ann")


def test_a_second_run_changes_nothing(boxes: list[Sshd], tmp_path: Path) -> None:
    output, changed = run_playbook(write_inventory(boxes, tmp_path))
    assert changed == 0, output
    assert boxes[0].sh("sinfo -h -o '%D|%t|%G'").strip() == "2|idle|gpu:t4:2"


def test_a_job_opens_its_own_gpu_and_its_account_no_other(box: Sshd) -> None:
    box.sh("sacctmgr -i add account ml; sacctmgr -i add user ann account=ml")
    assert box.sh(OPENS, user="ann").splitlines() == ["closed 0", "closed 1"]
    box.sh(f"cat >/tmp/opens <<'END'\n{OPENS}; echo $CUDA_VISIBLE_DEVICES\nEND")
    printed = run_job(box, "sh /tmp/opens", "--gres=gpu:t4:1")
    assert printed.splitlines() == ["open 0", "closed 1", "0"]
    assert run_job(box, "sh /tmp/opens").splitlines()[:2] == ["closed 0", "closed 1"]
    # The right ends with the job, as soon as its epilog has run.
    wait_for(lambda: box.sh(OPENS, user="ann").splitlines() == ["closed 0", "closed 1"])


def test_a_process_outside_of_the_job_does_not_keep_its_gpu(box: Sshd) -> None:
    """A shell of the account opens the job's GPU, and holds it after the job has ended."""
    box.sh("mknod -m 660 /dev/nvidiactl c 1 5")
    where = f"--nodelist={box.sh('hostname').strip()} --gres=gpu:t4:1"
    job = box.sh(f"cd /tmp; sbatch --parsable {where} --wrap 'sleep 600'", user="ann").strip()
    wait_for(lambda: "open 0" in box.sh(OPENS, user="ann"))
    holder = "exec 7</dev/nvidia0; exec 8</dev/nvidiactl; exec sleep 601"
    box.sh(f"setsid sh -c '{holder}' >/dev/null 2>&1 &", user="ann")
    box.sh("setsid sleep 602 >/dev/null 2>&1 &", user="ann")
    wait_for(lambda: box.sh("pgrep -f '^sleep 601' || true") != "")
    box.sh(f"scancel {job}")
    wait_for(lambda: box.sh("pgrep -f '^sleep 601' || true") == "")
    assert box.sh("pgrep -f '^sleep 602'")
    rights = "getfacl -cp /dev/nvidia0 /dev/nvidiactl | grep user:ann || true"
    wait_for(lambda: box.sh(rights) == "")
    wait_for(lambda: box.sh("sinfo -h -o %t").strip() == "idle")
    box.sh("pkill -f '^sleep 602'; rm /dev/nvidiactl")


def test_a_machine_that_staff_drained_stays_so(boxes: list[Sshd], tmp_path: Path) -> None:
    """A machine that is only down takes jobs again."""
    first, second = (box.sh("hostname").strip() for box in boxes)
    boxes[0].sh(f"scontrol update nodename={first} state=drain reason=disk")
    boxes[0].sh(f"scontrol update nodename={second} state=down reason=lost")
    run_playbook(write_inventory(boxes, tmp_path))
    states = boxes[0].sh("sinfo -h -N -o '%N %t'").splitlines()
    assert sorted(states) == sorted([f"{first} drain", f"{second} idle"])
    boxes[0].sh(f"scontrol update nodename={first} state=resume")


def test_another_cluster_is_not_overwritten(boxes: list[Sshd], tmp_path: Path) -> None:
    box = boxes[1]
    box.sh(
        "cp -p /etc/slurm/slurm.conf /tmp/; sed -i '1i # of the university' /etc/slurm/slurm.conf"
    )
    key = box.sh("sha256sum /etc/munge/munge.key")
    output = run_failing_playbook(write_inventory(boxes, tmp_path))
    assert "this machine is in a cluster of Slurm already" in output
    assert box.sh("sha256sum /etc/munge/munge.key") == key
    assert box.sh("head -n 1 /etc/slurm/slurm.conf") == "# of the university\n"
    box.sh("mv /tmp/slurm.conf /etc/slurm/slurm.conf")


def test_one_job_runs_on_both_machines(box: Sshd) -> None:
    words = "srun --quiet --nodes=2 --ntasks-per-node=1 --gres=gpu:2"
    printed = box.sh(f"cd /tmp; {words} sh -c 'echo $CUDA_VISIBLE_DEVICES'", user="ann")
    assert printed.splitlines() == ["0,1", "0,1"]


def test_an_account_that_slurm_does_not_know_runs_nothing(box: Sshd) -> None:
    box.sh("useradd --create-home eve")
    refusal = box.sh("cd /tmp; sbatch --wrap id 2>&1 || true", user="eve")
    assert "Invalid account or account/partition combination" in refusal
