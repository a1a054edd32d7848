"""A machine with a real systemd, in a container: units, logind's sessions, lingering accounts."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab_servers import ROOT, wait_for
from sshd_container import Sshd, docker, greets

from labctl.actions.host_keys import make_key
from labctl.providers.local import engine
from labctl.providers.local.container import CAPABILITIES

CONTEXT = ROOT / "tests" / "systemd-machine"


def build_image(server_image: str) -> str:
    tag = f"labctl-test-systemd:{server_image.rpartition(':')[2]}"
    docker("build", "-q", "-t", tag, "--build-arg", f"LAB_SERVER={server_image}", str(CONTEXT))
    return tag


@contextmanager
def machine(image: str, folder: Path, capabilities: Sequence[str] = ()) -> Iterator[Sshd]:
    """A running one that `student` may log in to; `folder` gets the private key."""
    box = Sshd(f"labctl-test-systemd-{uuid.uuid4().hex[:8]}", folder / "key")
    public = make_key(box.key)
    rights = [word for name in (*CAPABILITIES, *capabilities) for word in ("--cap-add", name)]
    with engine.connected() as client:
        old = client.info().get("CgroupVersion", "1") == "1"
    cgroups = ["--cgroupns", "host" if old else "private"]
    cgroups += ["-v", "/sys/fs/cgroup:/sys/fs/cgroup"] if old else []
    docker(
        *("run", "-d", "--name", box.name, "-p", "127.0.0.1::22", "-e", "container=docker"),
        *(*rights, "--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined"),
        *(*cgroups, "--tmpfs", "/run", "--tmpfs", "/run/lock"),
        *("-e", f"LABCTL_AUTHORIZED_KEY={public}", image),
    )
    try:
        wait_for(lambda: greets(box.port))
        wait_for(lambda: box.sh("docker version >/dev/null 2>&1 && echo up || true"))
        yield box
    finally:
        docker("rm", "--force", "--volumes", box.name)
