"""Pods as containers: like RunPod's, they have a disk that stays, a public port, and no engine.

A stop removes the container, so that its own disk is empty at the next start. Its volume belongs to
a container of its own that never runs, and that ends with the pod.
"""

from __future__ import annotations

import shlex
from typing import Any

import msgspec

from labctl.decoding import decode_json
from labctl.errors import BuildError
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.providers.local import image as lab_server
from labctl.providers.runpod.api import WORKSPACE
from labctl.rehearsal.core.images import BUILD_TIMEOUT_S, Building
from labctl.rehearsal.core.listener import LOOPBACK
from labctl.rehearsal.core.machines import INSTANCE_LABEL, Machines, make_labels

with lazy_imports(__name__):
    import docker
    from docker import errors as docker_errors

REPOSITORY = "labctl-rehearsal-pod"
PLAN = "plan"
DISK_SUFFIX = "-disk"
# RunPod does not say how long a stop may take; Docker's own is 10 s.
STOP_S = 10


class PodPlan(Value, frozen=True):
    """What a pod's container is made of, at each start."""

    args: str
    env: dict[str, str]


def make_seed(args: str, env: dict[str, str]) -> dict[str, str]:
    """Return what a pod needs at its start, in the form that a fleet passes on."""
    return {PLAN: msgspec.json.encode(PodPlan(args=args, env=env)).decode()}


def ensure_image(client: docker.DockerClient, building: Building) -> str:
    """Return the name of the pods' image, after building it if it is missing (a minute)."""
    source = building.data_dir / "images" / "pod"
    base = building.stands_on or building.base_image or "debian:bookworm-slim"
    name = f"{REPOSITORY}:{lab_server.content_hash(source, base)}"
    with lab_server.lock_package_file(source / "Dockerfile"):
        if not lab_server.has_image(client, name):
            building.progress("the image of rehearsed pods", 0, 1)
            _build(client, str(source), name, base)
            building.progress("the image of rehearsed pods", 1, 1)
    return name


def _build(client: docker.DockerClient, source: str, name: str, base: str) -> None:
    try:
        client.images.build(
            path=source, tag=name, buildargs={"BASE": base}, rm=True, timeout=BUILD_TIMEOUT_S
        )
    except docker_errors.BuildError as error:
        log = "".join(str(line.get("stream", "")) for line in error.build_log)
        raise BuildError(
            "building the image of rehearsed pods failed",
            why=log[-2000:] or str(error),
            hint="labctl rehearse runpod --boot none   # needs no image",
        ) from error


class PodMachines(Machines):
    """The containers of one rehearsal's pods. `ports` has the public port of each that runs."""

    def __init__(self, client: docker.DockerClient, image: str, api_port: int) -> None:
        super().__init__(client, image, "sshd", api_port)
        self.ports: dict[str, int] = {}

    def create(self, instance_id: str, rules: list[str], seed: dict[str, str]) -> str:
        """Create the pod's disk; its container is created at each start."""
        directory = self.directory(instance_id)
        directory.mkdir(parents=True)
        (directory / PLAN).write_text(seed[PLAN])
        self._docker.containers.create(
            self._image,
            ["true"],
            name=f"{self.name}-{instance_id}{DISK_SUFFIX}",
            labels=make_labels(self.name),
            volumes=[WORKSPACE],
        )
        return LOOPBACK

    def start(self, instance_id: str) -> None:
        container = self._container(instance_id)
        if container is None:
            plan = decode_json((self.directory(instance_id) / PLAN).read_bytes(), PodPlan)
            container = self._docker.containers.create(
                self._image,
                shlex.split(plan.args),
                name=f"{self.name}-{instance_id}",
                hostname=instance_id,
                labels={**make_labels(self.name), INSTANCE_LABEL: instance_id},
                environment={**plan.env, "RUNPOD_POD_ID": instance_id},
                network=self._network.name,
                ports={"22/tcp": (LOOPBACK, 0)},
                volumes_from=[f"{self.name}-{instance_id}{DISK_SUFFIX}"],
            )
        container.start()
        container.reload()
        published: Any = container.attrs["NetworkSettings"]["Ports"].get("22/tcp")
        self.ports[instance_id] = int(published[0]["HostPort"]) if published else 0

    def stop(self, instance_id: str) -> None:
        """Stop the container, and remove it with its own disk."""
        self.ports.pop(instance_id, None)
        if (container := self._container(instance_id)) is not None:
            container.stop(timeout=STOP_S)
            container.remove(force=True)

    def remove(self, instance_id: str, *, politely: bool, disk: str = "") -> None:
        self.ports.pop(instance_id, None)
        super().remove(instance_id, politely=politely, disk=disk)
        self.drop_disk(f"{instance_id}{DISK_SUFFIX}")
