"""A machine with a real systemd, in a container: units, logind's sessions, lingering accounts."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab_directory import LabDirectory, make_lab
from lab_servers import GPU_CONTEXT, ROOT, build_on, wait_for
from sshd_container import Sshd, docker, greets

from labctl.providers.local import engine
from labctl.providers.local.container import CAPABILITIES
from labctl.servers.host_keys import ensure_key_pair

STATIC = """\
lab: {name}
server:
  provider: static
  static:
    hosts: [{{host: 127.0.0.1, port: {port}, user: student, identity: {key}}}]
  ttl: 8h
image: {image}
run: sh train.sh
outputs: [checkpoints, logs]
"""
CGROUPS = Path("/sys/fs/cgroup")
CONTEXT = ROOT / "tests" / "systemd-machine"


def build_image(server_image: str) -> str:
    return build_on(server_image, "labctl-test-systemd", CONTEXT)


def build_gpu_image(server_image: str) -> str:
    """The same with a stand-in for two GPUs."""
    return build_on(build_image(server_image), "labctl-test-systemd-gpu", GPU_CONTEXT)


def _list_cgroup_options() -> list[str]:
    """Options of `docker run` that give systemd its cgroups, and the engine below it.

    With cgroup v1 each mounted controller is bound by itself, below a tmpfs that is read-only: on
    the host's own tmpfs systemd would make directories for controllers that are not mounted there,
    and the host's engine would no longer find the cgroups of its containers.
    """
    with engine.connect() as client:
        if client.info().get("CgroupVersion", "1") != "1":
            return ["--cgroupns", "private"]
    mounted = sorted(path for path in CGROUPS.iterdir() if path.is_mount())
    binds = [word for path in mounted for word in ("-v", f"{path}:{path}")]
    return ["--cgroupns", "host", "--tmpfs", f"{CGROUPS}:ro,size=1m", *binds]


@contextmanager
def machine(image: str, folder: Path, options: Sequence[str] = ()) -> Iterator[Sshd]:
    """A running one that `student` may log in to; `folder` gets the private key.

    `options` are further words for `docker run`.
    """
    box = Sshd(f"labctl-test-systemd-{uuid.uuid4().hex[:8]}", folder / "key")
    public = ensure_key_pair(box.key)
    rights = [word for name in CAPABILITIES for word in ("--cap-add", name)]
    cgroups = _list_cgroup_options()
    docker(
        *("run", "-d", "--name", box.name, "-p", "127.0.0.1::22", "-e", "container=docker"),
        *(*rights, "--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined"),
        *(*options, *cgroups, "--tmpfs", "/run", "--tmpfs", "/run/lock"),
        *("-e", f"LABCTL_AUTHORIZED_KEY={public}", image),
    )
    try:
        wait_for(lambda: greets(box.port))
        wait_for(lambda: box.sh("docker version >/dev/null 2>&1 && echo up || true"))
        yield box
    finally:
        docker("rm", "--force", "--volumes", box.name)


def load_image(box: Sshd, image: str, folder: Path) -> None:
    """Copy an image of this machine's engine to the one on the box."""
    docker("save", "-o", str(folder / "image.tar"), image)
    docker("cp", str(folder / "image.tar"), f"{box.name}:/root/image.tar")
    box.sh("docker load -q -i /root/image.tar")


@contextmanager
def lab_on(box: Sshd, folder: Path, base_image: str, image: str) -> Iterator[LabDirectory]:
    """A lab on that machine, as a student without root's rights has it."""
    made = make_lab(folder, "campus", base_image)
    made.environ["LABCTL_YES"] = "1"
    text = STATIC.format(name="campus", port=box.port, key=box.key, image=image)
    (made.root / "lab.yaml").write_text(text)
    known_hosts = Path(made.environ["HOME"]) / ".ssh" / "known_hosts"
    known_hosts.parent.mkdir()
    known_hosts.write_text(f"[127.0.0.1]:{box.port} {box.host_key}\n")
    made.labctl("up", "--yes")
    yield made
    made.labctl("down", "--yes", "--discard")
