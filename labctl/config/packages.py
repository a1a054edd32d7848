"""Read the packages that an image is made of: requirements.txt, pyproject.toml, environment.yml.

The build gets these files, the files of the lab that they name, and nothing else. Code that a list
installs (`-e .`) is installed in editable mode, so that each run imports its own copy.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from labctl.config.document import quote
from labctl.config.pyproject import Pyproject, parse_pyproject
from labctl.config.schema import PROJECT_FILES
from labctl.model import Value
from labctl.wire.containment import is_contained, is_inside

MAX_PACKAGES_FILE_BYTES = 1024 * 1024
# A list that names more lists than this is not one that a person wrote.
MOST_LISTS = 100
# The list that the build of a pyproject.toml or setup.py installs.
GENERATED = "labctl-requirements.txt"

_OTHER_FILE = re.compile(r"(?:-r|-c|--requirement|--constraint)[ =]?\s*(\S+)")
_FIND_LINKS = re.compile(r"(?:-f|--find-links)[ =]?\s*(?!https?:)(\S+)")
_EDITABLE = re.compile(r"(?:-e|--editable)[ =]?\s*(\S.*)")
_REPOSITORY = re.compile(r"[a-z]+\+[a-z]+:")
_DIRECTORY = re.compile(r"(\.{0,2}/[^\s;\[]*|\.{1,2}(?=$|[\s;\[])|file:\S+)(\[[\w, -]+\])?")
_FILE_ADDRESS = re.compile(r"\S+\s*@\s*(file:\S+)")
# a line of a list, with the dash and the quotes of YAML
_ITEM = re.compile(r"(\s*-\s+['\"]?|\s*)(.*)")


class PackageProblem(Value, frozen=True):
    """Why a file, or one line of it (0 for none), cannot go into an image.

    `reason` continues a sentence about the line; without a line, it is a sentence of its own.
    """

    file: str
    line: int
    reason: str

    @property
    def message(self) -> str:
        where = f"line {self.line} of {quote(self.file)} " if self.line else ""
        return f"{where}{self.reason}"


class PackageList(Value, frozen=True):
    """What a build needs: the file to install, and every file of the lab by its path.

    `has_code` says that the lab's own code is installed too, and `needs_git` that packages come
    from repositories. `problems` make the build impossible.
    """

    entry: str
    files: dict[str, str]
    has_code: bool
    needs_git: bool
    problems: tuple[PackageProblem, ...]


def read_packages(root: Path, name: str, extras: tuple[str, ...] = ()) -> PackageList:
    """Read a file of packages and all files that it names; `extras` are those of a project."""
    reader = _PackageReader(root)
    entry = name
    if Path(name).name in PROJECT_FILES:
        entry = GENERATED
        reader.read_project(name, extras)
    else:
        is_conda = name.endswith((".yml", ".yaml"))
        reader.read_list(name, str(Path(name).parent) if is_conda else ".")
    return PackageList(
        entry=entry,
        files=reader.files,
        has_code=reader.has_code,
        needs_git=any("git+" in text for text in reader.files.values()),
        problems=tuple(reader.problems),
    )


def find_problem(root: Path, name: str, extras: tuple[str, ...] = ()) -> str:
    """Return why the image cannot be built from this file; "" if nothing speaks against it."""
    problems = read_packages(root, name, extras).problems
    return problems[0].message if problems else ""


class _PackageReader:
    """Collects the files of a list, and the problems with them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, str] = {}
        self.has_code = False
        self.problems: list[PackageProblem] = []

    def read_list(self, name: str, directory: str) -> None:
        """Read a list for pip or conda; its paths to code are relative to `directory`."""
        if name in self.files:
            return  # a list may name itself, over others
        text = self._read_text(name)
        self.files[name] = ""
        lines = []
        for number, line in enumerate((text or "").splitlines(), 1):
            reason, installed = self._read_line(name, directory, line)
            if reason:
                self.problems.append(PackageProblem(name, number, reason))
            lines.append(installed)
        self.files[name] = "".join(f"{line}\n" for line in lines)

    def _read_line(self, name: str, directory: str, line: str) -> tuple[str, str]:
        """Return what is wrong with a line, "" for nothing, and the line for the build."""
        head, words, tail = _split_item(re.sub(r"(?:^|\s)#.*", "", line))
        if match := _OTHER_FILE.match(words):
            return self._read_other(name, directory, match[1]), line
        if match := _FIND_LINKS.match(words):
            what = f"looks for packages in {quote(match[1])}, which the build does not have"
            return f"{what}; remove the line, and set LABCTL_WHEELHOUSE to that directory", line
        editable = _EDITABLE.match(words)
        what = editable[1] if editable else words
        if editable and _REPOSITORY.match(what):
            # An editable clone would be in the directory over which a run's code is mounted.
            return "", f"{head}{what}{tail}"
        address = _FILE_ADDRESS.match(what)
        place = _DIRECTORY.match(address[1] if address else what)
        if not place and not editable:
            return "", line
        path = place[1] if place else re.split(r"[\[\s;]", what)[0]
        extras = place[2] if place else what.removeprefix(path).partition(";")[0]
        return self._add_code(directory, path, words), f"{head}-e {path}{extras or ''}{tail}"

    def _read_other(self, name: str, directory: str, other: str) -> str:
        if "://" in other:
            return ""
        path = os.path.normpath(Path(name).parent / other)
        if other.startswith(("/", "~")) or not is_contained(path):
            return f"reads {quote(other)}, which is not in the lab; copy it there"
        if not (self.root / path).is_file():
            return f"reads {quote(other)}, and there is no file {quote(path)} in the lab"
        if len(self.files) >= MOST_LISTS:
            return f"reads {quote(other)}, after {MOST_LISTS} other files; use fewer lists"
        before = len(self.problems)
        self.read_list(path, directory)
        is_usable = len(self.problems) == before
        return "" if is_usable else f"reads {quote(path)}, of which not all can be installed"

    def _add_code(self, directory: str, path: str, words: str) -> str:
        """Add the files that describe a project in the lab; return why it cannot be installed."""
        place = os.path.normpath(Path(directory) / path)
        if path.startswith(("/", "file:")) or not (place == "." or is_contained(place)):
            return f"installs code outside the lab ({quote(words)}); copy it there"
        target = self.root / place
        if target.is_file():
            return (
                f"installs a file of this machine ({quote(words)}); install the package from an "
                "index, or write a Dockerfile"
            )
        if not any((target / name).is_file() for name in PROJECT_FILES):
            return f"installs {quote(words)}, which has neither a pyproject.toml nor a setup.py"
        self.has_code = True
        self._add_project_files(place)
        return ""

    def _add_project_files(self, place: str) -> None:
        """Add what decides on a project's packages; its other code may change without a build."""
        target = self.root / place
        lists = [*target.glob("*requirements*.txt"), *target.glob("requirements/*.txt")]
        for path in sorted([*(target / name for name in PROJECT_FILES), *lists]):
            name = str(path.relative_to(self.root))
            if path.is_file() and name not in self.files:
                text = self._read_text(name)
                if text is not None:
                    self.files[name] = text

    def read_project(self, name: str, extras: tuple[str, ...]) -> None:
        """Read a pyproject.toml, setup.py or setup.cfg, and write the list that installs it."""
        text = self._read_text(name)
        if text is None:
            return
        pyproject = Pyproject()
        if Path(name).name == "pyproject.toml":
            try:
                pyproject = parse_pyproject(text)
                message = _find_problem_in_project(name, pyproject, extras)
            except ValueError as error:
                message = f"{quote(name)} is not valid: {error}"
            if message:
                self.problems.append(PackageProblem(name, 0, message))
                return
        if pyproject.project and not pyproject.is_package:
            lines = [*pyproject.project.dependencies]
            lines += [
                line for extra in extras for line in pyproject.project.optional.get(extra, ())
            ]
            self.files[GENERATED] = "".join(f"{line}\n" for line in lines)
            return
        self.has_code = True
        place = Path(name).parent
        self._add_project_files(str(place))
        directory = "." if place == Path() else f"./{place}"
        chosen = f"[{','.join(extras)}]" if extras else ""
        self.files[GENERATED] = f"-e {directory}{chosen}\n"

    def _read_text(self, name: str) -> str | None:
        """Read a text of the lab; None, and a problem, if that is not possible."""
        path = self.root / name
        try:
            if not is_inside(path, self.root):
                message = f"{quote(name)} leads out of the lab through a link"
            elif path.stat().st_size > MAX_PACKAGES_FILE_BYTES:
                message = f"{quote(name)} is too large: at most 1 MiB"
            else:
                return path.read_text(encoding="utf-8")
        except OSError as error:
            message = f"{quote(name)} cannot be read: {error.strerror}"
        except UnicodeDecodeError:
            message = f"{quote(name)} is not a text in UTF-8"
        self.problems.append(PackageProblem(name, 0, message))
        return None


def _split_item(line: str) -> tuple[str, str, str]:
    """Return the start of a line, its words, and the end: one quote and spaces, or nothing."""
    item = _ITEM.match(line.rstrip())
    assert item is not None  # it matches every line
    head, words = item.groups()
    tail = words[-1:] if words.endswith(("'", '"')) else ""
    return head, words.removesuffix(tail), tail


def _find_problem_in_project(name: str, pyproject: Pyproject, extras: tuple[str, ...]) -> str:
    project = pyproject.project
    if project is None:
        if pyproject.is_package:
            return ""  # of poetry, or beside a setup.py: the build knows the extras
        return f"{quote(name)} has no [project] table, which lists dependencies"
    missing = [extra for extra in extras if extra not in project.optional]
    if missing and "optional-dependencies" not in project.dynamic:
        known = f"; it has {', '.join(project.optional)}" if project.optional else ""
        return f"{quote(name)} has no extra {quote(missing[0])}{known}"
    return ""
