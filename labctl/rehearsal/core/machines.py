"""Machines as containers: their creation and life cycle.

Every rehearsal has its own network and assigns addresses itself, so that a machine keeps its
address over a reboot. Labels on networks and containers identify the leftovers of a killed
rehearsal.
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

import msgspec

from labctl.errors import EngineError
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.providers.local import engine
from labctl.providers.local.container import CAPABILITIES, list_labeled

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container
    from docker.models.networks import Network
    from docker.types import HostConfig

with lazy_imports(__name__):
    from docker import errors as docker_errors
    from docker import types as docker_types

LABEL = "labctl.rehearsal"
PID_LABEL = "labctl.rehearsal-pid"
INSTANCE_LABEL = "labctl.rehearsal-instance"
SHUTDOWN_S = 30
# exit code of entrypoint.sh after `reboot` inside the machine
REBOOT_CODE = 75
# Reserved for network benchmarks: unused on the Internet, and it does not look private.
ADDRESSES = "198.18.0.0/15"
HTTP_CONFLICT = 409
DISKS = "/var/lib/rehearsal/disks"
BY_ID = "/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_"
# directories of a disk that are available where it is attached again
KEPT = ("/home", "/root", "/srv", "/opt", "/var/lib/labctl", "/var/log")


class SeedMetadata(Value, frozen=True, rename="kebab"):
    """The file `meta-data` of cloud-init's NoCloud."""

    instance_id: str
    local_hostname: str


def build_seed(instance_id: str, user_data: str) -> dict[str, str]:
    """Return NoCloud's files by name, with which a machine boots."""
    metadata = SeedMetadata(instance_id=instance_id, local_hostname=instance_id)
    return {"user-data": user_data, "meta-data": msgspec.json.encode(metadata).decode()}


class Machines:
    """The containers of one rehearsal. `root` is a directory on this machine for their files.

    Methods do nothing for an unknown id. Safe to use from many threads.
    """

    def __init__(self, docker: DockerClient, image: str, mode: str, api_port: int) -> None:
        self._docker = docker
        self._image = image
        self._mode = mode
        self._api_port = api_port
        self._lock = threading.Lock()
        self._cgroup_v1 = engine.inspect_engine(docker).cgroup_version == "1"
        self.root = Path(mkdtemp(prefix="labctl-rehearsal-"))
        self.name = self.root.name
        (self.root / "api").mkdir()
        self._network, self._hosts = _network(docker, self.name)
        self.gateway = str(next(self._hosts))
        self._events: Any = None
        self._closed = False

    @property
    def has_cloud_init(self) -> bool:
        """Whether machines have more than sshd: cloud-init, an engine, a metadata service."""
        return self._mode == "cloud-init"

    def watch(self, ended: Callable[[str, int, int], None]) -> None:
        """Call `ended` for every machine that ends: id, exit code, time in Unix nanoseconds."""
        filters = {"label": f"{LABEL}={self.name}", "event": "die", "type": "container"}
        self._events = self._docker.events(decode=True, filters=filters)

        def listen() -> None:
            # Closing the stream raises here.
            with suppress(OSError, ValueError, AttributeError):
                for event in self._events:
                    attributes = event["Actor"]["Attributes"]
                    if INSTANCE_LABEL in attributes:
                        when = int(event["timeNano"])
                        ended(attributes[INSTANCE_LABEL], int(attributes["exitCode"]), when)

        threading.Thread(target=listen, name="rehearsal-machines", daemon=True).start()

    def directory(self, instance_id: str) -> Path:
        return self.root / instance_id

    def create(self, instance_id: str, rules: list[str], seed: dict[str, str]) -> str:
        """Create a machine without starting it; return its address.

        `seed` has NoCloud's files by name.
        """
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
            labels={**make_labels(self.name), INSTANCE_LABEL: instance_id},
            environment={"REHEARSAL_API_PORT": self._api_port, "REHEARSAL_BOOT": self._mode},
            networking_config=networking,
            host_config=self._build_host_config(directory),
        )
        return address

    def start(self, instance_id: str) -> None:
        if (container := self._container(instance_id)) is not None:
            container.start()

    def stop(self, instance_id: str) -> None:
        """Stop a machine as the power button does, with SHUTDOWN_S for its processes."""
        if (container := self._container(instance_id)) is not None:
            container.stop(timeout=SHUTDOWN_S)

    def kill(self, instance_id: str) -> None:
        """Stop a machine at once, so that its processes do not notice."""
        container = self._container(instance_id)
        if container is not None and container.status == "running":
            container.kill()

    def remove(self, instance_id: str, *, politely: bool, disk: str = "") -> None:
        """Remove a machine, and its disk unless `disk` is a volume's id to keep it under.

        With `politely` its processes may end first.
        """
        container = self._container(instance_id)
        if container is None:
            return
        with suppress(docker_errors.NotFound):
            if politely or disk:
                container.stop(timeout=SHUTDOWN_S if politely else 0)
            if disk:
                container.rename(f"{self.name}-{disk}")
                return
            try:
                container.remove(force=True, v=True)
            except docker_errors.APIError as error:
                if error.status_code != HTTP_CONFLICT:
                    raise

    def allow(self, instance_id: str, rules: list[str]) -> None:
        """Allow these connections from now on: iptables arguments, one rule each."""
        directory = self.directory(instance_id)
        if directory.is_dir() and (directory / "ingress").read_text() != _format_rules(rules):
            self._write_rules(instance_id, rules)
            container = self._container(instance_id)
            if container is not None and container.status == "running":
                container.exec_run(["/usr/local/lib/rehearsal/ingress.sh"])

    def freeze(self, instance_id: str) -> None:
        """Suspend every process of a machine, as if it hung."""
        if (container := self._container(instance_id)) is not None:
            # Not `docker pause`: on a busy machine the kernel may fail to freeze a container.
            container.exec_run(["sh", "-c", "kill -STOP -1"])

    def drop_disk(self, volume_id: str) -> None:
        """Remove a kept disk; an unknown id is ignored."""
        if (container := self._container(volume_id)) is not None:
            container.remove(force=True, v=True)

    def attach_disk(self, instance_id: str, volume_id: str, device: str = "") -> None:
        """Make a kept disk's files available in a machine, under the device's name at the cloud.

        A container cannot get a block device, so the machine's `mount` handles this name.
        """
        machine, disk = self._container(instance_id), self._container(volume_id)
        if machine is None or not self.has_cloud_init:
            return
        mountpoint = f"{DISKS}/{volume_id}"
        device = device or f"{BY_ID}{volume_id.replace('-', '')}"
        command = f"mkdir -p {mountpoint} /dev/disk/by-id && ln -sfn {mountpoint} {device}"
        machine.exec_run(["sh", "-c", f"{command} && ln -sfn {mountpoint} {device}-part1"])
        for path in KEPT if disk is not None else ():
            assert disk is not None
            with suppress(docker_errors.NotFound):
                parts, _ = disk.get_archive(path)
                parent = f"{mountpoint}{path.rpartition('/')[0]}"
                machine.exec_run(["mkdir", "-p", parent])
                machine.put_archive(parent, parts)

    def read_console(self, instance_id: str) -> str:
        container = self._container(instance_id)
        return "" if container is None else container.logs(tail=1000).decode(errors="replace")

    def execute(self, instance_id: str, line: str) -> tuple[int, str]:
        """Run a shell line in a machine as root, for tests; return (exit code, output)."""
        container = self._container(instance_id)
        assert container is not None, f"{instance_id} has no machine"
        done: Any = container.exec_run(["sh", "-c", line])
        return int(done.exit_code), done.output.decode(errors="replace")

    def close(self) -> None:
        """Remove everything of this rehearsal."""
        self._closed = True
        if self._events is not None:
            self._events.close()
        _remove_all(self._docker, f"{LABEL}={self.name}")
        shutil.rmtree(self.root, ignore_errors=True)
        self._docker.close()

    def _container(self, instance_id: str) -> Container | None:
        try:
            return self._docker.containers.get(f"{self.name}-{instance_id}")
        except docker_errors.NotFound:
            return None

    def _write_rules(self, instance_id: str, rules: list[str]) -> None:
        # Written in place, since the file is bind-mounted.
        (self.directory(instance_id) / "ingress").write_text(_format_rules(rules))

    def _build_host_config(self, directory: Path) -> HostConfig:
        """Return privileges for an engine in a container, like those of the local provider."""
        binds = [f"{directory}:/rehearsal/machine:ro", f"{self.root / 'api'}:/rehearsal/api:ro"]
        if self._cgroup_v1:
            binds.append("/sys/fs/cgroup:/sys/fs/cgroup:rw")
        return self._docker.api.create_host_config(
            init=True,
            cap_add=list(CAPABILITIES),
            security_opt=["seccomp=unconfined", "apparmor=unconfined", "label=disable"],
            cgroupns="host" if self._cgroup_v1 else "private",
            binds=binds,
            tmpfs={"/run": ""},
            network_mode=self._network.name,
        )


def sweep(docker: DockerClient) -> int:
    """Remove the leftovers of killed rehearsals; return how many rehearsals there were."""
    names = {
        owned.labels[LABEL] for owned in list_labeled(docker, LABEL) if not _is_alive(owned.labels)
    }
    names |= {
        str(network.attrs["Labels"][LABEL])
        for network in docker.networks.list(filters={"label": LABEL})
        if not _is_alive(network.attrs["Labels"])
    }
    for name in names:
        _remove_all(docker, f"{LABEL}={name}")
        shutil.rmtree(Path(mkdtemp()).parent / name, ignore_errors=True)
    return len(names)


def _is_alive(labels: dict[str, str]) -> bool:
    """Return whether the process that created it still runs, by its pid and start time."""
    pid, _, started = labels.get(PID_LABEL, "").partition("-")
    return pid.isdigit() and started == _process_start(int(pid))


def _process_start(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; "" if it does not exist. Linux only."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def make_labels(name: str) -> dict[str, str]:
    return {LABEL: name, PID_LABEL: f"{os.getpid()}-{_process_start(os.getpid())}"}


def _network(docker: DockerClient, name: str) -> tuple[Network, Iterator[ipaddress.IPv4Address]]:
    """Create a network in a free subnet of ADDRESSES.

    Returns it and its addresses, the gateway's first.
    """
    parts = list(ipaddress.IPv4Network(ADDRESSES).subnets(new_prefix=24))
    for part in random.sample(parts, 20):
        ipam = docker_types.IPAMConfig(
            pool_configs=[docker_types.IPAMPool(subnet=str(part), gateway=str(part[1]))]
        )
        try:
            made = docker.networks.create(
                name, driver="bridge", ipam=ipam, labels=make_labels(name)
            )
        except docker_errors.APIError as error:
            # Docker answers 403 for other errors of a network too.
            if "overlaps" in str(error.explanation):
                continue
            raise
        return made, part.hosts()
    raise EngineError(
        "no free network for the rehearsal", why=f"20 subnets of {ADDRESSES} are in use"
    )


def _format_rules(rules: list[str]) -> str:
    return "".join(f"{rule}\n" for rule in rules)


def _remove_all(docker: DockerClient, label: str) -> None:
    for container in list_labeled(docker, label):
        with suppress(docker_errors.NotFound, docker_errors.APIError):
            container.remove(force=True, v=True)
    for network in docker.networks.list(filters={"label": label}):
        with suppress(docker_errors.NotFound):
            network.remove()
