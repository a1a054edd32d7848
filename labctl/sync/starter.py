"""A starter: the files of an assignment that a course hands out, and the record of them in a lab.

A starter travels as one JSON document with the contents of its files, so it cannot hold links.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from labctl.config.identity import write_private
from labctl.decoding import decode_json
from labctl.errors import ConfigError, PolicyError
from labctl.model import Value
from labctl.sync.containment import LONGEST_NAME_BYTES
from labctl.sync.ignore import NEVER_ANYWHERE, NEVER_AT_TOP
from labctl.wire.containment import is_contained
from labctl.wire.keeper import STARTER_MOST_BYTES

MOST_FILES = 500
# A document holds the contents in base64, which needs a third more.
MOST_BYTES = STARTER_MOST_BYTES // 2
# The directory of a lab that public tests are written to.
TESTS = "tests"
RECORD = Path(".labctl") / "starter.json"


class StarterFile(Value, frozen=True):
    """One file. `path` is relative to the lab, with "/" between its parts."""

    path: str
    content: bytes
    executable: bool = False


class Starter(Value, frozen=True):
    """The files of an assignment, by path. `tests` are the paths of its public tests.

    `source` says where the files come from: a template's name, a directory or a git address.
    """

    assignment: str
    source: str
    files: tuple[StarterFile, ...] = ()
    tests: tuple[str, ...] = ()
    version: int = 1

    def by_path(self) -> dict[str, StarterFile]:
        return {file.path: file for file in self.files}


class StarterRecord(Value, frozen=True):
    """The last version that a lab received, which the next one is merged against.

    `sha256` is that of the document as the course published it.
    """

    sha256: str
    starter: Starter


def encode_starter(starter: Starter) -> bytes:
    return msgspec.json.encode(starter)


def hash_document(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def is_sha256(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def decode_starter(data: bytes) -> Starter:
    """Parse a document from elsewhere; PolicyError if labctl must not write what is in it."""
    try:
        if len(data) > STARTER_MOST_BYTES:
            raise ValueError(f"it is larger than {STARTER_MOST_BYTES // 1024**2} MiB")
        starter = decode_json(data, Starter)
        _require_usable_paths(starter)
        if problem := _find_total_problem(starter.files):
            raise ValueError(problem)
    except (ValueError, RecursionError) as error:
        raise PolicyError(
            "the course sent a starter that cannot be used",
            why=str(error),
            hint="tell your instructor, who can check it with:\nlabctl course plan",
        ) from None
    return starter


def _require_usable_paths(starter: Starter) -> None:
    """Raise ValueError if labctl must not write to the paths of this starter."""
    if problem := _find_paths_problem(file.path for file in starter.files):
        raise ValueError(problem)
    if not set(starter.tests) <= starter.by_path().keys():
        raise ValueError("a public test is not among its files")


def find_files_problem(files: Sequence[StarterFile]) -> str:
    """Return why these files cannot be handed out together; "" if they can."""
    return _find_paths_problem(file.path for file in files) or _find_total_problem(files)


def _find_total_problem(files: Sequence[StarterFile]) -> str:
    return find_size_problem(len(files), sum(len(file.content) for file in files))


def _find_paths_problem(paths: Iterable[str]) -> str:
    distinct: set[str] = set()
    for path in paths:
        if problem := find_path_problem(path):
            return f"{path[:200]!a}: {problem}"
        if path in distinct:
            return f"{path} occurs twice"
        distinct.add(path)
    for path in distinct:
        for parent in PurePosixPath(path).parents:
            if str(parent) in distinct:
                return f"{parent} is both a file and a directory"
    return ""


def find_size_problem(files: int, size_bytes: int) -> str:
    """Return why so many files or bytes cannot be handed out; "" if they can."""
    if files > MOST_FILES:
        return f"more than {MOST_FILES} files; hand out data sets with `data:` in course.yaml"
    if size_bytes > MOST_BYTES:
        most = f"more than {MOST_BYTES // 1024**2} MiB"
        return f"{most} in all; hand out data sets with `data:` in course.yaml"
    return ""


def find_path_problem(path: str) -> str:
    """Return why no starter may have a file of this path; "" if it may."""
    if not is_contained(path) or "\\" in path:
        return "the path leads out of the lab"
    if not path.isprintable():
        return "an unprintable character in the path"
    parts = path.split("/")
    if any(len(part.encode("utf-8", "surrogateescape")) > LONGEST_NAME_BYTES for part in parts):
        return "a name in the path is too long"
    # On macOS, .Git is the same directory as .git, and git runs the hooks that are in it.
    names = [part.casefold() for part in parts]
    if names[0] in NEVER_AT_TOP or not NEVER_ANYWHERE.isdisjoint(names):
        return "labctl never uploads files of this name, so it cannot be part of a starter"
    return ""


def read_record(root: Path) -> StarterRecord | None:
    """Return the version that the lab at `root` received last; None if it received none.

    ConfigError if the record is damaged, or has files that labctl would not have written.
    """
    file = root / RECORD
    if file.is_symlink() or file.parent.is_symlink():
        raise PolicyError(
            f"{file} is reached through a link",
            why="labctl writes there, and must not write elsewhere",
            hint=f"rm {file.parent if file.parent.is_symlink() else file}",
        )
    try:
        record = decode_json(file.read_bytes(), StarterRecord)
        _require_usable_paths(record.starter)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(
            f"{file} cannot be read",
            why=f"it holds the starter that your changes are compared with: {error}",
            hint=f"mv {file} {file}.damaged && labctl join",
        ) from None
    return record


def write_record(root: Path, record: StarterRecord) -> None:
    write_private(root / RECORD, msgspec.json.encode(record))
