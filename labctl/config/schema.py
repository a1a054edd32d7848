"""The schema of lab.yaml (`LabFile`), and the configuration that results from it (`LabConfig`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from labctl.config.document import quote
from labctl.config.locations import parse_inside, parse_place, parse_source, parse_store
from labctl.config.reader import Parsed, PlainYaml
from labctl.config.scalars import (
    parse_cpus,
    parse_duration,
    parse_env_name,
    parse_gpu,
    parse_line,
    parse_name,
    parse_port,
    parse_price,
    parse_process_count,
    parse_restarts,
    parse_secret_name,
    parse_server_count,
    parse_size,
)
from labctl.config.sweep import SweepConfig, SweepFile
from labctl.config.tracking import TrackConfig
from labctl.model import GpuNeed, Need, Spot, Value, Work

DEFAULT_PROVIDER = "local"
DEFAULT_PYTHON = "3.12"
DEFAULT_IMAGE = f"python:{DEFAULT_PYTHON}-slim"
DEFAULT_OUTPUTS = ("checkpoints", "logs")
DEFAULT_SHM_BYTES = 2 * 10**9
DEFAULT_IMAGE_CACHE_BYTES = 20 * 10**9
KNOWN_SERVICE_PORTS = {"tensorboard": 6006, "jupyter": 8888, "mlflow": 5000}
MIN_MEMORY_BYTES = 6 * 2**20
DEFAULT_MIRROR_S, MIN_MIRROR_S = 60, 2
# A link that is cut for less than this may be a matter of routing.
DEFAULT_SILENCE_S, MIN_SILENCE_S = 120, 10
# Programs load their libraries for so long without a word.
MIN_STALL_S = 30

# files of a Python project that pip installs
PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")

# Patterns are compiled at their first use: that takes longer than to import this module.
_PART = "[a-z0-9]+(?:(?:[.]|_|__|-+)[a-z0-9]+)*"
_REFERENCE = (
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?/)?"
    rf"{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)


def parse_reference(text: str) -> str:
    if len(text) > 512 or not re.fullmatch(_REFERENCE, text):
        raise ValueError(f"{quote(text)} is not an image: write name:tag or registry/name:tag")
    return text


def parse_lab_image(text: str) -> str:
    """Parse a reference, or the path of an image on a cluster."""
    if text.startswith("/"):
        if not re.fullmatch(r"(/[A-Za-z0-9_.+-]+)+\.(sif|sqsh|tar)", text):
            raise ValueError(f"{quote(text)} is not an image: write /path/on/the/cluster/image.sif")
        return text
    return parse_reference(text)


def parse_repository(text: str) -> str:
    """Parse `registry.example/name`, a repository with its host and without a tag."""
    host, slash, name = parse_reference(text).partition("/")
    if (
        not slash
        or not ("." in host or ":" in host or host == "localhost")
        or re.search("[:@]", name)
    ):
        raise ValueError(
            f"{quote(text)} is not a repository: write registry.example/name without a tag"
        )
    return text


def parse_packages_file(text: str) -> str:
    """Parse the path of a file of packages in the lab. A Dockerfile names it, so without spaces."""
    path = parse_inside(text)
    if not re.fullmatch(r"[A-Za-z0-9._/+-]+", path):
        raise ValueError(f"{quote(text)}: use only letters, digits and ._+- in this path")
    return path


def parse_requirements(text: str) -> str:
    path = parse_packages_file(text)
    if not path.endswith(".txt") and Path(path).name not in PROJECT_FILES:
        raise ValueError(
            f"{quote(text)} is neither a requirements.txt nor a pyproject.toml or setup.py"
        )
    return path


EXTRA_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"


def parse_extra(text: str) -> str:
    if not re.fullmatch(EXTRA_NAME, text):
        raise ValueError(f"{quote(text)} is not the name of an extra of a package")
    return text


def parse_conda_file(text: str) -> str:
    path = parse_packages_file(text)
    if not path.endswith((".yml", ".yaml")):
        raise ValueError(f"{quote(text)} is not an environment.yml")
    return path


def parse_python(text: str) -> str:
    if not re.fullmatch(r"3\.[0-9]{1,2}(\.[0-9]{1,2})?", text):
        raise ValueError(f"{quote(text)} is not a version of Python: write 3.12")
    return text


def parse_output(text: str) -> str:
    path = parse_inside(text)
    if path == ".":
        raise ValueError(f"{quote(text)}: name the directories below /lab/run")
    return path


def parse_interval(text: str) -> int | None:
    seconds = parse_duration(text)
    if seconds < MIN_MIRROR_S:
        raise ValueError(f"{quote(text)} is too short: the minimum is {MIN_MIRROR_S}s")
    return seconds


def parse_silence(text: str) -> int:
    seconds = parse_duration(text)
    if not seconds or seconds < MIN_SILENCE_S:
        raise ValueError(f"{quote(text)} is too short: the minimum is {MIN_SILENCE_S}s")
    return seconds


def parse_stall(text: str) -> int:
    seconds = 0 if text == "off" else parse_duration(text)
    if text != "off" and (not seconds or seconds < MIN_STALL_S):
        raise ValueError(f"{quote(text)} is too short: the minimum is {MIN_STALL_S}s; or write off")
    return seconds or 0


def parse_index(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", text):
        raise ValueError(f"{quote(text)} is not the https:// address of a package index")
    return text


def parse_names(text: str) -> tuple[str, ...]:
    return tuple(parse_name(part.strip()) for part in text.split(","))


def parse_machine_type(text: str) -> str:
    """Parse the name of a machine type; "" for `any`."""
    if text == "any":
        return ""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/ -]{0,99}", text):
        raise ValueError(f"{quote(text)} is not a machine type: write g5.xlarge")
    return text


def parse_cache_size(text: str) -> int:
    return 0 if text == "off" else parse_size(text)


Name = Annotated[str, Parsed(parse_name)]
EnvName = Annotated[str, Parsed(parse_env_name)]
Price = Annotated[float | None, Parsed(parse_price)]
Duration = Annotated[int | None, Parsed(parse_duration)]
Size = Annotated[int, Parsed(parse_size)]
Reference = Annotated[str, Parsed(parse_reference)]
LabImage = Annotated[str, Parsed(parse_lab_image)]
Line = Annotated[tuple[str, ...], Parsed(parse_line)]


class ContainerLimits(Value, frozen=True):
    """The resources that one container may use; 0 is no limit."""

    memory_bytes: Size = msgspec.field(default=0, name="memory")
    cpus: Annotated[float, Parsed(parse_cpus)] = 0.0
    shm_bytes: Size = msgspec.field(default=DEFAULT_SHM_BYTES, name="shm")

    def __post_init__(self) -> None:
        if 0 < self.memory_bytes < MIN_MEMORY_BYTES:
            raise ValueError(
                f"memory: {self.memory_bytes} bytes are too few, a container needs at least 6MiB; "
                "units are for example 512MB and 8GiB"
            )


class LaunchConfig(Value, frozen=True):
    """What starts a run's program: nothing but the program, or torchrun, once for each GPU.

    `processes` is the number of processes on a server, 0 for one for each GPU. After one has
    failed, all of them start again, up to `restarts` times: by torchrun on one server, by labctl on
    several. A server that does not answer for `silence_s` counts as failed. A run on several
    servers fails if none of its processes shows any progress for `stall_s`; 0 if it never does.
    """

    launcher: Literal["", "torchrun"] = msgspec.field(default="", name="with")
    processes: Annotated[int, Parsed(parse_process_count)] = msgspec.field(
        default=0, name="per_server"
    )
    restarts: Annotated[int, Parsed(parse_restarts)] = 0
    silence_s: Annotated[int, Parsed(parse_silence)] = msgspec.field(
        default=DEFAULT_SILENCE_S, name="silence"
    )
    stall_s: Annotated[int, Parsed(parse_stall)] = msgspec.field(default=0, name="stall")

    def __post_init__(self) -> None:
        if not self.launcher and self.processes:
            raise ValueError("per_server needs `with: torchrun`")


class ImageConfig(Value, frozen=True):
    """One of `reference`, `build`, `requirements` and `conda`; the last three are built.

    `build` is a directory with a Dockerfile. `requirements` is a file for pip, with the version
    `python` ("" for that of the base image) and a project's `extras`, and `conda` one for conda.
    All are relative to the lab. Built images are pulled from the repository `registry` and pushed
    there, if it is not "". `store` is whether they are kept in the lab's store; None for the
    default, see `LabConfig.should_store_images`.
    """

    reference: str = ""
    build: str = ""
    requirements: str = ""
    python: str = ""
    extras: tuple[str, ...] = ()
    conda: str = ""
    args: dict[str, str] = msgspec.field(default_factory=dict)
    registry: str = ""
    store: bool | None = None

    @property
    def environment_file(self) -> str:
        """The file of packages; "" if the image is not made of packages only."""
        return self.requirements or self.conda

    @property
    def is_built(self) -> bool:
        return bool(self.build or self.environment_file)


class ImageFile(Value, frozen=True):
    """`image:` in lab.yaml as a mapping, with the same keys as an ImageConfig for a build."""

    build: Annotated[str, Parsed(parse_inside)] = ""
    requirements: Annotated[str, Parsed(parse_requirements)] = ""
    python: Annotated[str, Parsed(parse_python)] = ""
    extras: tuple[Annotated[str, Parsed(parse_extra)], ...] = ()
    conda: Annotated[str, Parsed(parse_conda_file)] = ""
    args: dict[EnvName, str] = msgspec.field(default_factory=dict)
    registry: Annotated[str, Parsed(parse_repository)] = ""
    store: bool | None = None

    def __post_init__(self) -> None:
        named = [key for key in ("build", "requirements", "conda") if getattr(self, key)]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)}: an image is made from one of them")
        if self.python and not self.requirements:
            raise ValueError("python goes with requirements; a Dockerfile or conda sets its own")
        if self.extras and Path(self.requirements).name not in PROJECT_FILES:
            raise ValueError(
                "extras: these are parts of a project, so they go with requirements: pyproject.toml"
            )


class ServiceConfig(Value, frozen=True):
    """A service with a port on the server; an empty command means labctl's default for it."""

    port: Annotated[int, Parsed(parse_port)] = 0
    command: Line | tuple[str, ...] = ()


# how a run is started on the server: in a container, as a plain process, or as a job of Slurm
ExecutorName: TypeAlias = Literal["docker", "process", "slurm"]


# over which network several servers exchange data: a private one if they have one, else WireGuard
NetworkName: TypeAlias = Literal["auto", "private", "wireguard"]


class ServerFile(Value, frozen=True):
    """`server:` in lab.yaml, without the providers' own sections."""

    provider: Name = DEFAULT_PROVIDER
    fallback: Annotated[tuple[str, ...], Parsed(parse_names)] | tuple[Name, ...] = ()
    executor: ExecutorName = "docker"
    count: Annotated[int, Parsed(parse_server_count)] = 1
    network: NetworkName = "auto"
    gpu: Annotated[GpuNeed, Parsed(parse_gpu)] = GpuNeed()
    type: Annotated[str, Parsed(parse_machine_type)] = ""
    gpu_memory: Size = 0
    arch: Literal["", "x86_64", "arm64"] = ""
    work: Work = ""
    spot: Spot = "prefer"
    max_price: Price = None
    budget: Price = None
    ttl: Duration = None
    max_ttl: Duration = None
    idle: Duration = None


class LabFile(Value, frozen=True):
    """Every key of lab.yaml, and at the end the machine settings that it may not set."""

    lab: Name = ""
    server: ServerFile = ServerFile()
    image: LabImage | ImageFile = ""
    run: Line | tuple[str, ...] = ()
    launch: LaunchConfig = LaunchConfig()
    env: dict[EnvName, str] = msgspec.field(default_factory=dict)
    secrets: tuple[Annotated[str, Parsed(parse_secret_name)], ...] = ()
    data: dict[Name, Annotated[str, Parsed(parse_source)]] = msgspec.field(default_factory=dict)
    outputs: tuple[Annotated[str, Parsed(parse_output)], ...] = DEFAULT_OUTPUTS
    services: dict[Name, ServiceConfig] = msgspec.field(default_factory=dict)
    track: TrackConfig = TrackConfig()
    store: Annotated[str, Parsed(parse_store)] = ""
    mirror: Annotated[int | None, Parsed(parse_interval)] = None
    limits: ContainerLimits = ContainerLimits()
    sweep: SweepFile = SweepFile()
    base_image: Reference = ""
    wheelhouse: Annotated[str, Parsed(parse_place)] = ""
    package_index: Annotated[str, Parsed(parse_index)] = ""
    image_cache: Annotated[int, Parsed(parse_cache_size)] = DEFAULT_IMAGE_CACHE_BYTES
    cache_pool: Name = ""


# Settings of this machine: from config.yaml or the environment, never from a lab.
MACHINE_KEYS = ("base_image", "wheelhouse", "package_index", "image_cache", "cache_pool")
# Keys that the user's config.yaml may have.
USER_KEYS = ("server", "image", "store", "mirror", "limits", *MACHINE_KEYS)


class DataSource(Value, frozen=True):
    """The source of a data set: a directory on this machine (`path`), or a URL (`url`).

    `server_directory` is a full path on the server, where the data set already is.
    """

    written: str
    path: Path | None = None
    url: str = ""
    inside_lab: bool = False
    server_directory: str = ""


# The section of one provider: an instance of its settings type, or plain where it is not read.
ProviderSettings: TypeAlias = "msgspec.Struct | PlainYaml"


class ProviderTraits(Value, frozen=True):
    """The properties of a provider that decide how a configuration is read.

    `on_this_machine`: its servers are containers on this machine. `for_students`: a course grants
    its servers, so the servers of a course cannot come from it. `job_executor`: its servers are
    login nodes, and have this executor alone. `is_market`: its servers come from other providers.
    `no_engine`: why its servers have no Docker Engine,
    so that runs are plain processes; "" if they may have one.
    """

    settings_type: type[msgspec.Struct]
    on_this_machine: bool = False
    for_students: bool = False
    job_executor: str = ""
    is_market: bool = False
    no_engine: str = ""


class ServerConfig(Value, frozen=True):
    """The configuration of the lab's server; `on_this_machine` as in ProviderTraits.

    `count` is the number of servers, which are all alike: `need` is that of one. They exchange data
    over `network`. A new server comes from the first of `candidates` that has one; () for the
    `provider` alone. `is_market` as in ProviderTraits.
    """

    provider: str
    need: Need
    candidates: tuple[str, ...] = ()
    count: int = 1
    network: NetworkName = "auto"
    executor: str = "docker"
    provider_settings: dict[str, ProviderSettings] = msgspec.field(default_factory=dict)
    on_this_machine: bool = False
    is_market: bool = False


class LabConfig(Value, frozen=True):
    """The configuration of a lab. Paths are absolute; `origins` maps each dotted key to its origin.

    `content` is what was read from `path`. `beside` has the values that were set outside lab.yaml,
    as the text of an override.
    """

    name: str
    root: Path
    path: Path
    content: bytes
    server: ServerConfig
    image: ImageConfig
    run: tuple[str, ...] = ()
    launch: LaunchConfig = LaunchConfig()
    env: dict[str, str] = msgspec.field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    data: dict[str, DataSource] = msgspec.field(default_factory=dict)
    outputs: tuple[str, ...] = DEFAULT_OUTPUTS
    services: dict[str, ServiceConfig] = msgspec.field(default_factory=dict)
    track: TrackConfig = TrackConfig()
    store: str = ""
    mirror_s: int = DEFAULT_MIRROR_S
    limits: ContainerLimits = ContainerLimits()
    sweep: SweepConfig = SweepConfig()
    base_image: str = ""
    wheelhouse: str = ""
    package_index: str = ""
    image_cache_bytes: int = DEFAULT_IMAGE_CACHE_BYTES
    cache_pool: str = ""
    origins: dict[str, str] = msgspec.field(default_factory=dict)
    lines: dict[str, int] = msgspec.field(default_factory=dict)
    beside: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def submits_jobs(self) -> bool:
        """Whether each run is a job, which may wait in a queue."""
        return self.server.executor == "slurm"

    @property
    def uses_containers(self) -> bool:
        """Whether a run is a container, so that the server needs Docker and an image."""
        return self.server.executor == "docker"

    @property
    def environment_file(self) -> str:
        """The file of packages for runs without a container; "" if they use the server's alone."""
        return "" if self.uses_containers else self.image.environment_file

    @property
    def job_image(self) -> str:
        """The image of a run that is a job of a cluster; "" if it uses the cluster's programs."""
        return self.image.reference if not self.uses_containers and self.has_own_image else ""

    @property
    def has_own_image(self) -> bool:
        """Whether a setting names the image, so that it is not the default."""
        return any(key == "image" or key.startswith("image.") for key in self.origins)

    @property
    def should_store_images(self) -> bool:
        """Whether servers keep the images that they build in the lab's store.

        The default for an SSH server is no: its disk may be small, and results need it.
        """
        if not self.store or not self.image.is_built:
            return False
        default = self.store.startswith("s3://")
        return default if self.image.store is None else self.image.store

    @property
    def server_data(self) -> dict[str, str]:
        """The full path on the server of each data set that is already there, by its name."""
        sources = self.data.items()
        return {name: each.server_directory for name, each in sources if each.server_directory}
