"""Objects of the Docker Engine's API, as far as labctl reads them.

Fields have the engine's own names, so that its documentation describes them. The engine sends null
for many empty lists and maps: these fields are optional.
"""

from typing import Dict, NamedTuple, Optional, Tuple


class ContainerState(NamedTuple):
    Status: str = ""
    Running: bool = False
    Restarting: bool = False
    OOMKilled: bool = False
    Pid: int = 0
    ExitCode: int = 0
    Error: str = ""
    StartedAt: str = ""
    FinishedAt: str = ""


class ContainerConfig(NamedTuple):
    Hostname: str = ""
    Labels: Optional[Dict[str, str]] = None


class DeviceRequest(NamedTuple):
    """What `docker run --gpus` requests. `Count` -1 is all devices."""

    Driver: str = ""
    Count: int = 0
    DeviceIDs: Optional[Tuple[str, ...]] = None
    Capabilities: Optional[Tuple[Tuple[str, ...], ...]] = None


class Device(NamedTuple):
    PathOnHost: str = ""


class ContainerHostConfig(NamedTuple):
    NanoCpus: int = 0
    Runtime: str = ""
    DeviceRequests: Optional[Tuple[DeviceRequest, ...]] = None
    Devices: Optional[Tuple[Device, ...]] = None


class MountPoint(NamedTuple):
    Destination: str
    Source: str = ""


class PortBinding(NamedTuple):
    HostIp: str = ""
    HostPort: str = ""


class ContainerNetwork(NamedTuple):
    """`Ports` has bindings by port and protocol, such as "8888/tcp"; null if not published."""

    Ports: Optional[Dict[str, Optional[Tuple[PortBinding, ...]]]] = None


class Container(NamedTuple):
    """A container as `docker container inspect` shows it."""

    Id: str = ""
    Name: str = ""
    State: ContainerState = ContainerState()
    Config: ContainerConfig = ContainerConfig()
    HostConfig: ContainerHostConfig = ContainerHostConfig()
    Mounts: Optional[Tuple[MountPoint, ...]] = None
    NetworkSettings: ContainerNetwork = ContainerNetwork()

    @property
    def labels(self) -> Dict[str, str]:
        return self.Config.Labels or {}

    @property
    def sources(self) -> Dict[str, str]:
        """The paths on the server that are mounted, by their path in the container."""
        return {mount.Destination: mount.Source for mount in self.Mounts or ()}


class RowPort(NamedTuple):
    PrivatePort: int = 0
    PublicPort: int = 0


class ContainerRow(NamedTuple):
    """A container in the list of `docker ps`."""

    Id: str
    Names: Optional[Tuple[str, ...]] = None
    State: str = ""
    Ports: Optional[Tuple[RowPort, ...]] = None
    Labels: Optional[Dict[str, str]] = None
    Mounts: Optional[Tuple[MountPoint, ...]] = None

    @property
    def name(self) -> str:
        return self.Names[0].lstrip("/") if self.Names else ""

    @property
    def labels(self) -> Dict[str, str]:
        return self.Labels or {}

    @property
    def sources(self) -> Dict[str, str]:
        """The paths on the server that are mounted, by their path in the container."""
        return {mount.Destination: mount.Source for mount in self.Mounts or ()}


class ImageConfig(NamedTuple):
    Entrypoint: Optional[Tuple[str, ...]] = None
    Volumes: Optional[Dict[str, object]] = None
    WorkingDir: str = ""
    Labels: Optional[Dict[str, str]] = None


class Image(NamedTuple):
    """An image as `docker image inspect` shows it."""

    Id: str
    RepoTags: Optional[Tuple[str, ...]] = None
    RepoDigests: Optional[Tuple[str, ...]] = None
    Config: Optional[ImageConfig] = None

    @property
    def config(self) -> ImageConfig:
        return self.Config or ImageConfig()
