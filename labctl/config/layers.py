"""The layers of configuration, each a tree of nodes: config.yaml, lab.yaml, LABCTL_* and flags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from labctl.config.directories import Paths
from labctl.config.document import Node, escape, read_bytes
from labctl.config.parsed_files import parse_or_recall
from labctl.config.reader import make_problem, make_unknown_key_problem
from labctl.config.schema import MACHINE_KEYS, USER_KEYS
from labctl.errors import Problem

# Short name -> dotted key. `--short-name` and LABCTL_SHORT_NAME set it for one call.
SWITCHES = {
    "name": "lab",
    "provider": "server.provider",
    "executor": "server.executor",
    "gpu": "server.gpu",
    "type": "server.type",
    "gpu_memory": "server.gpu_memory",
    "arch": "server.arch",
    "work": "server.work",
    "spot": "server.spot",
    "max_price": "server.max_price",
    "budget": "server.budget",
    "ttl": "server.ttl",
    "max_ttl": "server.max_ttl",
    "idle": "server.idle",
    "image": "image",
    "store": "store",
    "mirror": "mirror",
    "memory": "limits.memory",
    "cpus": "limits.cpus",
    "shm": "limits.shm",
    "base_image": "base_image",
    "wheelhouse": "wheelhouse",
    "package_index": "package_index",
    "image_cache": "image_cache",
    "cache_pool": "cache_pool",
}

# LABCTL_SERVER_AWS_PROFILE sets server.aws.profile.
PROVIDER_VARIABLE = r"LABCTL_SERVER_([A-Z0-9]+)_([A-Z0-9_]+)"

# Short names whose flag has another name.
_FLAGS = {"gpu_memory": "min_gpu_memory"}
_NOT_FROM_ENVIRONMENT = frozenset({"name"})


def read_file_layer(
    data: bytes,
    origin: str,
    known: tuple[str, ...] | list[str],
    problems: list[Problem],
    cache_dir: Path,
) -> Node:
    """Parse a file's top mapping, keep the keys that it may have, and report the others."""
    node = parse_or_recall(data, origin, problems, cache_dir)
    empty = Node({}, 0, origin)
    if node is None or node.value is None:
        return empty
    if not isinstance(node.value, dict):
        problems.append(make_problem(node, "", "the file must be a mapping: lines of `key: value`"))
        return empty
    entries = {}
    for key, item in node.value.items():
        if key in known:
            entries[key] = item
        elif key in MACHINE_KEYS:
            message = f"is a machine setting: set LABCTL_{key.upper()} or write it in config.yaml"
            problems.append(make_problem(item, key, message))
        else:
            problems.append(
                make_unknown_key_problem(item, escape(key), known, SWITCHES.get(key, ""))
            )
    return Node(entries, node.line, origin)


def read_user_layer(paths: Paths, problems: list[Problem]) -> Node:
    file = paths.config_file
    if not file.exists():
        return Node({})
    shortened = str(file)
    if file.is_relative_to(paths.home):
        shortened = f"~/{file.relative_to(paths.home)}"
    data = read_bytes(file, file.name, hint="")
    return read_file_layer(data, shortened, USER_KEYS, problems, paths.cache_dir)


def build_switch_layers(overrides: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[Node]:
    """Yield a layer for each variable and flag that is set, the strongest last."""
    for short, dotted in SWITCHES.items():
        variable = f"LABCTL_{short.upper()}"
        if environ.get(variable) and short not in _NOT_FROM_ENVIRONMENT:
            yield _nest(dotted, environ[variable], variable)
    for variable, text in sorted(environ.items()):
        if text and (match := re.fullmatch(PROVIDER_VARIABLE, variable)):
            provider, key = (part.lower() for part in match.groups())
            yield _nest(f"server.{provider}.{key}", text, variable)
    for key, text in overrides.items():
        flag = f"--{_FLAGS.get(key, key).replace('_', '-')}" if key in SWITCHES else key
        yield _nest(SWITCHES.get(key, key), text, flag)


def _nest(dotted: str, text: str, origin: str) -> Node:
    """Return the nested mappings of a dotted key with this text as the innermost value."""
    node = Node(text, 0, origin)
    for key in reversed(dotted.split(".")):
        node = Node({key: node}, 0, origin)
    return node


def merge(below: Node, above: Node) -> Node:
    """Merge `above` over `below`: mappings key by key; any other value of `above` replaces.

    An empty value of `above` replaces nothing.
    """
    if above.value is None:
        return below
    if not isinstance(below.value, dict) or not isinstance(above.value, dict):
        return above
    keys = {**below.value, **above.value}
    entries = {
        key: merge(below.value[key], above.value[key])
        if key in below.value and key in above.value
        else keys[key]
        for key in keys
    }
    source = above if above.line else below
    return Node(entries, source.line, source.origin)


def iterate_leaves(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield (dotted path, node) of every value that is not a mapping."""
    if isinstance(node.value, dict):
        for key, item in node.value.items():
            yield from iterate_leaves(item, f"{path}.{key}" if path else key)
    elif node.value is not None:
        yield path, node
