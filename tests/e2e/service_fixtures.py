"""The fixtures around the lab of service_lab.py."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_lab import HOME, Recorder, ServiceLab
from sshd_container import Sshd, docker, wait_for

from labctl.servers.host_keys import ensure_key_pair


def _send(image: str, box: str) -> None:
    with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as save:
        words = ["docker", "exec", "-i", box, "docker", "load", "-q"]
        subprocess.run(words, stdin=save.stdout, check=True, stdout=subprocess.DEVNULL)
    assert save.returncode == 0


# What TensorBoard and JupyterLab never need: three quarters of the bytes.
TRAINING_WHEELS = ("torch-*", "scipy-*", "scikit_learn-*", "sympy-*")


def _send_wheels(folder: str, box: str) -> None:
    inside = f"{HOME}/.wheelhouse"
    docker("exec", "-u", "student", box, "mkdir", "-p", inside)
    others = [f"--exclude={pattern}" for pattern in TRAINING_WHEELS]
    words = ["tar", "-C", folder, *others, "-c", "."]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as pack:
        words = ["docker", "exec", "-i", "-u", "student", box, "tar", "-x", "-C", inside]
        subprocess.run(words, stdin=pack.stdout, check=True)
    assert pack.returncode == 0


def _logs(name: str) -> str:
    return subprocess.run(
        ["docker", "logs", name], capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="session")
def service_lab(
    server_image: str, image_with_pytest: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceLab]:
    folder = tmp_path_factory.mktemp("service-lab")
    key = folder / "id_ed25519"
    ensure_key_pair(key)
    box = Sshd(f"labctl-test-services-{uuid.uuid4().hex[:8]}", key)
    words = ["run", "-d", "--init", "--name", box.name, "-p", "127.0.0.1::22", "--tmpfs", "/run"]
    for capability in ("SYS_ADMIN", "NET_ADMIN", "MKNOD"):
        words += ["--cap-add", capability]
    words += ["--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined"]
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        words += ["-v", "/sys/fs/cgroup:/sys/fs/cgroup"]
    public = key.with_name(key.name + ".pub").read_text().strip()
    try:
        docker(*words, "-e", f"LABCTL_AUTHORIZED_KEY={public}", server_image)
        wait_for(lambda: "ready" in _logs(box.name))
        _send(image_with_pytest, box.name)
        wheels = os.environ.get("LABCTL_WHEELHOUSE", "")
        if wheels:
            _send_wheels(wheels, box.name)
        yield ServiceLab(box, folder / "ssh", image_with_pytest, bool(wheels))
    finally:
        subprocess.run(["docker", "rm", "-f", "-v", box.name], capture_output=True, check=False)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()
