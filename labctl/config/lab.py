"""Load a lab: flags override LABCTL_*, then lab.yaml, the user's config.yaml and defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path

import msgspec

from labctl.config.directories import expand
from labctl.config.directories import find_paths as standard_paths
from labctl.config.document import Node, escape, make_problems_error, quote, read_bytes
from labctl.config.layers import (
    build_switch_layers,
    iterate_leaves,
    merge,
    read_file_layer,
    read_user_layer,
)
from labctl.config.locations import ON_SERVER
from labctl.config.reader import (
    LAB_FILE,
    as_plain,
    list_keys,
    make_problem,
    read,
    read_struct,
)
from labctl.config.scalars import clean_name, format_duration, parse_name
from labctl.config.schema import (
    DEFAULT_IMAGE,
    DEFAULT_MIRROR_S,
    DEFAULT_PROVIDER,
    DEFAULT_PYTHON,
    KNOWN_SERVICE_PORTS,
    MACHINE_KEYS,
    DataSource,
    ImageConfig,
    ImageFile,
    LabConfig,
    LabFile,
    ProviderSettings,
    ProviderTraits,
    ServerConfig,
    ServerFile,
    ServiceConfig,
)
from labctl.config.sweep import build_sweep
from labctl.config.tracking import find_tracking_problem
from labctl.errors import ConfigError, NotFoundError, Problem, UsageError
from labctl.model import Need

# Why a setting for containers cannot apply to plain processes.
LISTS = (
    '`image: {python: "3.11", requirements: requirements.txt}` or `image: {conda: environment.yml}`'
)
_LISTS_ONLY = f"without containers labctl makes an environment from a list of packages: {LISTS}"
_NO_FILE = "is a file of a cluster; write name:tag or registry/name:tag"
NO_JOB_BUILDS = (
    "machines with Slurm build no images: build it on another computer, push it to a registry and "
    "write `image: registry.example/name:tag`"
)
_LISTS_IN_JOBS = "a job runs in an environment of these packages, not in a container"
_ALL_MEMORY = "as a plain process a run uses all the memory and processors of the server"
SAMPLE = (
    "labctl init digits && cd digits   # a sample\n"
    "labctl init   # in a directory with your own code"
)

# Returns the traits of the provider with a name; None, or an error, if it is not installed.
ProviderFinder = Callable[[str], ProviderTraits | None]


def load_lab(
    path_or_dir: Path,
    *,
    overrides: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    find_provider: ProviderFinder | None = None,
    needs_file: bool = True,
    skips_faults: bool = False,
) -> LabConfig:
    """Load the lab at a directory or lab.yaml, without checking the files that it names.

    `overrides` are flags, by short name or dotted key. `find_provider` returns the traits of a
    provider, or None (or raises UsageError, NotFoundError) for an unknown one; without it the
    providers' sections stay plain and unchecked, which loads no provider. Without `needs_file` a
    directory without lab.yaml is read like one with an empty lab.yaml, whatever its name is.
    With `skips_faults`, values of the files that cannot be read have their defaults.
    Raises ConfigError with every problem of lab.yaml, config.yaml and the switches.
    """
    path = _lab_file(path_or_dir)
    own_paths = standard_paths(environ)
    variables = os.environ if environ is None else environ
    problems: list[Problem] = []
    hint = _missing_hint(path)
    has_no_file = not needs_file and not path.exists()
    default = f'lab: "{clean_name(path.parent.name)}"\n'.encode()  # quoted: it may be `null`
    data = default if has_no_file else read_bytes(path, LAB_FILE, hint=hint)
    if not data.strip(b"\xef\xbb\xbf \t\r\n") and not skips_faults:
        raise ConfigError(
            f"{escape(str(path))} is empty",
            why="it needs at least one line, such as `lab: digits`",
            hint=SAMPLE,
        )
    known = [key for key in list_keys(LabFile) if key not in MACHINE_KEYS]
    lab_layer = read_file_layer(data, LAB_FILE, known, problems, own_paths.cache_dir)
    if problems and not lab_layer.value and not skips_faults:
        # Nothing in it can be read, so problems with missing values would only mislead.
        raise _make_config_error(path, problems)
    layers = [
        read_user_layer(own_paths, problems),
        lab_layer,
        *build_switch_layers(overrides or {}, variables),
    ]
    top = reduce(merge, layers, Node({}, 0, LAB_FILE))
    reader = LabConfigReader(path, own_paths.home, top, find_provider, problems)
    config = reader.build_config(data)
    if skips_faults:
        problems = [problem for problem in problems if _is_of_switch(problem)]
    if problems:
        raise _make_config_error(path, problems)
    return config


def _is_of_switch(problem: Problem) -> bool:
    """Whether an option or a variable has the problem: the user chose that for this command."""
    return problem.origin.startswith(("--", "LABCTL_"))


def _make_config_error(path: Path, problems: list[Problem]) -> ConfigError:
    hint = "labctl config   # after you fix these lines"
    origins = list(dict.fromkeys(problem.origin for problem in problems))
    if all(origin.startswith("--") for origin in origins):
        hint = f"labctl up --help   # describes {', '.join(origins)}"
    elif all(origin.startswith("LABCTL_") for origin in origins):
        hint = f"unset {' '.join(origins)}"
    else:
        where = escape(str(path)) if "" in origins else " and ".join(origins)
        return make_problems_error(where, problems, hint=hint)
    names, verb = " and ".join(origins), "is" if len(origins) == 1 else "are"
    return ConfigError(f"{names} {verb} not valid", tuple(dict.fromkeys(problems)), hint=hint)


def find_lab(path_or_dir: Path) -> Path:
    """Return the directory with a lab.yaml that is the nearest above a directory, or is it.

    Return `path_or_dir` itself if it is a file or no lab is found. A lab.yaml of another user does
    not count, unless that user owns `path_or_dir` too: in a shared place such as /tmp, a stranger
    could otherwise put a lab above yours.
    """
    if not path_or_dir.is_dir() or os.path.lexists(path_or_dir / LAB_FILE):
        return path_or_dir
    owners = {os.geteuid(), path_or_dir.stat().st_uid}
    for directory in path_or_dir.resolve().parents:
        try:
            if (directory / LAB_FILE).stat().st_uid in owners:
                return directory
        except OSError:
            continue  # it has none, or may not be searched
    return path_or_dir


def _lab_file(path_or_dir: Path) -> Path:
    path = path_or_dir.absolute()
    if path.name != LAB_FILE and not os.path.lexists(path):
        raise ConfigError(
            f"there is no directory {escape(str(path))}",
            why="a lab is a directory with a lab.yaml",
            hint=SAMPLE,
        )
    return path / LAB_FILE if path.is_dir() else path


def _missing_hint(path: Path) -> str:
    """Suggest the sample project, or a directory above that is a lab of somebody else."""
    for parent in path.parents[1:]:
        if (parent / LAB_FILE).is_file():
            return f"labctl -C {escape(str(parent))} ..."
    return SAMPLE


def _as_text(node: Node) -> str:
    """Return a value as the text of an override; "" for a value that only a file can have."""
    items = node.value if isinstance(node.value, list) else [node]
    parts = [item.value for item in items if isinstance(item.value, str)]
    return ", ".join(parts) if len(parts) == len(items) else ""


class LabConfigReader:
    """Reads one lab from its merged nodes, and collects the problems."""

    def __init__(
        self,
        path: Path,
        home: Path,
        top: Node,
        find_provider: ProviderFinder | None,
        problems: list[Problem],
    ) -> None:
        assert isinstance(top.value, dict)
        self.path = path
        self.home = home
        self.nodes = top.value
        self.leaves = dict(iterate_leaves(top))
        self.find_provider = find_provider
        self.traits: dict[str, ProviderTraits] = {}
        self.problems = problems
        self.providers = ""

    def build_config(self, content: bytes = b"") -> LabConfig:
        """Return the lab; values that have problems have their defaults."""
        settings, server_node = self.split_server()
        top = Node({**self.nodes, "server": server_node}, 0, LAB_FILE)
        file = read_struct(top, LabFile, "", self.problems)
        assert file is not None, "every field has a default"
        name = self.find_name()
        self.check_across(file)
        services = self.build_services(file)
        return LabConfig(
            name=name,
            root=self.path.parent,
            path=self.path,
            content=content,
            server=ServerConfig(
                provider=file.server.provider,
                candidates=self.list_candidates(file),
                executor=self.choose_executor(file),
                need=_need(file.server),
                count=file.server.count,
                network=file.server.network,
                provider_settings=settings,
                on_this_machine=self.is_on_this_machine(file.server.provider),
                is_market=self.is_market(file.server.provider),
            ),
            image=self.choose_image(file),
            run=file.run,
            launch=file.launch,
            env=file.env,
            secrets=file.secrets,
            data={key: self.make_source(text) for key, text in file.data.items()},
            outputs=file.outputs,
            services=services,
            track=file.track,
            store=file.store,
            mirror_s=file.mirror or DEFAULT_MIRROR_S,
            limits=file.limits,
            sweep=build_sweep(self.nodes.get("sweep"), file.sweep, self.problems),
            base_image=file.base_image,
            wheelhouse=str(expand(file.wheelhouse, self.home)) if file.wheelhouse else "",
            package_index=file.package_index,
            image_cache_bytes=file.image_cache,
            origins={key: node.location for key, node in self.leaves.items()},
            lines={key: node.line for key, node in self.leaves.items() if node.origin == LAB_FILE},
            beside={
                key: text
                for key, node in self.leaves.items()
                if node.origin != LAB_FILE and (text := _as_text(node))
            },
        )

    def list_candidates(self, file: LabFile) -> tuple[str, ...]:
        """List the providers to try in turn. An option or a variable selects one alone."""
        provider = file.server.provider
        is_selected = self.find_leaf("server.provider").origin.startswith(("--", "LABCTL_"))
        if not file.server.fallback or is_selected:
            return ()
        return tuple(dict.fromkeys((provider, *file.server.fallback)))

    def check_fallback(self, file: LabFile) -> None:
        """Report a fallback that is not installed, or that cannot replace another provider."""
        for name in file.server.fallback:
            if self.find_provider is None:
                return
            traits = self.find_traits(name)
            node = self.find_leaf("server.fallback")
            if traits is None:
                message = f"there is no provider called {quote(name)}; {self.providers}"
                self.problems.append(make_problem(node, "server.fallback", message))
            elif traits.job_executor or traits.for_students or traits.is_market:
                message = f"{name} cannot replace another provider"
                self.problems.append(make_problem(node, "server.fallback", message))

    def is_on_this_machine(self, provider: str) -> bool:
        return provider in self.traits and self.traits[provider].on_this_machine

    def is_market(self, provider: str) -> bool:
        return provider in self.traits and self.traits[provider].is_market

    def get_job_executor(self, provider: str) -> str:
        """Return the executor of a provider whose runs are jobs; "" for any other."""
        return self.traits[provider].job_executor if provider in self.traits else ""

    def get_no_engine(self, provider: str) -> str:
        """Return why servers of a provider have no Docker Engine; "" if they may have one."""
        return self.traits[provider].no_engine if provider in self.traits else ""

    def choose_executor(self, file: LabFile) -> str:
        """Return the provider's only executor, else the configured one."""
        provider = file.server.provider
        only = "process" if self.get_no_engine(provider) else ""
        return self.get_job_executor(provider) or only or file.server.executor

    def split_server(self) -> tuple[dict[str, ProviderSettings], Node]:
        """Return the providers' settings, and `server` without their sections."""
        node = self.nodes.get("server", Node({}, 0, LAB_FILE))
        if node.value is None:
            node = Node({}, node.line, node.origin)
        if not isinstance(node.value, dict):
            return {}, node
        server_keys = list_keys(ServerFile)
        settings: dict[str, ProviderSettings] = {}
        entries = {}
        for key, item in node.value.items():
            if (
                key in server_keys
                or isinstance(item.value, str | list)
                or not self.read_settings(key, item, settings)
            ):
                entries[key] = item
        self.add_default_settings(node, settings, entries)
        return settings, Node(entries, node.line, node.origin)

    def read_settings(
        self, provider: str, node: Node, settings: dict[str, ProviderSettings]
    ) -> bool:
        """Read one provider's section into `settings`; False for an unknown provider."""
        if self.find_provider is None:
            settings[provider] = as_plain(node) or {}
            return True
        traits = self.find_traits(provider)
        if traits is None:
            return False
        self.traits[provider] = traits
        path = f"server.{escape(provider)}"
        settings[provider] = _read_section(node, traits.settings_type, path, self.problems)
        return True

    def find_traits(self, provider: str) -> ProviderTraits | None:
        """Return a provider's traits; None, and note which are installed, if it is unknown."""
        try:
            parse_name(provider)
            return self.find_provider(provider) if self.find_provider else None
        except ValueError:
            return None
        except (UsageError, NotFoundError) as error:
            self.providers = error.why
            return None

    def add_default_settings(
        self, server: Node, settings: dict[str, ProviderSettings], entries: dict[str, Node]
    ) -> None:
        """Use default settings for the provider in use if it has no section."""
        default = Node(DEFAULT_PROVIDER, server.line, server.origin)
        selected = entries.get("provider", default)
        name = default.value if selected.value is None else selected.value
        if not isinstance(name, str) or name in settings or self.find_provider is None:
            return
        if name in entries and name not in list_keys(ServerFile):
            return
        if not self.read_settings(name, Node({}, selected.line, selected.origin), settings):
            message = f"there is no provider called {quote(name)}"
            message = f"{message}; {self.providers}" if self.providers else message
            self.problems.append(make_problem(selected, "server.provider", message))

    def find_name(self) -> str:
        """Return the lab's name, as written or the directory's; report an invalid one."""
        node = self.nodes.get("lab", Node(None))
        if node.value is not None:
            return node.value if isinstance(node.value, str) else ""
        name = self.path.parent.name
        try:
            return parse_name(name)
        except ValueError:
            message = f"the directory's name, {quote(name)}, is not a valid lab name; write"
            self.problems.append(Problem("lab", 0, f"{message} `lab: {clean_name(name)}`"))
            return ""

    def find_leaf(self, path: str) -> Node:
        """Return the leaf at a dotted path, or an empty one."""
        return self.leaves.get(path, Node(None, 0, LAB_FILE))

    def check_across(self, file: LabFile) -> None:
        """Check rules that concern several values, such as duplicates."""
        for key, names in (("secrets", file.secrets), ("outputs", file.outputs)):
            for name in {name for name in names if names.count(name) > 1}:
                self.problems.append(
                    make_problem(self.find_leaf(key), key, f"{quote(name)} is listed twice")
                )
        if problem := find_tracking_problem(file.track, file.secrets):
            node = self.find_leaf("track.wandb")
            self.problems.append(make_problem(node, "track.wandb", problem))
        longest = file.server.max_ttl
        if longest and file.server.ttl and file.server.ttl > longest:
            message = f"is longer than max_ttl ({format_duration(longest)})"
            self.problems.append(make_problem(self.find_leaf("server.ttl"), "server.ttl", message))
        if self.get_job_executor(file.server.provider):
            self.check_job_executor(file)
        elif file.server.executor == "slurm":
            self.check_granted_job_executor(file)
        elif self.choose_executor(file) == "process":
            self.check_process_executor(file)
        elif isinstance(file.image, str) and file.image.startswith("/"):
            self.problems.append(make_problem(self.find_leaf("image"), "image", _NO_FILE))
        self.check_count(file)
        self.check_fallback(file)
        for name in sorted(set(file.secrets) & set(file.env)):
            message = "is also in secrets; lab.yaml must not contain the value of a secret"
            self.problems.append(
                make_problem(self.find_leaf(f"env.{name}"), f"env.{name}", message)
            )

    def check_count(self, file: LabFile) -> None:
        """Report settings that only one server, or only several, can have."""
        count, restarts = self.find_leaf("server.count"), self.find_leaf("launch.restarts")
        provider = file.server.provider
        traits = self.traits.get(provider)
        if file.server.count > 1 and traits and (traits.job_executor or traits.for_students):
            message = f"{provider} gives a lab one server"
            self.problems.append(make_problem(count, "server.count", message))
        if file.server.count > 1 and (self.list_candidates(file) or (traits and traits.is_market)):
            message = "several servers come from one provider: name it, without `fallback`"
            self.problems.append(make_problem(count, "server.count", message))
        if file.launch.restarts and not file.launch.launcher and file.server.count == 1:
            message = "needs `with: torchrun`, or several servers"
            self.problems.append(make_problem(restarts, "launch.restarts", message))
        if file.launch.stall_s and file.server.count == 1:
            message = "needs several servers: write `count: 2`, or remove `stall`"
            node = self.find_leaf("launch.stall")
            self.problems.append(make_problem(node, "launch.stall", message))
        if "server.network" in self.leaves and file.server.count == 1:
            self.check_network(file)

    def check_network(self, file: LabFile) -> None:
        """Report a network between servers if there is one server; `auto` may be written."""
        if "server.count" not in self.leaves or file.server.network != "auto":
            message = "needs several servers: write `count: 2`, or remove `network`"
            node = self.find_leaf("server.network")
            self.problems.append(make_problem(node, "server.network", message))

    def check_process_executor(self, file: LabFile) -> None:
        """Report settings that need a container."""
        image, no_engine = file.image, self.get_no_engine(file.server.provider)
        because = f" ({no_engine})" if no_engine else ""
        if no_engine and file.server.executor != "process":
            # The default is no choice, and the provider makes it.
            self.refuse_settings(("server.executor", f"{no_engine}: write `process`, or nothing"))
        reasons = dict.fromkeys(("image.build", "image.registry", "image.store"), _LISTS_ONLY)
        if not isinstance(image, ImageFile) or not (image.requirements or image.conda):
            reasons = {"image": _LISTS_ONLY}
        reasons.update(dict.fromkeys(("limits.memory", "limits.cpus", "limits.shm"), _ALL_MEMORY))
        for key, reason in reasons.items():
            node = self.nodes.get(key) if key == "image" else self.leaves.get(key)
            if node is not None and node.value is not None:
                self.problems.append(
                    make_problem(node, key, f"needs a container{because}; {reason}")
                )

    def check_job_executor(self, file: LabFile) -> None:
        """Report settings that a job of a cluster cannot have."""
        no_deadline = "a login node has no deadline; `time` under `slurm` limits each job"
        self.check_job_gpu(file)
        self.refuse_settings(
            ("server.executor", "each run is a job of the cluster; leave this out"),
            *((f"server.{key}", no_deadline) for key in ("ttl", "max_ttl", "idle", "budget")),
            *self.list_image_problems(file),
            ("limits.shm", "the containers of a cluster share the memory of the job"),
            ("store", "nothing of labctl runs on a login node that could save results there"),
        )

    def check_granted_job_executor(self, file: LabFile) -> None:
        """Report settings that a job on a course's machine cannot have."""
        traits = self.traits.get(file.server.provider)
        if traits is not None and not traits.for_students:
            why = "only a course grants servers with Slurm; for a cluster, write `provider: slurm`"
            self.refuse_settings(("server.executor", why))
            return
        self.check_job_gpu(file)
        self.refuse_settings(("store", "the course saves results"))
        if isinstance(file.image, ImageFile):
            self.check_job_packages(file.image)
        elif file.image.startswith("/"):
            self.refuse_settings(("image", _NO_FILE))
        if not (isinstance(file.image, str) and file.image):
            why = "needs a container, so write the name of an image: `image: NAME`"
            self.refuse_settings(("limits.shm", why))

    def check_job_packages(self, image: ImageFile) -> None:
        """Report what a list of packages cannot have in a job, or else that nothing is built."""
        if image.requirements or image.conda:
            keys = ("image.build", "image.registry", "image.store")
            self.refuse_settings(*((key, _LISTS_IN_JOBS) for key in keys))
        else:
            self.refuse_settings(("image", f"{NO_JOB_BUILDS}; for packages alone: {LISTS}"))

    def check_job_gpu(self, file: LabFile) -> None:
        """Report a minimum of GPU memory, which Slurm does not know."""
        message = (
            "Slurm does not know the memory of GPUs; write a type that the cluster has: a100:2"
        )
        if file.server.gpu.min_memory_bytes:
            self.problems.append(make_problem(self.find_leaf("server.gpu"), "server.gpu", message))
        self.refuse_settings(("server.gpu_memory", message))

    def refuse_settings(self, *reasons: tuple[str, str]) -> None:
        """Report each of these settings that lab.yaml or another layer has, with its reason."""
        for key, why in reasons:
            node = self.nodes.get(key) if key == "image" else self.leaves.get(key)
            if node is not None and node.value is not None:
                self.problems.append(make_problem(node, key, why))

    def list_image_problems(self, file: LabFile) -> list[tuple[str, str]]:
        """List keys that a cluster may refuse, and why: it builds and stores no images."""
        image, provider = file.image, file.server.provider
        runtime = self.find_leaf(f"server.{escape(provider)}.runtime").value
        if isinstance(image, str):
            why = f"needs a container, which `runtime: none` refuses; {_LISTS_ONLY}"
            return [("image", why)] if runtime == "none" else []
        if image.requirements or image.conda:
            why = "a cluster stores no images; it makes an environment from the list of packages"
            return [(key, why) for key in ("image.build", "image.registry", "image.store")]
        build = (
            "a cluster builds no images: push it to a registry and name it, or make a file of it"
        )
        return [("image", f"{build} there, such as /shared/image.sif; {_LISTS_ONLY}")]

    def build_services(self, file: LabFile) -> dict[str, ServiceConfig]:
        """Return the services, each with its port."""
        services: dict[str, ServiceConfig] = {}
        ports: dict[int, str] = {}
        mapping = self.nodes.get("services", Node(None)).value
        nodes = mapping if isinstance(mapping, dict) else {}
        for name, node in nodes.items():
            if name not in KNOWN_SERVICE_PORTS and not _has_port(node):
                known = ", ".join(KNOWN_SERVICE_PORTS)
                message = f"needs a port (only {known} have a default): write `{{port: 8000}}`"
                self.problems.append(make_problem(node, f"services.{escape(name)}", message))
        for name, service in file.services.items():
            port = service.port or KNOWN_SERVICE_PORTS.get(name, 0)
            if port in ports:
                message = f"port {port} is already used by {ports[port]}"
                self.problems.append(make_problem(nodes[name], f"services.{name}", message))
            if port:
                ports.setdefault(port, name)
            services[name] = ServiceConfig(port=port, command=service.command)
        return services

    def choose_image(self, file: LabFile) -> ImageConfig:
        """Return the configured image, else the lab's own Dockerfile, else plain Python."""
        if isinstance(file.image, ImageFile):
            image = file.image
            is_environment = bool(image.requirements or image.conda)
            # Without a version, a base image of this machine decides: see `environment.list_args`.
            # A run without a container has the Python of its server.
            is_job = bool(self.get_job_executor(file.server.provider))
            has_server_python = is_job or self.choose_executor(file) != "docker"
            default_python = "" if file.base_image or has_server_python else DEFAULT_PYTHON
            return ImageConfig(
                build="" if is_environment else image.build or ".",
                requirements=image.requirements,
                python=(image.python or default_python) if image.requirements else "",
                extras=image.extras,
                conda=image.conda,
                args=image.args,
                registry=image.registry,
                store=image.store,
            )
        if file.image:
            return ImageConfig(reference=file.image)
        if (self.path.parent / "Dockerfile").is_file():
            return ImageConfig(build=".")
        return ImageConfig(reference=DEFAULT_IMAGE)

    def make_source(self, text: str) -> DataSource:
        if text.startswith(ON_SERVER):
            return DataSource(written=text, server_directory=text.removeprefix(ON_SERVER))
        if "://" in text:
            return DataSource(written=text, url=text)
        if text.startswith(("/", "~")):
            return DataSource(written=text, path=expand(text, self.home))
        return DataSource(written=text, path=self.path.parent / text, inside_lab=True)


def _read_section(
    node: Node, kind: type[msgspec.Struct], path: str, problems: list[Problem]
) -> msgspec.Struct | None:
    """Read a provider's section; of one with problems what can be read, None if nothing can."""
    before = len(problems)
    section: msgspec.Struct | None = read(node, kind, path, problems)
    if section is None and len(problems) > before:
        with suppress(ValueError):  # of keys that exclude each other
            section = read_struct(node, kind, path, [])
    return section


def _has_port(service: Node) -> bool:
    """Whether the service has a port, or is not a mapping and so cannot have one."""
    entries = {} if service.value is None else service.value
    return not isinstance(entries, dict) or entries.get("port", Node(None)).value is not None


def _need(server: ServerFile) -> Need:
    gpu = server.gpu
    if server.gpu_memory and gpu.kind != "none":
        least = max(server.gpu_memory, gpu.min_memory_bytes)
        gpu = msgspec.structs.replace(gpu, min_memory_bytes=least)
    return Need(
        gpu=gpu,
        type=server.type,
        arch=server.arch,
        work=server.work,
        spot=server.spot,
        max_price_usd_per_hour=server.max_price,
        budget_usd=server.budget,
        ttl_s=server.ttl,
        max_ttl_s=server.max_ttl,
        idle_s=server.idle,
    )
