"""Say which ignored files a run may miss: those in directories that the lab's code names.

Many repositories ignore their data (`*.bin`, `data/`). Nobody notices on the machine that has the
files, and the run does not find them on the server.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from labctl.config.reader import LAB_FILE
from labctl.model import FileEntry
from labctl.sync.ignore import NEVER_ANYWHERE, IgnoredName, IgnoreRule, inclusion_text, rule_text
from labctl.text import bytes_text, names_text

CODE_SUFFIXES = (".py", ".sh", ".yaml", ".yml", ".toml", ".json")
MOST_CODE_FILES = 200
LARGEST_CODE_BYTES = 256 * 1024
# A directory with more ignored files than this is counted up to here.
MOST_COUNTED = 100_000
NAMED_AT_MOST = 3
# what code that finds its data in a run contains
DATA_PLACES = ("LABCTL_DATA_DIR", "/lab/data")
_QUOTED = re.compile(r"""["']([^"'\n]{1,200})["']""")


class IgnoredDirectory(NamedTuple):
    """The files that rules leave out of one directory (`name`, relative to the lab).

    `is_left_out` is set if a rule leaves out the directory itself.
    """

    name: str
    files: int
    size_bytes: int
    rule: IgnoreRule
    is_left_out: bool


def describe_ignored(root: Path, ignored: Sequence[IgnoredName], texts: Mapping[str, str]) -> str:
    """Describe the ignored files of directories that the code names; "" if there are none.

    `texts` is what `read_code` returns.
    """
    if not ignored:
        return ""
    quoted = (path for text in texts.values() for path in _QUOTED.findall(text))
    named = {part for path in quoted for part in path.split("/")}
    directories = [d for d in _group_by_directory(root, ignored, named) if d.files]
    if not directories:
        return ""
    directories.sort(key=lambda directory: -directory.size_bytes)
    text = names_text([_describe(directory) for directory in directories], NAMED_AT_MOST)
    largest = directories[0]
    path = f"{largest.name}/{'' if largest.is_left_out else '**'}"
    example = "lines such as" if len(directories) > 1 else "the line"
    return (
        f"left out by ignore rules: {text}. If the run needs them, add {example} "
        f"{inclusion_text(largest.rule, path)}. Or, for large data, list the directory under "
        "data: in lab.yaml and read it from $LABCTL_DATA_DIR"
    )


def _describe(directory: IgnoredDirectory) -> str:
    files = f"{directory.files:,} file{'' if directory.files == 1 else 's'}"
    name, rule = ascii(directory.name)[1:-1], rule_text(directory.rule)
    return f"{name}/ ({files}, {bytes_text(directory.size_bytes)}; {rule})"


def describe_data_in_code(root: Path, data: Mapping[str, Path], texts: Mapping[str, str]) -> str:
    """Describe data directories of the lab that the code reads where a run does not have them.

    `data` are their paths by name, `texts` is what `read_code` returns. "" if there are none, or if
    the code knows where its data are.
    """
    code = [text for path, text in texts.items() if path != LAB_FILE]
    if any(place in text for text in code for place in DATA_PLACES):
        return ""
    quoted = {os.path.normpath(path) for text in code for path in _QUOTED.findall(text)}
    for name, directory in data.items():
        path = directory.relative_to(root).as_posix()
        if any(one == path or one.startswith(f"{path}/") for one in quoted):
            return (
                f"the code names {ascii(path)[1:-1]}/, which is under data: in lab.yaml and so is "
                f"not sent with the code. A run has it at /lab/data/{name}, which is "
                f"$LABCTL_DATA_DIR/{name}"
            )
    return ""


def read_code(root: Path, code: Iterable[FileEntry]) -> dict[str, str]:
    """Read the lab's first MOST_CODE_FILES code files; return their texts by path."""
    files = [
        entry.path
        for entry in code
        if entry.path.endswith(CODE_SUFFIXES) and entry.size <= LARGEST_CODE_BYTES
    ]
    texts: dict[str, str] = {}
    for path in files[:MOST_CODE_FILES]:
        with suppress(OSError):
            texts[path] = (root / path).read_text("utf-8", errors="replace")
    return texts


def _group_by_directory(
    root: Path, ignored: Sequence[IgnoredName], named: set[str]
) -> list[IgnoredDirectory]:
    """Group ignored names by the directory that has them, for directories in `named`."""
    found: dict[str, IgnoredDirectory] = {}
    for name, is_folder, rule in ignored:
        directory = name if is_folder else name.rpartition("/")[0]
        last = directory.rpartition("/")[2]
        if last not in named or last in NEVER_ANYWHERE:
            continue
        files, size_bytes = _measure(root / name)
        earlier = found.get(directory, IgnoredDirectory(directory, 0, 0, rule, is_folder))
        found[directory] = earlier._replace(
            files=earlier.files + files, size_bytes=earlier.size_bytes + size_bytes
        )
    return list(found.values())


def _measure(path: Path) -> tuple[int, int]:
    """Return the number of regular files at or below `path`, and their bytes."""
    if not path.is_dir():
        return (1, path.lstat().st_size) if path.exists() else (0, 0)
    files = size_bytes = 0
    for top, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name not in NEVER_ANYWHERE]
        for name in names:
            try:
                size_bytes += Path(top, name).lstat().st_size
            except OSError:
                continue
            files += 1
        if files >= MOST_COUNTED:
            break
    return files, size_bytes
