"""Which of a project's lists of packages an image can be built from, or what to write instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from labctl.config.packages import read_packages
from labctl.config.pyproject import (
    Dependencies,
    Dependency,
    Pipfile,
    ProjectTable,
    Pyproject,
    parse_pipfile,
    parse_pyproject,
)
from labctl.config.schema import EXTRA_NAME, PROJECT_FILES
from labctl.lifecycle.comments import wrap_comment
from labctl.lifecycle.project_imports import read_source
from labctl.model import Value

# in the order of preference; other names of lists follow
USUAL = ("environment.yml", "environment.yaml", "requirements.txt", *PROJECT_FILES)
OTHERS = ("*requirements*.txt", "requirements/*.txt", "*env*.yml", "*env*.yaml", "conda*.yml")
# Lists and extras that a training does not need, by parts of their names.
NOT_FOR_RUNS = re.compile(r"dev|test|doc|lint|style|build|labctl")
CONDA = (".yml", ".yaml")
_NAME = re.compile(r"[A-Za-z0-9._-]+")
# characters; a longer version is no version, and Python converts no number of that length
_MOST_VERSION = 200


class ListChoice(Value, frozen=True):
    """The file that an image is built from ("" for none), and why not from others (file, reason).

    `text` is the content of a new list where no file works, and `source` is what it is made of.
    `extras` are those of a project whose packages the code imports; `other_extras` the rest.
    `installs_project` is whether the image has the project too, and not only its packages.
    """

    file: str = ""
    rejected: tuple[tuple[str, str], ...] = ()
    text: str = ""
    source: str = ""
    extras: tuple[str, ...] = ()
    other_extras: tuple[str, ...] = ()
    installs_project: bool = False


def choose_list(root: Path, packages: Sequence[str]) -> ListChoice:
    """Choose the list to build from, or write one; `packages` are those that the code imports."""
    rejected: list[tuple[str, str]] = []
    text = source = ""
    for name in dict.fromkeys(_list_candidates(root)):
        problems = read_packages(root, name).problems
        if not problems:
            extras, others = _choose_extras(root / name, packages)
            return ListChoice(
                file=name,
                rejected=tuple(rejected),
                extras=extras,
                other_extras=others,
                installs_project=_installs_project(root, name),
            )
        rejected.append((name, problems[0].message))
        if name.endswith(".txt") and not text and "/" not in name and problems[0].line:
            text, source = read_source(root / name), name  # its wrong lines become comments
    for name, table in (
        ("Pipfile", read_pipfile(root).packages),
        ("pyproject.toml", read_pyproject(root).tool.poetry.dependencies),
    ):
        if not text and table:
            text, source = "".join(f"{line}\n" for line in convert_table(table)), name
    if not text and packages:
        installed = ["-e ."] if read_pyproject(root).is_package else []
        text, source = "".join(f"{line}\n" for line in [*installed, *packages]), "the imports"
    return ListChoice(
        rejected=tuple(rejected),
        text=text,
        source=source,
        installs_project="-e ." in text.splitlines(),
    )


def _installs_project(root: Path, name: str) -> bool:
    """Return whether an image of this list has the project, as `read_packages` decides."""
    if name == "pyproject.toml":
        return read_pyproject(root).is_package
    return name in PROJECT_FILES


def read_pyproject(root: Path) -> Pyproject:
    """Read a project's pyproject.toml. Without a valid one, its tables are empty."""
    try:
        return parse_pyproject(read_source(root / "pyproject.toml"))
    except ValueError:
        return Pyproject()


def read_pipfile(root: Path) -> Pipfile:
    try:
        return parse_pipfile(read_source(root / "Pipfile"))
    except ValueError:
        return Pipfile()


def _list_candidates(root: Path) -> Iterator[str]:
    for name in USUAL:
        if (root / name).is_file() and _has_packages(root / name):
            yield name
    found = [path for pattern in OTHERS for path in root.glob(pattern) if path.is_file()]
    for path in sorted(found):
        name = str(path.relative_to(root))
        is_nameable = re.fullmatch(r"[A-Za-z0-9._/+-]+", name)  # as lab.yaml wants it
        if is_nameable and not NOT_FOR_RUNS.search(name) and _has_packages(path):
            yield name


def _has_packages(file: Path) -> bool:
    """Whether a file says anything of packages: many a pyproject.toml only configures tools."""
    if file.name == "pyproject.toml":
        pyproject = read_pyproject(file.parent)
        project = pyproject.project or ProjectTable()
        return bool(
            project.dependencies or project.dynamic or pyproject.tool.poetry.dependencies
        ) or _is_broken(file)
    text = read_source(file)
    if file.name == "setup.cfg":
        return "install_requires" in text
    return not file.name.endswith(CONDA) or bool(re.search(r"^dependencies:", text, re.MULTILINE))


def _is_broken(pyproject: Path) -> bool:
    """Whether a pyproject.toml is not valid, which a person wants to know."""
    try:
        parse_pyproject(read_source(pyproject))
    except ValueError:
        return True
    return False


def comment_out(root: Path, name: str) -> None:
    """Make comments, with the reason, of the lines of a list that an image cannot have."""
    problems = read_packages(root, name).problems
    wrong = {problem.line: problem.reason for problem in problems if problem.file == name}
    lines = []
    for number, line in enumerate(read_source(root / name).splitlines(), 1):
        if number in wrong:
            lines += [*wrap_comment(f"left out: it {wrong[number]}"), f"# {line}"]
        else:
            lines.append(line)
    (root / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _choose_extras(
    file: Path, packages: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the extras of a pyproject.toml with packages that the code imports, and the others."""
    if file.name != "pyproject.toml":
        return (), ()
    project = read_pyproject(file.parent).project or ProjectTable()
    needed = {_parse_name(name) for name in packages}
    needed -= {_parse_name(line) for line in project.dependencies}
    chosen = []
    for extra, lines in project.optional.items():
        names = {_parse_name(line) for line in lines}
        is_wanted = re.fullmatch(EXTRA_NAME, extra) and not NOT_FOR_RUNS.search(extra.lower())
        if needed & names and is_wanted:
            chosen.append(extra)
            needed -= names
    return tuple(chosen), tuple(extra for extra in project.optional if extra not in chosen)


def _parse_name(requirement: str) -> str:
    """Return the name of a package as indexes compare it."""
    match = _NAME.match(requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""


def convert_table(table: Dependencies) -> list[str]:
    """Return the dependencies of a Pipfile, or of poetry, as lines for pip."""
    lines = []
    for name, value in table.items():
        first = value[0] if isinstance(value, list) and value else value
        needed = first if isinstance(first, Dependency) else Dependency(version=str(first))
        extras = f"[{','.join(needed.extras)}]" if needed.extras else ""
        if name.lower() == "python":
            continue
        if needed.git:
            ref = needed.ref or needed.rev or needed.tag or needed.branch
            at = f"@{ref}" if ref else ""
            lines.append(f"{name}{extras} @ git+{needed.git.removeprefix('git+')}{at}")
        elif needed.path:
            lines.append(f"-e {needed.path}{extras}")
        else:
            lines.append(f"{name}{extras}{convert_version(needed.version)}")
    return lines


def convert_version(version: str) -> str:
    """Return a version of a Pipfile or of poetry as pip writes it: `^1.2` is `>=1.2,<2`."""
    if version == "*":
        return ""
    if re.match(r"\d", version):
        return f"=={version}"
    match = re.match(r"([\^~])\s*(\d+(?:\.\d+)*)", version)
    if match is None or version.startswith("~=") or len(version) > _MOST_VERSION:
        return version.replace(" ", "")
    numbers = [int(number) for number in match[2].split(".")]
    if match[1] == "~":
        position = min(1, len(numbers) - 1)
    else:  # the first number that is not 0 may not change
        position = next((i for i, number in enumerate(numbers) if number), len(numbers) - 1)
    limit = [*numbers[:position], numbers[position] + 1]
    return f">={match[2]},<{'.'.join(map(str, limit))}"
