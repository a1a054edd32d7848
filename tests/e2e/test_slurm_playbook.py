"""The playbook `slurm.yml` on two machines, without labctl: what jobs may and may not do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from slurm_machine import run_playbook, slurm_machine, write_inventory
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


def test_one_job_runs_on_both_machines(box: Sshd) -> None:
    words = "srun --quiet --nodes=2 --ntasks-per-node=1 --gres=gpu:2"
    printed = box.sh(f"cd /tmp; {words} sh -c 'echo $CUDA_VISIBLE_DEVICES'", user="ann")
    assert printed.splitlines() == ["0,1", "0,1"]


def test_an_account_that_slurm_does_not_know_runs_nothing(box: Sshd) -> None:
    box.sh("useradd --create-home eve")
    refusal = box.sh("cd /tmp; sbatch --wrap id 2>&1 || true", user="eve")
    assert "Invalid account or account/partition combination" in refusal
