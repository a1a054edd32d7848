"""The playbook `slurm.yml` on a bare machine, without labctl: what its jobs may and may not do."""

from __future__ import annotations

from collections.abc import Iterator
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
def box(server_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_machine(server_image, folder) as box:
        run_playbook(write_inventory(box, folder))
        box.sh("useradd --create-home ann")
        yield box


def run_job(box: Sshd, script: str, *options: str) -> str:
    """What a job of ann's prints."""
    words = ["sbatch", "--parsable", "--wait", "-o", "/tmp/job", *options, "--wrap", f'"{script}"']
    box.sh("rm -f /tmp/job")
    box.sh(f"cd /tmp; {' '.join(words)}", user="ann")
    return box.sh("cat /tmp/job")


def test_a_second_run_changes_nothing(box: Sshd, tmp_path: Path) -> None:
    output, changed = run_playbook(write_inventory(box, tmp_path))
    assert changed == 0, output
    assert "idle|gpu:t4:2" in box.sh("sinfo -h -o '%t|%G'")


def test_a_job_opens_its_own_gpu_and_its_account_no_other(box: Sshd) -> None:
    box.sh("sacctmgr -i add account ml; sacctmgr -i add user ann account=ml")
    assert box.sh(OPENS, user="ann").splitlines() == ["closed 0", "closed 1"]
    box.sh(f"cat >/tmp/opens <<'END'\n{OPENS}; echo $CUDA_VISIBLE_DEVICES\nEND")
    printed = run_job(box, "sh /tmp/opens", "--gres=gpu:t4:1")
    assert printed.splitlines() == ["open 0", "closed 1", "0"]
    assert run_job(box, "sh /tmp/opens").splitlines()[:2] == ["closed 0", "closed 1"]
    # The right ends with the job, as soon as its epilog has run.
    wait_for(lambda: box.sh(OPENS, user="ann").splitlines() == ["closed 0", "closed 1"])


def test_an_account_that_slurm_does_not_know_runs_nothing(box: Sshd) -> None:
    box.sh("useradd --create-home eve")
    refusal = box.sh("cd /tmp; sbatch --wrap id 2>&1 || true", user="eve")
    assert "Invalid account or account/partition combination" in refusal
