"""A machine with systemd and two stand-in GPUs, which the playbook `slurm.yml` makes a cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import systemd_machine
from lab_servers import GPU_SETTINGS, ROOT, build_on
from sshd_container import Sshd

CONTEXT = ROOT / "tests" / "slurm-machine"
RIGHTS = [word for name in GPU_SETTINGS["extra_capabilities"] for word in ("--cap-add", name)]
# Device files as a driver makes them, which every container may open and no program needs.
DEVICES = ("1 5", "1 7")
# /dev/fuse and /dev/loop-control, which runc lets no container open by itself
CLOSED_DEVICES = ("10 229", "10 237")


def build_image(server_image: str) -> str:
    gpu_image = systemd_machine.build_gpu_image(server_image)
    return build_on(gpu_image, "labctl-test-slurm-machine", CONTEXT)


@contextmanager
def slurm_machine(
    server_image: str,
    folder: Path,
    options: Sequence[str] = (),
    devices: Sequence[str] = DEVICES,
) -> Iterator[Sshd]:
    """A running one. With CLOSED_DEVICES, a container on it opens only those it was given."""
    image = build_image(server_image)
    # The machine is a container itself: it may open them, and give them to its containers.
    rules = [f"--device-cgroup-rule=c {device.replace(' ', ':')} rwm" for device in devices]
    with systemd_machine.machine(image, folder, [*RIGHTS, *rules, *options]) as box:
        for minor, device in enumerate(devices):
            box.sh(f"mknod -m 660 /dev/nvidia{minor} c {device}")
        if devices != DEVICES:
            box.sh(f"printf '%s\\n' '{devices[0]}' '{devices[1]}' >/etc/gpu-standin-device")
        yield box


def write_inventory(boxes: Sequence[Sshd], folder: Path) -> Path:
    """The file `hosts` that a person writes for these machines: gpu1, gpu2, ..."""
    known_hosts = folder / "known_hosts"
    keys = [f"[127.0.0.1]:{box.port} {box.host_key}\n" for box in boxes]
    known_hosts.write_text("".join(keys))
    inventory = folder / "hosts"
    lines = [
        f"gpu{number} ansible_host=127.0.0.1 ansible_port={box.port} ansible_user=student "
        f"ansible_ssh_private_key_file={box.key} "
        f"ansible_ssh_common_args='-o UserKnownHostsFile={known_hosts}'\n"
        for number, box in enumerate(boxes, 1)
    ]
    inventory.write_text("".join(lines))
    return inventory


def run_playbook(inventory: Path) -> tuple[str, int]:
    """What a person types: its output, and how many tasks changed something on any machine."""
    done = _play(inventory)
    assert done.returncode == 0, done.stdout + done.stderr
    changed = re.findall(r"changed=(\d+)", done.stdout)
    return done.stdout, sum(map(int, changed))


def run_failing_playbook(inventory: Path) -> str:
    """Its output."""
    done = _play(inventory)
    assert done.returncode != 0, done.stdout
    return done.stdout


def _play(inventory: Path) -> subprocess.CompletedProcess[str]:
    playbook = str(Path(sys.executable).with_name("ansible-playbook"))
    return subprocess.run(
        ["env", "LC_ALL=C.UTF-8", playbook, "-i", str(inventory), "playbooks/slurm.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
