#!/usr/bin/env python3
"""Hold the imports below labctl/ to the layers of the planned rooms; fail where more break them.

usage: check_rooms.py

rooms.toml says which room and file each module will get. Imports inside functions count; imports
under TYPE_CHECKING do not.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "scripts" / "rooms.toml"


@dataclass(frozen=True, order=True)
class Import:
    """One import of a module of labctl, at `line` of the module that imports it."""

    importer: str
    line: int
    imported: str


@dataclass(frozen=True)
class Rooms:
    """What may import what. `depths` counts layers from the top."""

    depths: Mapping[str, int]
    # These may import the other rooms of their layer.
    friendly: frozenset[str]
    # Rooms outside the layers, with the rooms that they may import. Nothing imports them.
    apart: Mapping[str, list[str]]
    # The room of the package itself, which offers everything by name.
    public: str

    @classmethod
    def parse(cls, rules: Mapping[str, Any]) -> Rooms:
        depths: dict[str, int] = {}
        friendly: set[str] = set()
        for depth, layer in enumerate(rules["layers"]):
            names = layer.replace("|", " ").replace(":", " ").split()
            depths.update(dict.fromkeys(names, depth))
            friendly.update(names if ":" in layer else ())
        return cls(depths, frozenset(friendly), rules["apart"], rules["public"])

    def is_known(self, room: str) -> bool:
        return room in self.depths or room in self.apart or room == self.public

    def is_allowed(self, importer: str, imported: str) -> bool:
        if importer == imported or self.public in (importer, imported):
            return True
        if importer in self.apart or imported in self.apart:
            return imported in self.apart.get(importer, ())
        if self.depths[importer] == self.depths[imported]:
            return importer in self.friendly
        return self.depths[importer] < self.depths[imported]


def list_modules(root: Path) -> dict[str, Path]:
    """The path of every module below labctl/, by its name."""
    modules = {}
    for path in sorted((root / "labctl").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if path.stem == "__init__" else parts)] = path
    return modules


def plan_path(module: str, path: Path, rooms: Mapping[str, str]) -> str:
    """The future path of a module below labctl/; "" if no pattern fits."""
    patterns = [pattern for pattern in rooms if fnmatchcase(module, pattern)]
    if not patterns:
        return ""
    pattern = max(patterns, key=lambda pattern: (pattern == module, len(pattern)))
    if not rooms[pattern].endswith("/"):
        return rooms[pattern]
    below = module.removeprefix(pattern.rpartition(".")[0] + ".").replace(".", "/")
    return rooms[pattern] + below + ("/__init__.py" if path.stem == "__init__" else ".py")


def find_imports(module: str, path: Path, modules: Mapping[str, Path]) -> Iterator[Import]:
    package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
    waiting: list[ast.AST] = [ast.parse(path.read_bytes())]
    while waiting:
        match node := waiting.pop():
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                waiting += node.orelse
            case ast.Import() | ast.ImportFrom():
                for name in list_names(node, package, modules):
                    if name in modules:
                        yield Import(module, node.lineno, name)
            case ast.stmt() | ast.excepthandler() | ast.match_case() | ast.Module():
                waiting += ast.iter_child_nodes(node)


def list_names(
    node: ast.Import | ast.ImportFrom, package: list[str], modules: Mapping[str, Path]
) -> list[str]:
    """The modules that one statement imports; `package` is where a relative import starts."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = package[: len(package) - node.level + 1] if node.level else []
    start = ".".join([*base, *filter(None, [node.module])])
    inside = [f"{start}.{alias.name}" for alias in node.names]
    return [name if name in modules else start for name in inside]


def main() -> int:
    rules = tomllib.loads(RULES.read_text())
    rooms, modules = Rooms.parse(rules), list_modules(ROOT)
    planned = {name: plan_path(name, path, rules["rooms"]) for name, path in modules.items()}
    room_of = {
        name: path.partition("/")[0].removesuffix(".py") for name, path in planned.items() if path
    }
    problems = [f"{name}: has no room" for name, path in planned.items() if not path]
    unknown = {name: room for name, room in room_of.items() if not rooms.is_known(room)}
    problems += [f"{name}: {room} is in no layer" for name, room in unknown.items()]
    shared = [path for path, count in Counter(planned.values()).items() if path and count > 1]
    problems += [f"{path}: planned for several modules" for path in shared]
    if problems:
        print("scripts/rooms.toml must give each module a file of its own:", *problems, sep="\n  ")
        return 1
    forbidden = {
        (one.importer, one.imported): one
        for name, path in modules.items()
        for one in sorted(find_imports(name, path, modules), reverse=True)
        if not rooms.is_allowed(room_of[one.importer], room_of[one.imported])
    }
    for one in sorted(forbidden.values()):
        edge = f"{room_of[one.importer]} -> {room_of[one.imported]}"
        print(f"{modules[one.importer].relative_to(ROOT)}:{one.line}: {one.imported} ({edge})")
    if len(forbidden) > rules["limit"]:
        print(f"{len(forbidden)} imports break the layers of the rooms, at most {rules['limit']}")
        return 1
    if len(forbidden) < rules["limit"]:
        print(f"{len(forbidden)} imports break the layers; lower the limit in scripts/rooms.toml")
    return 0


if __name__ == "__main__":
    sys.exit(main())
