"""Loading a lab: flags over LABCTL_* over lab.yaml over the user's config.yaml over defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from labctl.config.document import Node, parse, plain, read_bytes, shown
from labctl.config.places import expanded
from labctl.config.places import paths as standard_paths
from labctl.config.reader import (
    LAB_FILE,
    keys_of,
    problem,
    raw,
    read,
    unknown_key,
)
from labctl.config.scalars import cleaned_name, parse_name
from labctl.config.schema import (
    DEFAULT_IMAGE,
    DEFAULT_PROVIDER,
    KNOWN_SERVICE_PORTS,
    MACHINE_KEYS,
    USER_KEYS,
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

SettingsType = Callable[[str], type[msgspec.Struct] | None]

SWITCHES = {
    "name": "lab",
    "provider": "server.provider",
    "gpu": "server.gpu",
    "spot": "server.spot",
    "max_price": "server.max_price",
    "budget": "server.budget",
    "ttl": "server.ttl",
    "idle": "server.idle",
    "image": "image",
    "store": "store",
    "memory": "limits.memory",
    "cpus": "limits.cpus",
    "shm": "limits.shm",
    "base_image": "base_image",
    "wheelhouse": "wheelhouse",
    "package_index": "package_index",
}
"""Short name -> dotted key. `--short-name` and LABCTL_SHORT_NAME set it for one call."""

_NOT_FROM_ENVIRONMENT = frozenset({"name"})


def load_lab(
    path_or_dir: Path,
    *,
    overrides: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    settings_type: SettingsType | None = None,
) -> LabConfig:
    """The lab at a directory or lab.yaml, with nothing checked beyond what the files say.

    `overrides` are flags, by short name or dotted key. `settings_type` gives a provider's settings
    type, or None (or raises UsageError, NotFoundError) where there is no such provider; without it
    the providers' sections stay plain and unchecked, which loads no provider.
    Raises ConfigError with every problem of lab.yaml, config.yaml and the switches.
    """
    path = _lab_file(path_or_dir)
    places = standard_paths(environ)
    given = os.environ if environ is None else environ
    problems: list[Problem] = []
    hint = _missing_hint(path)
    data = read_bytes(path, LAB_FILE, hint=hint)
    if not data.strip(b"\xef\xbb\xbf \t\r\n"):
        raise ConfigError(
            f"{plain(str(path))} is empty",
            why="it needs at least one line, such as `lab: digits`",
            hint="labctl init",
        )
    known = [key for key in keys_of(LabFile) if key not in MACHINE_KEYS]
    lab_layer = _file_layer(data, LAB_FILE, known, problems)
    if problems and not lab_layer.value:
        # Nothing of it can be read: what would follow from its absence is no news.
        raise _config_error(path, problems)
    layers = [
        _user_layer(places.config_file, places.home, problems),
        lab_layer,
        *_switch_layers(overrides or {}, given),
    ]
    merged = Node({}, 0, LAB_FILE)
    for layer in layers:
        merged = _merged(merged, layer)
    from hashlib import sha256

    config = _Loading(path, places.home, merged, settings_type, problems).config(
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
        hint="docs/lab.yaml shows every key; mend these lines and try again",
    )


def _lab_file(path_or_dir: Path) -> Path:
    path = path_or_dir.absolute()
    return path / LAB_FILE if path.is_dir() else path


def _missing_hint(path: Path) -> str:
    """`labctl init`, unless a directory above is a lab."""
    for parent in path.parents[1:]:
        if (parent / LAB_FILE).is_file():
            return f"labctl -C {plain(str(parent))} ..."
    return "labctl init"


def _file_layer(
    data: bytes, origin: str, known: tuple[str, ...] | list[str], problems: list[Problem]
) -> Node:
    """The top mapping of a file, with the keys that it may have; the rest are problems."""
    node = parse(data, origin, problems)
    empty = Node({}, 0, origin)
    if node is None or node.value is None:
        return empty
    if not isinstance(node.value, dict):
        problems.append(problem(node, "", "the file must be a mapping: lines of `key: value`"))
        return empty
    kept = {}
    for key, item in node.value.items():
        if key in known:
            kept[key] = item
        elif key in MACHINE_KEYS:
            said = f"is of this machine: set LABCTL_{key.upper()} or write it in config.yaml"
            problems.append(problem(item, key, said))
        else:
            problems.append(unknown_key(item, plain(key), known, SWITCHES.get(key, "")))
    return Node(kept, node.line, origin)


def _user_layer(file: Path, home: Path, problems: list[Problem]) -> Node:
    if not file.exists():
        return Node({})
    shortened = str(file)
    if file.is_relative_to(home):
        shortened = f"~/{file.relative_to(home)}"
    data = read_bytes(file, file.name, hint="")
    return _file_layer(data, shortened, USER_KEYS, problems)


def _switch_layers(overrides: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[Node]:
    for short, dotted in SWITCHES.items():
        variable = f"LABCTL_{short.upper()}"
        if environ.get(variable) and short not in _NOT_FROM_ENVIRONMENT:
            yield _nested(dotted, environ[variable], variable)
    for key, text in overrides.items():
        flag = f"--{key.replace('_', '-')}" if key in SWITCHES else key
        yield _nested(SWITCHES.get(key, key), text, flag)


def _nested(dotted: str, text: str, origin: str) -> Node:
    node = Node(text, 0, origin)
    for key in reversed(dotted.split(".")):
        node = Node({key: node}, 0, origin)
    return node


def _merged(below: Node, above: Node) -> Node:
    """`above` over `below`: mappings key by key, everything else whole; nothing hides nothing."""
    if above.value is None:
        return below
    if not isinstance(below.value, dict) or not isinstance(above.value, dict):
        return above
    keys = {**below.value, **above.value}
    both = {
        key: _merged(below.value[key], above.value[key])
        if key in below.value and key in above.value
        else keys[key]
        for key in keys
    }
    place = above if above.line else below
    return Node(both, place.line, place.origin)


def _leaves(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    if isinstance(node.value, dict) and node.value:
        for key, item in node.value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif node.value is not None:
        yield path, node


class _Loading:
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
        self.leaves = dict(_leaves(top))
        self.settings_type = settings_type
        self.problems = problems

    def config(self, file_hash: str) -> LabConfig | None:
        """The lab, or None when there are problems."""
        settings, server_node = self.split_server()
        top = Node({**self.nodes, "server": server_node}, 0, LAB_FILE)
        file: LabFile | None = read(top, LabFile, "", self.problems)
        name = self.name()
        if file is None:
            return None
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
            limits=file.limits,
            base_image=file.base_image,
            wheelhouse=str(expanded(file.wheelhouse, self.home)) if file.wheelhouse else "",
            package_index=file.package_index,
            origins={key: node.place for key, node in self.leaves.items()},
            lines={key: node.line for key, node in self.leaves.items() if node.origin == LAB_FILE},
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
        except (UsageError, NotFoundError, ValueError):
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
            self.problems.append(
                problem(chosen, "server.provider", f"there is no provider called {shown(name)}")
            )

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
        for name in sorted(set(file.secrets) & set(file.env)):
            said = "is also in secrets; a secret's value never stands in lab.yaml"
            self.problems.append(problem(self.at(f"env.{name}"), f"env.{name}", said))

    def services(self, file: LabFile) -> dict[str, ServiceConfig]:
        """The services, each with its port."""
        services: dict[str, ServiceConfig] = {}
        ports: dict[int, str] = {}
        mapping = self.nodes.get("services", Node(None)).value
        for name, service in file.services.items():
            node = mapping[name] if isinstance(mapping, dict) else Node(None)
            port = service.port or KNOWN_SERVICE_PORTS.get(name, 0)
            path = f"services.{name}"
            if not port:
                known = " and ".join(KNOWN_SERVICE_PORTS)
                said = f"needs a port (only {known} are known): write `{name}: {{port: 8000}}`"
                self.problems.append(problem(node, path, said))
            elif port in ports:
                said = f"port {port} is already that of {ports[port]}"
                self.problems.append(problem(node, path, said))
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


def _need(server: ServerFile) -> Need:
    return Need(
        gpu=server.gpu,
        spot=server.spot,
        max_price_usd_per_hour=server.max_price,
        budget_usd=server.budget,
        ttl_s=server.ttl,
        idle_s=server.idle,
    )
