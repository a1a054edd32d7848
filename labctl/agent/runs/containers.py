"""The lab's containers as values: the bodies of the engine's `create` requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..host.engine import build_proxy_env, create_container, read_archive, remove_container
from ..host.engine_objects import (
    ContainerLog,
    DeviceRequest,
    Image,
    Mount,
    NewContainer,
    NewDevice,
    NewHostConfig,
    Ulimit,
)
from ..host.paths import labctl_home, require_name, resolve_inside
from ..host.server_data import resolve_all
from . import fast_network, secrets_tmpfs
from .executor import NewAttempt
from .gang import build_member_env, can_raise_limits, uses_tunnel

UNLIMITED_PINNED_MEMORY = Ulimit("memlock", -1, -1)
HOME_ENV = {
    "HOME": "/lab/cache/home",
    "USER": "lab",
    "PYTHONUNBUFFERED": "1",
    "HF_HOME": "/lab/cache/huggingface",
    "TORCH_HOME": "/lab/cache/torch",
    "PIP_CACHE_DIR": "/lab/cache/pip",
    "LABCTL_CACHE_DIR": "/lab/cache",
}


def create_output_directories(directory: Path, outputs: Sequence[str]) -> None:
    """Create the directories that the run writes to.

    An output with a suffix is a file, such as code/model.pth: the run writes it itself, and a
    directory of that name would be in its way. A number is no suffix: v1.5 is a directory.
    """
    for name in {*outputs, "logs", "checkpoints"}:
        path = resolve_inside(directory, name)
        is_file = path.is_file() or (path.suffix and not path.suffix[1:].isdigit())
        (path.parent if is_file else path).mkdir(parents=True, exist_ok=True)


def build_run_body(attempt: NewAttempt) -> NewContainer:
    """Return the container of a run. Pure except for the files that `build_lab_container` makes."""
    directory, spec, image = attempt.directory, attempt.spec, attempt.image
    assert isinstance(image, Image)
    mounts = [build_mount(directory / "code", "/lab/code"), build_mount(directory, "/lab/run")]
    if spec.secrets:
        secrets_directory = secrets_tmpfs.secrets_directory(spec.id)
        mounts.append(build_mount(secrets_directory, "/run/labctl-secrets", read_only=True))
    env = {**build_run_env(spec.id), **build_member_env(attempt.member), **spec.env}
    lab = ContainerLab(spec.lab, spec.lab_id, spec.gpus, spec.data)
    container = build_lab_container(attempt.root, lab, image, mounts, env, {"labctl.run": spec.id})
    entrypoint = image.config.Entrypoint or ()
    limits = ResourceLimits(spec.memory_bytes, spec.cpus, spec.shm_bytes)
    host_config = limit(container.HostConfig, limits)
    if attempt.member is not None:
        # Its processes reach those of other servers at any port, and pin memory for the network.
        ulimits = (UNLIMITED_PINNED_MEMORY,) if can_raise_limits() else ()
        nodes = [] if uses_tunnel(attempt.member) else fast_network.list_device_nodes()
        devices = tuple(NewDevice(path, path) for path in nodes)
        host_config = host_config._replace(NetworkMode="host", Ulimits=ulimits, Devices=devices)
    return container._replace(
        Entrypoint=("/bin/sh",),
        Cmd=("/lab/run/.labctl/entry.sh", *entrypoint, *spec.command),
        StopTimeout=60,
        Tty=spec.tty,
        OpenStdin=spec.tty,
        HostConfig=host_config,
    )


class ContainerLab(NamedTuple):
    """The lab of a container. `gpus` is "", "all" or device UUIDs joined by commas.

    `data` has the full path on the server of each data set that is already there.
    """

    name: str
    id: str
    gpus: str = ""
    data: dict[str, str] = {}  # noqa: RUF012


class ResourceLimits(NamedTuple):
    """The limits of a container; 0 is no limit."""

    memory_bytes: int
    cpus: float
    shm_bytes: int


def build_lab_container(
    root: Path,
    lab: ContainerLab,
    image: Image,
    mounts: list[Mount],
    env: dict[str, str],
    labels: dict[str, str],
) -> NewContainer:
    """Return what every container of a lab has: our user, its home and cache, data, a label."""
    (labctl_home() / ".cache" / "home").mkdir(parents=True, exist_ok=True)
    (root / "data").mkdir(exist_ok=True)
    passwd = make_passwd_file(image.Id, labctl_home() / ".passwd")
    lab_mounts = [
        build_mount(root / "data", "/lab/data", read_only=True),
        *build_server_data_mounts(root, lab.data),
        build_mount(labctl_home() / ".cache", "/lab/cache"),
        build_mount(passwd, "/etc/passwd", read_only=True),
    ]
    variables = {**build_proxy_env(), **HOME_ENV, **env}
    return NewContainer(
        Image=image.Id,
        Hostname=lab.name,
        User=f"{os.getuid()}:{os.getgid()}",
        WorkingDir="/lab/code",
        Env=tuple(f"{key}={value}" for key, value in sorted(variables.items())),
        Labels={"labctl.lab-id": lab.id, **labels},
        HostConfig=NewHostConfig(
            Mounts=(*lab_mounts, *mounts),
            SecurityOpt=("no-new-privileges",),
            LogConfig=ContainerLog("", {"max-size": "50m"}),
            DeviceRequests=build_device_requests(lab.gpus),
        ),
    )


def build_server_data_mounts(root: Path, data: dict[str, str]) -> list[Mount]:
    """Mount data sets of the server beside the pushed ones, each on an empty directory there."""
    mounts = []
    for name, directory in resolve_all(data).items():
        resolve_inside(root / "data", require_name(name)).mkdir(exist_ok=True)
        mounts.append(build_mount(directory, f"/lab/data/{name}", read_only=True))
    return mounts


def build_mount(source: Path, target: str, read_only: bool = False) -> Mount:
    return Mount("bind", target, Source=str(source), ReadOnly=read_only)


def build_device_requests(gpus: str) -> tuple[DeviceRequest, ...]:
    """Return the device requests that `docker run --gpus` would send."""
    if not gpus:
        return ()
    request = DeviceRequest(Capabilities=(("gpu",),))
    if gpus == "all":
        return (request._replace(Count=-1),)
    return (request._replace(DeviceIDs=tuple(gpus.split(","))),)


def limit(config: NewHostConfig, limits: ResourceLimits) -> NewHostConfig:
    """Limit a container. Its memory includes swap, so that swap cannot be used to exceed it."""
    return config._replace(
        Memory=limits.memory_bytes,
        MemorySwap=limits.memory_bytes,
        NanoCpus=round(limits.cpus * 1e9),
        ShmSize=limits.shm_bytes,
    )


def restrict(
    config: NewHostConfig, tmpfs: dict[str, str], *, pids: int = 0, has_network: bool = False
) -> NewHostConfig:
    """Restrict a container whose program or input is untrusted.

    It has no capabilities, gains no privileges, and writes only to its writable mounts and to
    `tmpfs` (target -> mount options). `pids` 0 is no limit.
    """
    config = config._replace(
        ReadonlyRootfs=True,
        CapDrop=("ALL",),
        SecurityOpt=("no-new-privileges",),
        PidsLimit=pids,
        Tmpfs=tmpfs,
    )
    return config if has_network else config._replace(NetworkMode="none")


def build_run_env(run_id: str) -> dict[str, str]:
    return {
        "LABCTL_RUN_ID": run_id,
        "LABCTL_DATA_DIR": "/lab/data",
        "LABCTL_RUN_DIR": "/lab/run",
        "LABCTL_CHECKPOINT_DIR": "/lab/run/checkpoints",
        "LABCTL_LOG_DIR": "/lab/run/logs",
    }


def make_passwd_file(image_id: str, directory: Path) -> Path:
    """Return the image's /etc/passwd with our user added, made once per image.

    Libraries look up their user (getpass, torch's cache, ssh) and fail without an entry.
    """
    path = directory / f"passwd-{image_id.rpartition(':')[2][:24]}"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    container = f"labctl-passwd-{os.urandom(8).hex()}"
    create_container(container, NewContainer(image_id, Entrypoint=("/bin/true",)))
    try:
        text = _read_file_in(container, "/etc/passwd")
    finally:
        remove_container(container)
    rows = [
        row
        for row in text.splitlines()
        if row.count(":") == 6 and row.split(":")[2] != str(os.getuid())
    ]
    rows.append(f"lab:x:{os.getuid()}:{os.getgid()}:labctl:/lab/cache/home:/bin/sh")
    staging = path.with_name(path.name + ".new")
    staging.write_text("\n".join(rows) + "\n")
    staging.replace(path)
    return path


def _read_file_in(container: str, path: str) -> str:
    """Read a file of a container, which need neither run nor contain any program; "" if absent."""
    import io
    import tarfile  # needed once per image: imported here to keep `start` fast

    content = read_archive(container, path)
    if not content:
        return ""
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        member = tar.extractfile(tar.getmembers()[0])
        return member.read().decode(errors="replace") if member else ""
