"""What a directory with code says about the lab that it could be. Reads files, runs nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from labctl.config.pyproject import ProjectTable
from labctl.lifecycle.dockerfile_command import read_dockerfile_command
from labctl.lifecycle.project_imports import (
    ModuleFacts,
    list_packages,
    read_module,
    read_source,
)
from labctl.lifecycle.project_lists import (
    NOT_FOR_RUNS,
    ListChoice,
    choose_list,
    convert_version,
    read_pipfile,
    read_pyproject,
)
from labctl.model import Value
from labctl.sync.ignore import (
    ENVIRONMENT_MARKS,
    IgnoredName,
    find_ignored_name,
    inclusion_text,
    rule_text,
)

# more files than this are not read: a home directory is not a project
MAX_FILES = 400
SCRIPTS = ("train.py", "main.py", "run.py", "src/train.py", "scripts/train.py", "src/main.py")
SHELL_SCRIPT = re.compile(r"(scripts/)?(run_?)?train[^/]*\.sh|run\.sh")
# Files such as config/train_gpt2.py set values for another program.
CONFIG_DIRECTORIES = {"conf", "config", "configs"}
DATA_NAMES = ("data", "dataset", "datasets")
# so many names in a directory of data are compared with the ignore rules
MOST_DATA_NAMES = 200
SKIPPED = {
    ".git",
    ".labctl",
    ".venv",
    "venv",
    "env",
    "node_modules",
    "__pycache__",
    "runs",
    "tests",
}
PYTHONS = ("3.12", "3.11", "3.13", "3.10", "3.9")
GPU_IMPORTS = {"torch", "tensorflow", "jax"}


class ProgramGuess(Value, frozen=True):
    """The command that probably trains, and why; () if none was found.

    `path` lists the directories of the project from which Python must import modules.
    """

    command: tuple[str, ...] = ()
    reason: str = ""
    others: tuple[str, ...] = ()
    path: tuple[str, ...] = ()


class ProjectFacts(Value, frozen=True):
    """What was found. Paths are relative to the directory; "" or empty if nothing was found.

    `needs_rank` and `can_be_distributed` are of the program and of what it imports (ModuleFacts).
    `python` is a version that the project allows, and the only one if `is_python_exact`.
    `data_rule` is the ignore rule that leaves out the first directory of `data`, and
    `data_inclusion` the line that sends it ("!/data/ to .labignore"). `is_data_partial`: the rule
    leaves out only files in that directory.
    """

    has_dockerfile: bool = False
    packages: ListChoice = ListChoice()
    python: str = ""
    python_source: str = ""
    is_python_exact: bool = False
    program: ProgramGuess = ProgramGuess()
    imports: frozenset[str] = frozenset()
    needs_rank: bool = False
    can_be_distributed: bool = False
    data: tuple[str, ...] = ()
    data_rule: str = ""
    data_inclusion: str = ""
    is_data_partial: bool = False
    sources: int = 0
    has_notebooks: bool = False

    @property
    def has_code(self) -> bool:
        return bool(
            self.has_dockerfile
            or self.packages.file
            or self.packages.text
            or self.sources
            or self.has_notebooks
            or self.program.command
        )


def scan_project(root: Path) -> ProjectFacts:
    """Look at the files of a directory."""
    names = sorted(_list_files(root))
    files = [name for name in names if name.endswith((".py", ".ipynb"))]
    modules = {name: read_module(root / name) for name in files}
    every = frozenset(module for each in modules.values() for module in each.names)
    python, python_source, is_python_exact = _find_python(root)
    packages = choose_list(root, list_packages(every, names))
    data = tuple(name for name in DATA_NAMES if (root / name).is_dir())
    ignored = _find_ignored_data(root, data[0]) if data else None
    program = _find_program(root, names, modules, packages)
    used = [modules[name] for name in _list_used(program.command, modules)]
    return ProjectFacts(
        has_dockerfile=(root / "Dockerfile").is_file(),
        packages=packages,
        python=python,
        python_source=python_source,
        is_python_exact=is_python_exact,
        program=program,
        imports=frozenset(name.partition(".")[0] for name in every),
        needs_rank=any(each.needs_rank for each in used),
        can_be_distributed=any(each.can_be_distributed for each in used),
        data=data,
        data_rule=rule_text(ignored.rule) if ignored else "",
        data_inclusion=inclusion_text(ignored.rule, _name_all(ignored, data)) if ignored else "",
        is_data_partial=bool(ignored and ignored.name not in data),
        sources=sum(name.endswith(".py") for name in files),
        has_notebooks=any(name.endswith(".ipynb") for name in names),
    )


def _list_used(command: tuple[str, ...], modules: dict[str, ModuleFacts]) -> set[str]:
    """Return the files that a command runs, and those of the project that they import."""
    waiting = {name for word in command for name in modules if _names_file(word, name)}
    used: set[str] = set()
    while waiting:
        used |= waiting
        imported = {each for name in waiting for each in modules[name].names}
        waiting = {name for name in modules if _is_imported(name, imported)} - used
    return used


def _is_imported(name: str, imported: set[str]) -> bool:
    """Whether a file is a module that full names import, from its own directory or a higher one."""
    parts = PurePosixPath(name).with_suffix("").parts
    paths = [".".join(parts[start:]) for start in range(len(parts))]
    return any(f"{each}.".startswith(f"{path}.") for path in paths for each in imported)


def _names_file(word: str, name: str) -> bool:
    """Whether a word of a command is a file, or its module as `python -m` takes it."""
    module = name.removesuffix(".py").replace("/", ".")
    return word == name or f".{module}".endswith(f".{word}")


def _find_ignored_data(root: Path, name: str) -> IgnoredName | None:
    """Return what leaves out a directory, or else a file or directory in it."""
    _, folders, files = next(os.walk(root / name), ("", [], []))
    inside = [f"{name}/{part}" for part in sorted([*folders, *files])[:MOST_DATA_NAMES]]
    for candidate in (name, *inside):
        if ignored := find_ignored_name(root, candidate):
            return ignored
    return None


def _name_all(ignored: IgnoredName, data: tuple[str, ...]) -> str:
    """Return the path for `inclusion_text` of everything in the first directory of `data`."""
    return f"{ignored.name}/" if ignored.name in data else f"{data[0]}/**"


def _list_files(root: Path) -> Iterator[str]:
    """Yield the names of code files, the nearest to the top first."""
    count = 0
    for directory, folders, files in os.walk(root):
        depth = len(Path(directory).relative_to(root).parts)
        if depth and ENVIRONMENT_MARKS & {*files, *folders}:
            folders.clear()
            continue
        hidden = {name for name in folders if name.startswith(".")}
        skipped = SKIPPED | hidden | (set(DATA_NAMES) if depth == 0 else set())
        folders[:] = sorted(set(folders) - skipped) if depth < 3 else []
        for name in sorted(files):
            if name.endswith((".py", ".ipynb", ".sh")):
                yield str((Path(directory) / name).relative_to(root))
                count += 1
                if count == MAX_FILES:
                    return


def _find_program(
    root: Path, names: list[str], modules: dict[str, ModuleFacts], packages: ListChoice
) -> ProgramGuess:
    """Return the likeliest program: an entry point of the project, a script, or a shell script."""
    entries = _list_entry_points(root) if packages.installs_project else []
    scripts = _rank_scripts(root, modules)
    shell = [name for name in names if SHELL_SCRIPT.fullmatch(name)]
    if command := read_dockerfile_command(root):
        rest = tuple(name for name in scripts if name not in command)
        return ProgramGuess(
            command=command, reason="The Dockerfile's CMD", others=(*rest[:3], *shell[:1])
        )
    if entries and scripts[:1] != ["train.py"]:
        reason = "The project installs this program"
        return ProgramGuess(
            command=(entries[0],), reason=reason, others=(*entries[1:3], *scripts[:3])
        )
    if not scripts:
        others = tuple(shell[1:4])
        command = ("bash", shell[0]) if shell else ()
        return ProgramGuess(command=command, reason="The likeliest program", others=others)
    program = _choose_command(root, scripts[0], modules[scripts[0]])
    return ProgramGuess(
        command=program.command,
        reason="The likeliest program",
        others=(*scripts[1:4], *shell[:1]),
        path=() if packages.installs_project else program.path,
    )


def _list_entry_points(root: Path) -> list[str]:
    """Return the programs that the project installs for training."""
    pyproject = read_pyproject(root)
    project = pyproject.project or ProjectTable()
    programs = [*project.scripts, *pyproject.tool.poetry.scripts]
    return [name for name in programs if "train" in name] or programs[:1]


def _rank_scripts(root: Path, modules: dict[str, ModuleFacts]) -> list[str]:
    """Return the files that could be the program, the likeliest first."""
    sources = [name for name in sorted(modules) if name.endswith(".py")]
    known = [name for name in SCRIPTS if name in sources]
    trains = [
        name
        for name in sources
        if name not in known
        and Path(name).name.startswith("train")
        and not modules[name].is_library
        and not CONFIG_DIRECTORIES & {*PurePosixPath(name).parent.parts}
    ]
    mains = [
        name
        for name in sources
        if name not in known
        and name not in trains
        and not NOT_FOR_RUNS.search(name)
        and "__main__" in read_source(root / name)
    ]
    mains.sort(key=lambda name: Path(name).name not in SCRIPTS)
    ranked = known + sorted(trains, key=lambda name: name.count("/")) + mains
    return ranked or (sources if len(sources) == 1 and sources != ["setup.py"] else [])


def _choose_command(root: Path, script: str, imports: ModuleFacts) -> ProgramGuess:
    """Return the command that runs a script, with the directories that PYTHONPATH needs.

    A module that imports from its own package only works as `python -m`.
    """
    base = PurePosixPath(script).parent
    while base.name and (root / base / "__init__.py").is_file():
        base = base.parent
    module = ".".join(PurePosixPath(script).relative_to(base).with_suffix("").parts)
    if "." in module and (imports.is_relative or module.partition(".")[0] in imports.tops):
        places = [str(base)] if base.name else []
        return ProgramGuess(command=("python", "-m", module), path=tuple(places))
    own = str(PurePosixPath(script).parent)  # Python imports from there by itself
    missing = [top for top in imports.tops if not _has_module(root / own, top)]
    places = [place for place in (".", "src") if place != own]
    path = tuple(p for p in places if any(_has_module(root / p, top) for top in missing))
    return ProgramGuess(command=("python", script), path=path)


def _has_module(directory: Path, name: str) -> bool:
    return (directory / f"{name}.py").is_file() or any((directory / name).glob("*.py"))


def _find_python(root: Path) -> tuple[str, str, bool]:
    """Return a version of Python that the project allows, where it does, and whether no other is.

    The texts are "" if it says nothing.
    """
    match = re.match(r"\s*(3\.\d{1,2})", read_source(root / ".python-version"))
    if match:
        return match[1], ".python-version", True
    for wanted in _list_python_conditions(root):
        for version in PYTHONS:
            if _is_allowed(version, wanted):
                return version, f"requires-python {wanted}", "==" in wanted
    return "", "", False


def _list_python_conditions(root: Path) -> Iterator[str]:
    """Yield the versions of Python that the project allows, such as `>=3.9,<3.13`."""
    pyproject = read_pyproject(root)
    if pyproject.project and pyproject.project.python:
        yield pyproject.project.python
    if isinstance(wanted := pyproject.tool.poetry.dependencies.get("python"), str):
        yield convert_version(wanted)
    if wanted := read_pipfile(root).requires.python_version:
        yield f"=={wanted}"
    for name in ("setup.py", "setup.cfg"):
        match = re.search(r"python_requires\s*=\s*[\"']?([^\"'\n]+)", read_source(root / name))
        if match:
            yield match[1].strip()


def _is_allowed(version: str, wanted: str) -> bool:
    """Whether a version such as 3.12 satisfies `>=3.9,<3.13`; unknown conditions allow all."""
    minor = int(version.partition(".")[2])
    for sign, number in re.findall(r"(>=|<=|==|~=|<|>|!=)\s*3\.(\d{1,2})", wanted):
        limit = int(number)
        if not {
            ">=": minor >= limit,
            "~=": minor >= limit,
            ">": minor > limit,
            "<=": minor <= limit,
            "<": minor < limit,
            "==": minor == limit,
            "!=": minor != limit,
        }[sign]:
            return False
    return True
