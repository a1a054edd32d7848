"""The parts of pyproject.toml, and of pipenv's Pipfile, that say what a project needs."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from labctl.decoding import convert_value
from labctl.lazy import lazy_imports
from labctl.model import Value

with lazy_imports(__name__):
    import tomllib

T = TypeVar("T")


class Dependency(Value, frozen=True):
    """What poetry and pipenv write about a package if a version is not enough."""

    version: str = "*"
    extras: tuple[str, ...] = ()
    git: str = ""
    ref: str = ""
    rev: str = ""
    tag: str = ""
    branch: str = ""
    path: str = ""


# A list has alternatives for several platforms, or versions of Python.
Dependencies = dict[str, str | Dependency | list[Dependency]]


class ProjectTable(Value, frozen=True):
    dependencies: tuple[str, ...] = ()
    optional: dict[str, tuple[str, ...]] = msgspec.field(
        default_factory=dict, name="optional-dependencies"
    )
    dynamic: tuple[str, ...] = ()
    python: str = msgspec.field(default="", name="requires-python")
    scripts: dict[str, str] = msgspec.field(default_factory=dict)


class PoetryTable(Value, frozen=True):
    dependencies: Dependencies = msgspec.field(default_factory=dict)
    is_package: bool = msgspec.field(default=True, name="package-mode")
    scripts: dict[str, object] = msgspec.field(default_factory=dict)


class ToolTable(Value, frozen=True):
    poetry: PoetryTable = PoetryTable()


class Pyproject(Value, frozen=True):
    """A pyproject.toml; `project` is None without a [project] table."""

    project: ProjectTable | None = None
    build_system: dict[str, object] | None = msgspec.field(default=None, name="build-system")
    tool: ToolTable = ToolTable()

    @property
    def is_package(self) -> bool:
        """Whether the project itself is installed, and not only what it needs, as with uv."""
        is_dynamic = self.project is not None and "dependencies" in self.project.dynamic
        return (self.build_system is not None or is_dynamic) and self.tool.poetry.is_package


class PipfileRequirements(Value, frozen=True):
    python_version: str = ""


class Pipfile(Value, frozen=True):
    packages: Dependencies = msgspec.field(default_factory=dict)
    requires: PipfileRequirements = PipfileRequirements()


def parse_pyproject(text: str) -> Pyproject:
    """Parse a pyproject.toml; ValueError if it is not valid."""
    return _parse(text, Pyproject)


def parse_pipfile(text: str) -> Pipfile:
    """Parse a Pipfile; ValueError if it is not valid."""
    return _parse(text, Pipfile)


def _parse(text: str, kind: type[T]) -> T:
    try:
        return convert_value(tomllib.loads(text), kind)
    except RecursionError:
        raise ValueError("its lists or tables are nested too deeply") from None
