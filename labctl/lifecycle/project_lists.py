"""Which of a project's lists of packages an image can be built from, or what to write instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from labctl.config.packages import PROJECT_FILES, is_package, parse_pyproject, read_packages
from labctl.lifecycle.project_imports import read_source
from labctl.model import Value

# in the order of preference; other names of lists follow
USUAL = ("environment.yml", "environment.yaml", "requirements.txt", *PROJECT_FILES)
OTHERS = ("*requirements*.txt", "requirements/*.txt", "*env*.yml", "*env*.yaml", "conda*.yml")
# Lists and extras that a training does not need, by parts of their names.
NOT_FOR_RUNS = re.compile(r"dev|test|doc|lint|style|build|labctl")
CONDA = (".yml", ".yaml")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


class ListChoice(Value, frozen=True):
    """The file that an image is built from ("" for none), and why not from others (file, reason).

    `text` is the content of a new list where no file works, and `source` is what it is made of.
    `extras` are those of a project whose packages the code imports; `other_extras` the rest.
    """

    file: str = ""
    rejected: tuple[tuple[str, str], ...] = ()
    text: str = ""
    source: str = ""
    extras: tuple[str, ...] = ()
    other_extras: tuple[str, ...] = ()

    @property
    def installs_project(self) -> bool:
        return Path(self.file).name in PROJECT_FILES or "\n-e .\n" in f"\n{self.text}"


def choose_list(root: Path, packages: Sequence[str]) -> ListChoice:
    """Choose the list to build from, or write one; `packages` are those that the code imports."""
    rejected: list[tuple[str, str]] = []
    text = source = ""
    for name in dict.fromkeys(_list_candidates(root)):
        problems = read_packages(root, name).problems
        if not problems:
            extras, others = _choose_extras(root / name, packages)
            return ListChoice(
                file=name, rejected=tuple(rejected), extras=extras, other_extras=others
            )
        rejected.append((name, problems[0].message))
        if name.endswith(".txt") and not text and "/" not in name and problems[0].line:
            text, source = read_source(root / name), name  # its wrong lines become comments
    for name, read in (("Pipfile", _read_pipfile), ("pyproject.toml", _read_poetry)):
        if not text and (table := read(parse_pyproject(read_source(root / name)))):
            text, source = "".join(f"{line}\n" for line in convert_table(table)), name
    if not text and packages:
        installed = ["-e ."] if is_package(_read_project_table(root)) else []
        text, source = "".join(f"{line}\n" for line in [*installed, *packages]), "the imports"
    return ListChoice(rejected=tuple(rejected), text=text, source=source)


def _read_project_table(root: Path) -> dict[str, Any]:
    return parse_pyproject(read_source(root / "pyproject.toml"))


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
    text = read_source(file)
    if file.name == "pyproject.toml":
        pyproject = parse_pyproject(text)
        project = pyproject.get("project", {})
        return bool(
            project.get("dependencies")
            or project.get("dynamic")
            or pyproject.get("tool", {}).get("poetry", {}).get("dependencies")
        )
    if file.name == "setup.cfg":
        return "install_requires" in text
    return not file.name.endswith(CONDA) or bool(re.search(r"^dependencies:", text, re.MULTILINE))


def comment_out(root: Path, name: str) -> None:
    """Make comments, with the reason, of the lines of a list that an image cannot have."""
    problems = read_packages(root, name).problems
    wrong = {problem.line: problem.reason for problem in problems if problem.file == name}
    lines = []
    for number, line in enumerate(read_source(root / name).splitlines(), 1):
        if number in wrong:
            lines += [f"# left out: it {wrong[number]}", f"# {line}"]
        else:
            lines.append(line)
    (root / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _choose_extras(
    file: Path, packages: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the extras of a pyproject.toml with packages that the code imports, and the others."""
    if file.name != "pyproject.toml":
        return (), ()
    project = parse_pyproject(read_source(file)).get("project", {})
    optional: dict[str, list[str]] = project.get("optional-dependencies", {})
    needed = {_parse_name(name) for name in packages}
    needed -= {_parse_name(line) for line in project.get("dependencies", ())}
    chosen = []
    for extra, lines in optional.items():
        names = {_parse_name(line) for line in lines}
        if needed & names and not NOT_FOR_RUNS.search(extra.lower()):
            chosen.append(extra)
            needed -= names
    return tuple(chosen), tuple(extra for extra in optional if extra not in chosen)


def _parse_name(requirement: str) -> str:
    """Return the name of a package as indexes compare it."""
    match = _NAME.match(requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""


def _read_pipfile(pipfile: dict[str, Any]) -> dict[str, Any]:
    return dict(pipfile.get("packages", {}))


def _read_poetry(pyproject: dict[str, Any]) -> dict[str, Any]:
    return dict(pyproject.get("tool", {}).get("poetry", {}).get("dependencies", {}))


def convert_table(table: dict[str, Any]) -> list[str]:
    """Return the dependencies of a Pipfile, or of poetry, as lines for pip."""
    lines = []
    for name, spec in table.items():
        first = spec[0] if isinstance(spec, list) and spec else spec
        values = first if isinstance(first, dict) else {"version": str(first)}
        if name.lower() == "python":
            continue
        extras = f"[{','.join(values['extras'])}]" if values.get("extras") else ""
        if "git" in values:
            ref = next(
                (values[key] for key in ("ref", "rev", "tag", "branch") if key in values), ""
            )
            at = f"@{ref}" if ref else ""
            lines.append(f"{name}{extras} @ git+{str(values['git']).removeprefix('git+')}{at}")
        elif "path" in values:
            lines.append(f"-e {values['path']}{extras}")
        else:
            lines.append(f"{name}{extras}{_convert_version(str(values.get('version', '*')))}")
    return lines


def _convert_version(version: str) -> str:
    """Return a version of a Pipfile or of poetry as pip writes it: `^1.2` is `>=1.2,<2`."""
    if version == "*":
        return ""
    if re.match(r"\d", version):
        return f"=={version}"
    match = re.match(r"([\^~])\s*(\d+(?:\.\d+)*)", version)
    if match is None or version.startswith("~="):
        return version.replace(" ", "")
    numbers = [int(number) for number in match[2].split(".")]
    if match[1] == "~":
        position = min(1, len(numbers) - 1)
    else:  # the first number that is not 0 may not change
        position = next((i for i, number in enumerate(numbers) if number), len(numbers) - 1)
    limit = [*numbers[:position], numbers[position] + 1]
    return f">={match[2]},<{'.'.join(map(str, limit))}"
