"""What a directory with code says about the lab that it could be. Reads files, runs nothing."""

from __future__ import annotations

import ast
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from labctl.model import Value

# more files than this are not read: a home directory is not a project
MAX_FILES = 400
MAX_SOURCE_BYTES = 1024 * 1024
PACKAGE_FILES = ("environment.yml", "environment.yaml", "requirements.txt", "pyproject.toml")
SCRIPTS = ("train.py", "main.py", "run.py", "src/train.py", "scripts/train.py", "src/main.py")
DATA_NAMES = ("data", "dataset", "datasets")
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
# import -> package, where the names differ
PACKAGES = {
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "sklearn": "scikit-learn",
    "skimage": "scikit-image",
    "yaml": "PyYAML",
    "pytorch_lightning": "pytorch-lightning",
    "dotenv": "python-dotenv",
}
GPU_IMPORTS = {"torch", "tensorflow", "jax"}


class ProjectFacts(Value, frozen=True):
    """What was found. Paths are relative to the directory; "" or empty if nothing was found.

    `packages` are those that the code imports and that are neither Python's own nor the code's.
    """

    has_dockerfile: bool = False
    package_file: str = ""
    python: str = ""
    python_source: str = ""
    script: str = ""
    other_scripts: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    imports: frozenset[str] = frozenset()
    data: tuple[str, ...] = ()
    sources: int = 0
    has_notebooks: bool = False

    @property
    def has_code(self) -> bool:
        return bool(self.has_dockerfile or self.package_file or self.sources or self.has_notebooks)


def scan_project(root: Path) -> ProjectFacts:
    """Look at the files of a directory."""
    names = sorted(_list_files(root))
    sources = [name for name in names if name.endswith(".py")]
    imports = frozenset(name for source in sources for name in _list_imports(root / source))
    scripts = _rank_scripts(root, sources)
    python, python_source = _find_python(root)
    return ProjectFacts(
        has_dockerfile=(root / "Dockerfile").is_file(),
        package_file=_find_package_file(root),
        python=python,
        python_source=python_source,
        script=scripts[0] if scripts else "",
        other_scripts=tuple(scripts[1:4]),
        packages=_list_packages(imports, names),
        imports=imports,
        data=tuple(name for name in DATA_NAMES if (root / name).is_dir()),
        sources=len(sources),
        has_notebooks=any(name.endswith(".ipynb") for name in names),
    )


def _list_files(root: Path) -> Iterator[str]:
    """Yield the names of code files, the nearest to the top first."""
    count = 0
    for directory, folders, files in os.walk(root):
        depth = len(Path(directory).relative_to(root).parts)
        hidden = {name for name in folders if name.startswith(".")}
        skipped = SKIPPED | hidden | (set(DATA_NAMES) if depth == 0 else set())
        folders[:] = sorted(set(folders) - skipped) if depth < 3 else []
        for name in sorted(files):
            if name.endswith((".py", ".ipynb", ".sh")):
                yield str((Path(directory) / name).relative_to(root))
                count += 1
                if count == MAX_FILES:
                    return


def _read_source(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_SOURCE_BYTES:
            return ""
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _list_imports(file: Path) -> set[str]:
    """Return the top modules that a file imports; none if it is not valid Python."""
    try:
        tree = ast.parse(_read_source(file))
    except (SyntaxError, ValueError, RecursionError):
        return set()
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module.partition(".")[0])
    return modules


def _list_packages(imports: frozenset[str], names: list[str]) -> tuple[str, ...]:
    own = {part.removesuffix(".py") for name in names for part in Path(name).parts}
    others = imports - own - sys.stdlib_module_names
    return tuple(sorted({PACKAGES.get(name, name) for name in others}, key=str.lower))


def _rank_scripts(root: Path, sources: list[str]) -> list[str]:
    """Return the files that could be the program, the likeliest first."""
    known = [name for name in SCRIPTS if name in sources]
    trains = [n for n in sources if Path(n).name.startswith("train") and n not in known]
    mains = [
        name
        for name in sources
        if name not in known and name not in trains and "__main__" in _read_source(root / name)
    ]
    ranked = known + trains + mains
    return ranked or (sources if len(sources) == 1 else [])


def _find_package_file(root: Path) -> str:
    for name in PACKAGE_FILES:
        file = root / name
        if file.is_file() and (name != "pyproject.toml" or _read_project(file).get("dependencies")):
            return name
    return ""


def _read_project(file: Path) -> dict[str, object]:
    """Return the [project] table; {} without one, or if the file cannot be read."""
    try:
        project = tomllib.loads(_read_source(file)).get("project")
    except tomllib.TOMLDecodeError:
        return {}
    return project if isinstance(project, dict) else {}


def _find_python(root: Path) -> tuple[str, str]:
    """Return the version of Python that the project names, and where; "" if it names none."""
    match = re.match(r"\s*(3\.\d{1,2})", _read_source(root / ".python-version"))
    if match:
        return match[1], ".python-version"
    wanted = _read_project(root / "pyproject.toml").get("requires-python")
    if isinstance(wanted, str):
        for version in PYTHONS:
            if _is_allowed(version, wanted):
                return version, f"requires-python {wanted}"
    return "", ""


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
