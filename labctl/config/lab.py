"""Loading a lab: flags over LABCTL_* over lab.yaml over the user's config.yaml over defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec

from labctl.config.directories import expanded
from labctl.config.directories import paths as standard_paths
from labctl.config.document import Node, plain, read_bytes, shown
from labctl.config.layers import file_layer, leaves, merged, switch_layers, user_layer
from labctl.config.reader import LAB_FILE, keys_of, problem, raw, read, read_known
from labctl.config.scalars import cleaned_name, duration_text, parse_name
from labctl.config.schema import (
    DEFAULT_IMAGE,
    DEFAULT_MIRROR_S,
    DEFAULT_PROVIDER,
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
from labctl.errors import ConfigError, NotFoundError, Problem, UsageError
from labctl.model import Need

SAMPLE = (
    "labctl init digits && cd digits   # a sample; for code of your own: a lab.yaml with lab: NAME"
)

SettingsType = Callable[[str], type[msgspec.Struct] | None]


def load_lab(
    path_or_dir: Path,
    *,
    overrides: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    settings_type: SettingsType | None = None,
    needs_file: bool = True,
) -> LabConfig:
    """The lab at a directory or lab.yaml, with nothing checked beyond what the files say.

    `overrides` are flags, by short name or dotted key. `settings_type` gives a provider's settings
    type, or None (or raises UsageError, NotFoundError) where there is no such provider; without it
    the providers' sections stay plain and unchecked, which loads no provider. Without `needs_file`
    a directory that has no lab.yaml is read as if its lab.yaml said nothing, whatever it is called.
    Raises ConfigError with every problem of lab.yaml, config.yaml and the switches.
    """
    path = _lab_file(path_or_dir)
    places = standard_paths(environ)
    given = os.environ if environ is None else environ
    problems: list[Problem] = []
    hint = _missing_hint(path)
    loose = not needs_file and not path.exists()
    named = f'lab: "{cleaned_name(path.parent.name)}"\n'.encode()  # quoted: it may be `null`
    data = named if loose else read_bytes(path, LAB_FILE, hint=hint)
    if not data.strip(b"\xef\xbb\xbf \t\r\n"):
        raise ConfigError(
            f"{plain(str(path))} is empty",
            why="it needs at least one line, such as `lab: digits`",
            hint=SAMPLE,
        )
    known = [key for key in keys_of(LabFile) if key not in MACHINE_KEYS]
    lab_layer = file_layer(data, LAB_FILE, known, problems)
    if problems and not lab_layer.value:
        # Nothing of it can be read: what would follow from its absence is no news.
        raise _config_error(path, problems)
    layers = [
        user_layer(places.config_file, places.home, problems),
        lab_layer,
        *switch_layers(overrides or {}, given),
    ]
    top = reduce(merged, layers, Node({}, 0, LAB_FILE))
    from hashlib import sha256

    config = LabLoading(path, places.home, top, settings_type, problems).config(
        sha256(data).hexdigest()
    )
    if config is None:
        raise _config_error(path, problems)
    return config


def _config_error(path: Path, problems: list[Problem]) -> ConfigError:
    distinct = sorted(dict.fromkeys(problems), key=lambda found: (found.line == 0, found.line))
    count = "one problem" if len(distinct) == 1 else f"{len(distinct)} problems"
    return ConfigError(
        f"{plain(str(path))} has {count}",
        tuple(distinct),
        hint="labctl config   # once these lines are mended",
    )


def _lab_file(path_or_dir: Path) -> Path:
    path = path_or_dir.absolute()
    return path / LAB_FILE if path.is_dir() else path


def _missing_hint(path: Path) -> str:
    """The sample project, unless a directory above is a lab."""
    for parent in path.parents[1:]:
        if (parent / LAB_FILE).is_file():
            return f"labctl -C {plain(str(parent))} ..."
    return SAMPLE


def _as_text(node: Node) -> str:
    """A value as an override gives it; "" for what only a file can hold."""
    items = node.value if isinstance(node.value, list) else [node]
    parts = [item.value for item in items if isinstance(item.value, str)]
    return ", ".join(parts) if len(parts) == len(items) else ""


class LabLoading:
    """One lab being read: the merged nodes, and the problems found so far."""

    def __init__(
        self,
        path: Path,
        home: Path,
        top: Node,
        settings_type: SettingsType | None,
        problems: list[Problem],
    ) -> None:
        assert isinstance(top.value, dict)
        self.path = path
        self.home = home
        self.nodes = top.value
        self.leaves = dict(leaves(top))
        self.settings_type = settings_type
        self.problems = problems
        self.providers = ""

    def config(self, file_hash: str) -> LabConfig | None:
        """The lab, or None when there are problems."""
        settings, server_node = self.split_server()
        top = Node({**self.nodes, "server": server_node}, 0, LAB_FILE)
        file = LabFile(**read_known(top, LabFile, "", self.problems))
        name = self.name()
        self.check_across(file)
        services = self.services(file)
        if self.problems:
            return None
        return LabConfig(
            name=name,
            root=self.path.parent,
            path=self.path,
            file_hash=file_hash,
            server=ServerConfig(
                provider=file.server.provider,
                need=_need(file.server),
                provider_settings=settings,
            ),
            image=self.image(file),
            run=file.run,
            env=file.env,
            secrets=file.secrets,
            data={key: self.source(text) for key, text in file.data.items()},
            outputs=file.outputs,
            services=services,
            store=file.store,
            mirror_s=file.mirror or DEFAULT_MIRROR_S,
            limits=file.limits,
            base_image=file.base_image,
            wheelhouse=str(expanded(file.wheelhouse, self.home)) if file.wheelhouse else "",
            package_index=file.package_index,
            origins={key: node.place for key, node in self.leaves.items()},
            lines={key: node.line for key, node in self.leaves.items() if node.origin == LAB_FILE},
            beside={
                key: text
                for key, node in self.leaves.items()
                if node.origin != LAB_FILE and (text := _as_text(node))
            },
        )

    def split_server(self) -> tuple[dict[str, Any], Node]:
        """The providers' settings, and `server` without their sections."""
        node = self.nodes.get("server", Node({}, 0, LAB_FILE))
        if node.value is None:
            node = Node({}, node.line, node.origin)
        if not isinstance(node.value, dict):
            return {}, node
        own = keys_of(ServerFile)
        settings: dict[str, Any] = {}
        rest = {}
        for key, item in node.value.items():
            if (
                key in own
                or isinstance(item.value, str | list)
                or not self.read_settings(key, item, settings)
            ):
                rest[key] = item
        self.chosen_provider(node, settings, rest)
        return settings, Node(rest, node.line, node.origin)

    def read_settings(self, provider: str, node: Node, settings: dict[str, Any]) -> bool:
        """Read one provider's section into `settings`; False where there is no such provider."""
        if self.settings_type is None:
            settings[provider] = raw(node) or {}
            return True
        kind = self.known_type(provider)
        if kind is not None:
            settings[provider] = read(node, kind, f"server.{plain(provider)}", self.problems)
        return kind is not None

    def known_type(self, provider: str) -> type[msgspec.Struct] | None:
        try:
            parse_name(provider)
            return self.settings_type(provider) if self.settings_type else None
        except ValueError:
            return None
        except (UsageError, NotFoundError) as error:
            self.providers = error.why
            return None

    def chosen_provider(
        self, server: Node, settings: dict[str, Any], rest: dict[str, Node]
    ) -> None:
        """Where the provider in use has no section, its settings are its defaults."""
        default = Node(DEFAULT_PROVIDER, server.line, server.origin)
        chosen = rest.get("provider", default)
        name = default.value if chosen.value is None else chosen.value
        if not isinstance(name, str) or name in settings or self.settings_type is None:
            return
        if name in rest and name not in keys_of(ServerFile):
            return
        if not self.read_settings(name, Node({}, chosen.line, chosen.origin), settings):
            said = f"there is no provider called {shown(name)}"
            said = f"{said}; {self.providers}" if self.providers else said
            self.problems.append(problem(chosen, "server.provider", said))

    def name(self) -> str:
        """The lab's name: as written, or the directory's. What is wrong with it is told."""
        node = self.nodes.get("lab", Node(None))
        if node.value is not None:
            return node.value if isinstance(node.value, str) else ""
        name = self.path.parent.name
        try:
            return parse_name(name)
        except ValueError:
            said = f"the directory's name, {shown(name)}, cannot be the lab's; write"
            self.problems.append(Problem("lab", 0, f"{said} `lab: {cleaned_name(name)}`"))
            return ""

    def at(self, path: str) -> Node:
        """The leaf at a dotted path, or an empty one."""
        return self.leaves.get(path, Node(None, 0, LAB_FILE))

    def check_across(self, file: LabFile) -> None:
        """What no single value can tell: things named twice."""
        for key, names in (("secrets", file.secrets), ("outputs", file.outputs)):
            for name in {name for name in names if names.count(name) > 1}:
                self.problems.append(problem(self.at(key), key, f"{shown(name)} stands twice"))
        longest = file.server.max_ttl
        if longest and file.server.ttl and file.server.ttl > longest:
            said = f"is longer than max_ttl ({duration_text(longest)})"
            self.problems.append(problem(self.at("server.ttl"), "server.ttl", said))
        for name in sorted(set(file.secrets) & set(file.env)):
            said = "is also in secrets; a secret's value never stands in lab.yaml"
            self.problems.append(problem(self.at(f"env.{name}"), f"env.{name}", said))

    def services(self, file: LabFile) -> dict[str, ServiceConfig]:
        """The services, each with its port."""
        services: dict[str, ServiceConfig] = {}
        ports: dict[int, str] = {}
        mapping = self.nodes.get("services", Node(None)).value
        nodes = mapping if isinstance(mapping, dict) else {}
        for name, node in nodes.items():
            if name not in KNOWN_SERVICE_PORTS and not _has_port(node):
                known = " and ".join(KNOWN_SERVICE_PORTS)
                said = f"needs a port (only {known} are known): write `{{port: 8000}}`"
                self.problems.append(problem(node, f"services.{plain(name)}", said))
        for name, service in file.services.items():
            port = service.port or KNOWN_SERVICE_PORTS.get(name, 0)
            if port in ports:
                said = f"port {port} is already that of {ports[port]}"
                self.problems.append(problem(nodes[name], f"services.{name}", said))
            if port:
                ports.setdefault(port, name)
            services[name] = ServiceConfig(port=port, command=service.command)
        return services

    def image(self, file: LabFile) -> ImageConfig:
        """The image as configured; else the lab's own Dockerfile; else plain Python."""
        if isinstance(file.image, ImageFile):
            return ImageConfig(build=file.image.build, args=file.image.args)
        if file.image:
            return ImageConfig(reference=file.image)
        if (self.path.parent / "Dockerfile").is_file():
            return ImageConfig(build=".")
        return ImageConfig(reference=DEFAULT_IMAGE)

    def source(self, text: str) -> DataSource:
        if "://" in text:
            return DataSource(written=text, url=text)
        if text.startswith(("/", "~")):
            return DataSource(written=text, path=expanded(text, self.home))
        return DataSource(written=text, path=self.path.parent / text, inside_lab=True)


def _has_port(service: Node) -> bool:
    """Whether something stands as the service's port, or it is no mapping that could have one."""
    entries = {} if service.value is None else service.value
    return not isinstance(entries, dict) or entries.get("port", Node(None)).value is not None


def _need(server: ServerFile) -> Need:
    gpu = server.gpu
    if server.gpu_memory and gpu.kind != "none":
        least = max(server.gpu_memory, gpu.min_memory_bytes)
        gpu = msgspec.structs.replace(gpu, min_memory_bytes=least)
    return Need(
        gpu=gpu,
        arch=server.arch,
        work=server.work,
        spot=server.spot,
        max_price_usd_per_hour=server.max_price,
        budget_usd=server.budget,
        ttl_s=server.ttl,
        max_ttl_s=server.max_ttl,
        idle_s=server.idle,
    )
