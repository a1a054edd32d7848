"""Machines as containers: what one is made with, and what becomes of it.

Every rehearsal has a network of its own, in which addresses are given here, so that a machine keeps
its address over a reboot. Networks and containers bear labels: what a killed rehearsal left is
found by them.
"""

from __future__ import annotations

import ipaddress
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from labctl.errors import EngineError
from labctl.providers.local.container import CAPABILITIES, all_labelled

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container
    from docker.models.networks import Network

LABEL = "labctl.rehearsal"
PID_LABEL = "labctl.rehearsal-pid"
INSTANCE_LABEL = "labctl.rehearsal-instance"
SHUTDOWN_S = 30
# entrypoint.sh's exit code when `reboot` was typed inside.
REBOOT_CODE = 75
# Reserved for measuring networks: nothing real is there, and it does not look private.
ADDRESSES = "198.18.0.0/15"
HTTP_CONFLICT = 409
DISKS = "/var/lib/rehearsal/disks"
BY_ID = "/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_"
# What of a disk is shown where it is attached again.
KEPT = ("/home", "/root", "/srv", "/opt", "/var/lib/labctl", "/var/log")


class Machines:
    """The containers of one rehearsal. `root` is a directory on this machine for their files.

    Methods that take an id of no machine do nothing. Safe to use from many threads.
    """

    def __init__(self, docker: DockerClient, image: str, mode: str, api_port: int) -> None:
        self._docker = docker
        self._image = image
        self._mode = mode
        self._api_port = api_port
        self._lock = threading.Lock()
        self._cgroup_v1 = docker.info().get("CgroupVersion", "1") == "1"
        self.root = Path(mkdtemp(prefix="labctl-rehearsal-"))
        self.name = self.root.name
        (self.root / "api").mkdir()
        self._network, self._hosts = _network(docker, self.name)
        self.gateway = str(next(self._hosts))
        self._events: Any = None
        self._closed = False

    @property
    def whole(self) -> bool:
        """Whether machines have more than sshd: cloud-init, an engine, a metadata service."""
        return self._mode == "cloud-init"

    def watch(self, ended: Callable[[str, int, int], None]) -> None:
        """Say from now on when a machine has ended, for whatever reason: id, exit code, when
        (Unix nanoseconds)."""
        filters = {"label": f"{LABEL}={self.name}", "event": "die", "type": "container"}
        self._events = self._docker.events(decode=True, filters=filters)

        def listen() -> None:
            # The stream breaks off when it is closed.
            with suppress(OSError, ValueError, AttributeError):
                for event in self._events:
                    about = event["Actor"]["Attributes"]
                    if INSTANCE_LABEL in about:
                        when = int(event["timeNano"])
                        ended(about[INSTANCE_LABEL], int(about["exitCode"]), when)

        threading.Thread(target=listen, name="rehearsal-machines", daemon=True).start()

    def directory(self, instance_id: str) -> Path:
        return self.root / instance_id

    def create(self, instance_id: str, rules: list[str], seed: dict[str, str]) -> str:
        """A machine that is not started; its address. `seed` is NoCloud's files by name."""
        directory = self.directory(instance_id)
        (directory / "seed").mkdir(parents=True)
        for name, text in seed.items():
            (directory / "seed" / name).write_text(text)
        self._write_rules(instance_id, rules)
        with self._lock:
            address = str(next(self._hosts))
        api: Any = self._docker.api
        networking = api.create_networking_config(
            {self._network.name: api.create_endpoint_config(ipv4_address=address)}
        )
        api.create_container(
            self._image,
            name=f"{self.name}-{instance_id}",
            hostname=f"ip-{address.replace('.', '-')}",
            labels={**_labels(self.name), INSTANCE_LABEL: instance_id},
            environment={"REHEARSAL_API_PORT": self._api_port, "REHEARSAL_BOOT": self._mode},
            networking_config=networking,
            host_config=api.create_host_config(**self._host(directory)),
        )
        return address

    def start(self, instance_id: str) -> None:
        if (container := self._container(instance_id)) is not None:
            container.start()

    def stop(self, instance_id: str) -> None:
        """As the power button does: what runs inside is asked to end."""
        if (container := self._container(instance_id)) is not None:
            container.stop(timeout=SHUTDOWN_S)

    def remove(self, instance_id: str, *, politely: bool, disk: str = "") -> None:
        """Its disk goes too, or is kept under a volume's id. Politely, what runs inside is asked
        to end first."""
        from docker.errors import APIError, NotFound

        container = self._container(instance_id)
        if container is None:
            return
        with suppress(NotFound):
            if politely or disk:
                container.stop(timeout=SHUTDOWN_S if politely else 0)
            if disk:
                container.rename(f"{self.name}-{disk}")
                return
            try:
                container.remove(force=True, v=True)
            except APIError as error:
                if error.status_code != HTTP_CONFLICT:
                    raise

    def allow(self, instance_id: str, rules: list[str]) -> None:
        """From now on these connections are let in: iptables arguments, one rule each."""
        if self.directory(instance_id).is_dir():
            self._write_rules(instance_id, rules)
            container = self._container(instance_id)
            if container is not None and container.status == "running":
                container.exec_run(["/usr/local/lib/rehearsal/ingress.sh"])

    def drop_disk(self, volume_id: str) -> None:
        """A kept disk ends; what is none is left alone."""
        if (container := self._container(volume_id)) is not None:
            container.remove(force=True, v=True)

    def attach_disk(self, instance_id: str, volume_id: str) -> None:
        """What people keep on a kept disk appears in a machine, under the device's usual name.

        No block device can be given to a container: `mount` there knows what is meant.
        """
        from docker.errors import NotFound

        machine, disk = self._container(instance_id), self._container(volume_id)
        if machine is None or not self.whole:
            return
        place = f"{DISKS}/{volume_id}"
        device = f"{BY_ID}{volume_id.replace('-', '')}"
        line = f"mkdir -p {place} /dev/disk/by-id && ln -sfn {place} {device}"
        machine.exec_run(["sh", "-c", f"{line} && ln -sfn {place} {device}-part1"])
        for path in KEPT if disk is not None else ():
            assert disk is not None
            with suppress(NotFound):
                parts, _ = disk.get_archive(path)
                parent = f"{place}{path.rpartition('/')[0]}"
                machine.exec_run(["mkdir", "-p", parent])
                machine.put_archive(parent, parts)

    def console(self, instance_id: str) -> str:
        container = self._container(instance_id)
        return "" if container is None else container.logs(tail=1000).decode(errors="replace")

    def execute(self, instance_id: str, line: str) -> tuple[int, str]:
        """A shell line inside, as root: for tests. (exit code, what it printed)"""
        container = self._container(instance_id)
        assert container is not None, f"{instance_id} has no machine"
        done: Any = container.exec_run(["sh", "-c", line])
        return int(done.exit_code), done.output.decode(errors="replace")

    def close(self) -> None:
        """Nothing of this rehearsal is left."""
        self._closed = True
        if self._events is not None:
            self._events.close()
        _remove_all(self._docker, f"{LABEL}={self.name}")
        shutil.rmtree(self.root, ignore_errors=True)
        self._docker.close()

    def _container(self, instance_id: str) -> Container | None:
        from docker.errors import NotFound

        try:
            return self._docker.containers.get(f"{self.name}-{instance_id}")
        except NotFound:
            return None

    def _write_rules(self, instance_id: str, rules: list[str]) -> None:
        # Written in place: the file is mounted.
        (self.directory(instance_id) / "ingress").write_text("".join(f"{r}\n" for r in rules))

    def _host(self, directory: Path) -> dict[str, Any]:
        """Rights for an engine inside a container, as the local provider's servers have."""
        binds = [f"{directory}:/rehearsal/machine:ro", f"{self.root / 'api'}:/rehearsal/api:ro"]
        if self._cgroup_v1:
            binds.append("/sys/fs/cgroup:/sys/fs/cgroup:rw")
        return {
            "init": True,
            "cap_add": list(CAPABILITIES),
            "security_opt": ["seccomp=unconfined", "apparmor=unconfined", "label=disable"],
            "cgroupns": "host" if self._cgroup_v1 else "private",
            "binds": binds,
            "tmpfs": {"/run": ""},
            "network_mode": self._network.name,
        }


def sweep(docker: DockerClient) -> int:
    """Remove what rehearsals left that were killed; how many there were."""
    left = {
        owned.labels[LABEL] for owned in all_labelled(docker, LABEL) if not _alive(owned.labels)
    }
    left |= {
        str(found.attrs["Labels"][LABEL])
        for found in docker.networks.list(filters={"label": LABEL})
        if not _alive(found.attrs["Labels"])
    }
    for name in left:
        _remove_all(docker, f"{LABEL}={name}")
        shutil.rmtree(Path(mkdtemp()).parent / name, ignore_errors=True)
    return len(left)


def _alive(labels: dict[str, str]) -> bool:
    """Whether the process that made this still runs, by its pid and start time."""
    pid, _, started = labels.get(PID_LABEL, "").partition("-")
    return pid.isdigit() and started == _started(int(pid))


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks; "" for none. Linux, as are the machines."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def _labels(name: str) -> dict[str, str]:
    return {LABEL: name, PID_LABEL: f"{os.getpid()}-{_started(os.getpid())}"}


def _network(docker: DockerClient, name: str) -> tuple[Network, Iterator[Any]]:
    """A network in a free part of ADDRESSES, and its addresses, the gateway's first."""
    from docker.errors import APIError
    from docker.types import IPAMConfig, IPAMPool

    parts = list(ipaddress.IPv4Network(ADDRESSES).subnets(new_prefix=24))
    for part in random.sample(parts, 20):
        ipam = IPAMConfig(pool_configs=[IPAMPool(subnet=str(part), gateway=str(part[1]))])
        try:
            made = docker.networks.create(name, driver="bridge", ipam=ipam, labels=_labels(name))
        except APIError as error:
            if "overlaps" in str(error.explanation):
                continue
            raise
        return made, part.hosts()
    raise EngineError("no free network for the rehearsal", why=f"20 parts of {ADDRESSES} are taken")


def _remove_all(docker: DockerClient, label: str) -> None:
    from docker.errors import APIError, NotFound

    for container in all_labelled(docker, label):
        with suppress(NotFound, APIError):
            container.remove(force=True, v=True)
    for network in docker.networks.list(filters={"label": label}):
        with suppress(NotFound):
            network.remove()
