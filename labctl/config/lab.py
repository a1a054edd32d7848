"""Load a lab: flags override LABCTL_*, then lab.yaml, the user's config.yaml and defaults."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from functools import reduce
from pathlib import Path

import msgspec

from labctl.config.directories import expand
from labctl.config.directories import find_paths as standard_paths
from labctl.config.document import Node, escape, make_problems_error, quote, read_bytes
from labctl.config.lab_checks import LabChecks
from labctl.config.lab_providers import LabProviders, ProviderFinder
from labctl.config.lab_values import LabValues
from labctl.config.layers import (
    build_switch_layers,
    merge,
    read_file_layer,
    read_user_layer,
)
from labctl.config.locations import ON_SERVER
from labctl.config.reader import (
    LAB_FILE,
    list_keys,
    make_problem,
    read_struct,
)
from labctl.config.scalars import clean_name, parse_name
from labctl.config.schema import (
    DEFAULT_IMAGE,
    DEFAULT_MIRROR_S,
    DEFAULT_PYTHON,
    KNOWN_SERVICE_PORTS,
    MACHINE_KEYS,
    DataSource,
    ImageConfig,
    ImageFile,
    LabConfig,
    LabFile,
    ServerConfig,
    ServerFile,
    ServiceConfig,
)
from labctl.config.sweep import build_sweep
from labctl.errors import ConfigError, Problem
from labctl.model import Need

SAMPLE = (
    "labctl init digits && cd digits   # a sample\n"
    "labctl init   # in a directory with your own code"
)


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
            why="only the lab's name is required",
            hint=_suggest_name_line(path),
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


def _suggest_name_line(path: Path) -> str:
    """Return the command that writes the lab's name to its empty file."""
    file = LAB_FILE if path.parent == Path.cwd() else escape(shlex.quote(str(path)))
    return f"echo 'lab: {clean_name(path.parent.name)}' > {file}"


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
        self.values = LabValues(path, home, top, problems)
        self.providers = LabProviders(self.values, find_provider)

    def build_config(self, content: bytes = b"") -> LabConfig:
        """Return the lab; values that have problems have their defaults."""
        settings, server_node = self.providers.split_server()
        top = Node({**self.values.nodes, "server": server_node}, 0, LAB_FILE)
        file = read_struct(top, LabFile, "", self.values.problems)
        assert file is not None, "every field has a default"
        name = self.find_name()
        LabChecks(self.values, self.providers).check_all(file)
        services = self.build_services(file)
        return LabConfig(
            name=name,
            root=self.values.path.parent,
            path=self.values.path,
            content=content,
            server=ServerConfig(
                provider=file.server.provider,
                candidates=self.providers.list_candidates(file),
                executor=self.providers.choose_executor(file),
                need=_need(file.server),
                count=file.server.count,
                network=file.server.network,
                provider_settings=settings,
                on_this_machine=self.providers.is_on_this_machine(file.server.provider),
                is_market=self.providers.is_market(file.server.provider),
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
            sweep=build_sweep(self.values.nodes.get("sweep"), file.sweep, self.values.problems),
            base_image=file.base_image,
            wheelhouse=str(expand(file.wheelhouse, self.values.home)) if file.wheelhouse else "",
            package_index=file.package_index,
            image_cache_bytes=file.image_cache,
            cache_pool=file.cache_pool,
            origins={key: node.location for key, node in self.values.leaves.items()},
            lines={
                key: node.line
                for key, node in self.values.leaves.items()
                if node.origin == LAB_FILE
            },
            beside={
                key: text
                for key, node in self.values.leaves.items()
                if node.origin != LAB_FILE and (text := _as_text(node))
            },
        )

    def find_name(self) -> str:
        """Return the lab's name, as written or the directory's; report an invalid one."""
        node = self.values.nodes.get("lab", Node(None))
        if node.value is not None:
            return node.value if isinstance(node.value, str) else ""
        name = self.values.path.parent.name
        try:
            return parse_name(name)
        except ValueError:
            message = f"the directory's name, {quote(name)}, is not a valid lab name; write"
            self.values.problems.append(Problem("lab", 0, f"{message} `lab: {clean_name(name)}`"))
            return ""

    def build_services(self, file: LabFile) -> dict[str, ServiceConfig]:
        """Return the services, each with its port."""
        services: dict[str, ServiceConfig] = {}
        ports: dict[int, str] = {}
        mapping = self.values.nodes.get("services", Node(None)).value
        nodes = mapping if isinstance(mapping, dict) else {}
        for name, node in nodes.items():
            if name not in KNOWN_SERVICE_PORTS and not _has_port(node):
                known = ", ".join(KNOWN_SERVICE_PORTS)
                message = f"needs a port (only {known} have a default): write `{{port: 8000}}`"
                self.values.problems.append(make_problem(node, f"services.{escape(name)}", message))
        for name, service in file.services.items():
            port = service.port or KNOWN_SERVICE_PORTS.get(name, 0)
            if port in ports:
                message = f"port {port} is already used by {ports[port]}"
                self.values.problems.append(make_problem(nodes[name], f"services.{name}", message))
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
            is_job = bool(self.providers.get_job_executor(file.server.provider))
            has_server_python = is_job or self.providers.choose_executor(file) != "docker"
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
        if (self.values.path.parent / "Dockerfile").is_file():
            return ImageConfig(build=".")
        return ImageConfig(reference=DEFAULT_IMAGE)

    def make_source(self, text: str) -> DataSource:
        if text.startswith(ON_SERVER):
            return DataSource(written=text, server_directory=text.removeprefix(ON_SERVER))
        if "://" in text:
            return DataSource(written=text, url=text)
        if text.startswith(("/", "~")):
            return DataSource(written=text, path=expand(text, self.values.home))
        return DataSource(written=text, path=self.values.path.parent / text, inside_lab=True)


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
