"""A whole small Slurm cluster in a container, which is also its login node.

Two machines, `n1` and `n2`, have two GPUs each that exist by name only. The users `student` and
`ann` are in the account `ml2026`; its QOS `student` allows one GPU at once.
"""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab_servers import ROOT
from sshd_container import Sshd, docker, greets, wait_for
from sshd_container import build_image as build_sshd_image
from sync_lab import build_image as build_sync_image

from labctl.servers.host_keys import ensure_key_pair

CONTEXT = ROOT / "tests" / "slurm-cluster"
IMAGE = "labctl-test-slurm"
# how many processors a test may ask for by `cpus`
CPUS = 4


def build_image() -> str:
    build_sshd_image()
    docker("build", "-q", "-t", IMAGE, "--build-arg", f"BASE={build_sync_image()}", str(CONTEXT))
    return IMAGE


PODMAN = """\
FROM {base}
RUN apt-get update \\
 && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \\
      crun libcap2-bin podman uidmap \\
 && rm -rf /var/lib/apt/lists/*
# Their owner's capabilities suffice: this container is not privileged.
RUN chmod u-s /usr/bin/newuidmap /usr/bin/newgidmap \\
 && setcap cap_setuid=ep /usr/bin/newuidmap && setcap cap_setgid=ep /usr/bin/newgidmap
"""
# Without these, podman may not create namespaces in this container.
PODMAN_OPTIONS = [
    word
    for each in ("seccomp", "apparmor", "systempaths")
    for word in ("--security-opt", f"{each}=unconfined")
]


def build_podman_image() -> str:
    """A cluster whose machines have podman, for its users without root."""
    text = PODMAN.format(base=build_image())
    docker("build", "-q", "-t", f"{IMAGE}-podman", "-", stdin=text)
    return f"{IMAGE}-podman"


class Cluster(Sshd):
    """One running cluster; its machines share the home directories."""

    def squeue(self, fields: str = "%T", *words: str) -> list[str]:
        """List the jobs that wait or run, for example by id (%i) and name (%j)."""
        return self.sh(f"squeue -h -o '{fields}' {' '.join(words)}").splitlines()

    def list_jobs(self, lab_run: str) -> list[str]:
        """List the states of all jobs of a lab's run since the cluster started."""
        words = "-n -X -P -D -S 2000-01-01 --format=JobName,State"
        rows = (line.split("|") for line in self.sh(f"sacct -a {words}").splitlines())
        return [state for name, state in rows if name.startswith(f"labctl-{lab_run}-")]

    def stop_controller(self) -> None:
        self.sh("cluster stop-controller")

    def start_controller(self) -> None:
        self.sh("cluster start-controller")

    def kill_node(self, name: str) -> None:
        self.sh(f"cluster kill-node {name}")


@contextmanager
def run_cluster(folder: Path, image: str = "", options: Sequence[str] = ()) -> Iterator[Cluster]:
    """A running cluster; `folder` gets the private key of its users."""
    cluster = Cluster(f"labctl-test-slurm-{uuid.uuid4().hex[:8]}", folder / "id_ed25519")
    docker(
        *("run", "-d", "--init", "--name", cluster.name, "--hostname", "login"),
        *("-p", "127.0.0.1::22", *options, image or build_image(), "sleep", "infinity"),
    )
    try:
        cluster.accept(ensure_key_pair(cluster.key), ("student", "ann"))
        cluster.sh("cluster start")
        cluster.start_sshd()
        wait_for(lambda: greets(cluster.port))
        yield cluster
    finally:
        subprocess.run(["docker", "rm", "-f", "-v", cluster.name], capture_output=True, check=True)
