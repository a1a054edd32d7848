"""What the role `slurm` writes for the hardware that newer versions of Slurm report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROLE = Path(__file__).parents[2] / "playbooks" / "roles" / "slurm"
PLAY = """\
- hosts: localhost
  connection: local
  gather_facts: false
  vars_files: [{role}/defaults/main.yml, {role}/vars/main.yml]
  tasks:
    - ansible.builtin.set_fact: {{hostname: gpu1, cacheable: true}}
    - ansible.builtin.set_fact:
        slurm_own_address: 127.0.0.1
        slurm_hardware: {{stdout_lines: ["{hardware}", "UpTime=0-01:00:00"]}}
        slurm_gpus: {{stdout_lines: ["0 a100", "1 a100"]}}
    - ansible.builtin.template: {{src: "{role}/templates/slurm.conf.j2", dest: "{file}"}}
"""
SHAPE = "CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=2"


@pytest.mark.parametrize("more", ["", " Gres=gpu:a100:2"])
def test_hardware_is_read_by_its_keys(more: str, tmp_path: Path) -> None:
    """Since 23.11, `slurmd -C` prints Gres after the memory."""
    file, play = tmp_path / "slurm.conf", tmp_path / "play.yml"
    hardware = f"NodeName=gpu1 {SHAPE} RealMemory=16000{more}"
    play.write_text(PLAY.format(role=ROLE, hardware=hardware, file=file))
    playbook = Path(sys.executable).with_name("ansible-playbook")
    done = subprocess.run(
        [str(playbook), "-i", "localhost,", str(play)],
        env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    node, partition = file.read_text().splitlines()[-2:]
    assert node == (
        f"NodeName=gpu1 NodeAddr=127.0.0.1 {SHAPE} RealMemory=14400 Gres=gpu:a100:2 State=UNKNOWN"
    )
    assert partition.endswith("DefMemPerCPU=1800")
