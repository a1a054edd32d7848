"""Objects of the Docker Engine's API, as far as labctl reads and writes them.

Fields have the engine's own names, so that its documentation describes them. The engine sends null
for many empty lists and maps: these fields are optional. What labctl writes is sent without the
fields that have their defaults.
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


class ContainerHealthcheck(NamedTuple):
    Test: Optional[Tuple[str, ...]] = None


class ContainerConfig(NamedTuple):
    """`Image` is the name that was given for it, which may be its id."""

    Hostname: str = ""
    Image: str = ""
    Healthcheck: Optional[ContainerHealthcheck] = None
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
    CgroupParent: str = ""
    DeviceRequests: Optional[Tuple[DeviceRequest, ...]] = None
    Devices: Optional[Tuple[Device, ...]] = None


class MountPoint(NamedTuple):
    Destination: str
    Source: str = ""


class Network(NamedTuple):
    Id: str
    Labels: Optional[Dict[str, str]] = None


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
    ExecIDs: Optional[Tuple[str, ...]] = None

    @property
    def labels(self) -> Dict[str, str]:
        return self.Config.Labels or {}

    @property
    def is_build_step(self) -> bool:
        """Whether it runs a step of `docker build` rather than somebody's program.

        The classic builder names the image by its id, and switches its health check off. labctl
        does so too, with labels of its own.
        """
        check = self.Config.Healthcheck
        is_unchecked = check is not None and check.Test == ("NONE",)
        is_ours = any(label.startswith("labctl.") for label in self.labels)
        return is_unchecked and not is_ours and self.Config.Image.startswith("sha256:")

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


class ContainerImageConfig(NamedTuple):
    Entrypoint: Optional[Tuple[str, ...]] = None
    Volumes: Optional[Dict[str, object]] = None
    WorkingDir: str = ""
    Labels: Optional[Dict[str, str]] = None


class ImageLayers(NamedTuple):
    Layers: Optional[Tuple[str, ...]] = None


class Image(NamedTuple):
    """An image as `docker image inspect` shows it."""

    Id: str
    RepoTags: Optional[Tuple[str, ...]] = None
    RepoDigests: Optional[Tuple[str, ...]] = None
    Config: Optional[ContainerImageConfig] = None
    Created: str = ""
    RootFS: Optional[ImageLayers] = None

    @property
    def config(self) -> ContainerImageConfig:
        return self.Config or ContainerImageConfig()

    @property
    def layers(self) -> Tuple[str, ...]:
        return (self.RootFS and self.RootFS.Layers) or ()


class PullDetail(NamedTuple):
    """Bytes of a layer; absent in lines without a size."""

    current: Optional[int] = None
    total: Optional[int] = None


class PullProgress(NamedTuple):
    """One line of a pull's progress. `id` names the layer."""

    id: Optional[str] = None
    progressDetail: Optional[PullDetail] = None


class MountTmpfsOptions(NamedTuple):
    SizeBytes: int
    Mode: int = 0


class Mount(NamedTuple):
    """A mount of a new container. `Type` is "bind" or "tmpfs"."""

    Type: str
    Target: str
    Source: str = ""
    ReadOnly: bool = False
    TmpfsOptions: Optional[MountTmpfsOptions] = None


class ContainerLog(NamedTuple):
    """The log of a container; `Type` "" is the engine's default driver."""

    Type: str
    Config: Dict[str, str]


class NewDevice(NamedTuple):
    """A device of the server in a new container, under the same path with the same permissions."""

    PathOnHost: str
    PathInContainer: str
    CgroupPermissions: str = "rwm"


class Ulimit(NamedTuple):
    Name: str
    Soft: int
    Hard: int


class NewHostConfig(NamedTuple):
    """How a new container runs. 0 is no limit; `MemorySwap` includes the memory.

    `Init` None leaves it to the engine's settings whether the first process is an init.
    """

    Mounts: Tuple[Mount, ...] = ()
    SecurityOpt: Tuple[str, ...] = ()
    CapDrop: Tuple[str, ...] = ()
    GroupAdd: Tuple[str, ...] = ()
    Runtime: str = ""
    NetworkMode: str = ""
    IpcMode: str = ""
    CgroupParent: str = ""
    ReadonlyRootfs: bool = False
    Init: Optional[bool] = None
    AutoRemove: bool = False
    Memory: int = 0
    MemorySwap: int = 0
    NanoCpus: int = 0
    PidsLimit: int = 0
    ShmSize: int = 0
    OomScoreAdj: int = 0
    Tmpfs: Optional[Dict[str, str]] = None
    Ulimits: Tuple[Ulimit, ...] = ()
    Devices: Tuple[NewDevice, ...] = ()
    LogConfig: Optional[ContainerLog] = None
    DeviceRequests: Tuple[DeviceRequest, ...] = ()
    PortBindings: Optional[Dict[str, Tuple[PortBinding, ...]]] = None


class NewContainer(NamedTuple):
    """A container as `docker container create` takes it."""

    Image: str
    Hostname: str = ""
    User: str = ""
    WorkingDir: str = ""
    Env: Tuple[str, ...] = ()
    Labels: Optional[Dict[str, str]] = None
    Entrypoint: Optional[Tuple[str, ...]] = None
    Cmd: Optional[Tuple[str, ...]] = None
    StopTimeout: Optional[int] = None
    Tty: bool = False
    OpenStdin: bool = False
    StdinOnce: bool = False
    AttachStdin: bool = False
    AttachStdout: bool = False
    AttachStderr: bool = False
    NetworkDisabled: bool = False
    Healthcheck: Optional[ContainerHealthcheck] = None
    ExposedPorts: Optional[Dict[str, Dict[str, str]]] = None
    HostConfig: NewHostConfig = NewHostConfig()


class NewExec(NamedTuple):
    """A command in a running container, as `docker exec` creates it."""

    Cmd: Tuple[str, ...]
    User: str = ""
    Env: Tuple[str, ...] = ()
    WorkingDir: str = ""
    Tty: bool = False
    AttachStdin: bool = False
    AttachStdout: bool = False
    AttachStderr: bool = False


class StartExec(NamedTuple):
    Detach: bool = False
    Tty: bool = False


class CreatedObject(NamedTuple):
    """The id of what was created."""

    Id: str


class ExecState(NamedTuple):
    ID: str = ""
    ContainerID: str = ""
    Running: bool = False
    ExitCode: Optional[int] = None


class ProxySettings(NamedTuple):
    """Proxies for containers, in the docker command's settings."""

    httpProxy: Optional[str] = None
    httpsProxy: Optional[str] = None
    ftpProxy: Optional[str] = None
    noProxy: Optional[str] = None
    allProxy: Optional[str] = None


class DockerSettings(NamedTuple):
    """The docker command's config.json. `proxies` are by the engine's address, or "default"."""

    currentContext: Optional[str] = None
    proxies: Optional[Dict[str, ProxySettings]] = None
