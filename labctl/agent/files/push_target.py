"""A tree that is pushed to: where it and its staging directory are, and what a push brought."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

from ..host.paths import Below, checked_name, home, lab_dir, read_json, sha256_of, write_json
from ..reply import Failure

NOT_A_FILE = "not a file"


class PushedFile(NamedTuple):
    """A file of a push, as the client has it; `sha256` is "" where it has not been read yet."""

    path: str
    size: int
    sha256: str
    mode: int
    mtime_ns: int


class Target:
    """One tree that is pushed to: the lab's code, a data set, a run to restore, a model, wheels,
    what is graded.

    `record` holds [sha256, size, mtime_ns] of what a push brought, `due` the hash that each staged
    file is to have; a file with neither hash was edited here.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        kind, _, name = request["target"].partition("/")
        lab = lab_dir(request["lab"], request["lab_id"])
        self.key = request["target"].replace("/", "-")
        if kind == "code":
            self.root = lab / "code"
        elif kind == "data":
            self.root = lab / "data" / checked_name(name)
        elif kind == "restore":
            self.root = lab / "restore" / checked_name(name)
        elif kind == "model":
            self.root = lab / "models" / checked_name(name)
        elif kind == "grading":
            self.root = lab / "grading" / checked_name(name)
        elif kind == "wheelhouse":
            self.root = home() / ".wheelhouse"
        else:
            raise Failure("usage", f"nothing is pushed to {request['target']!r}")
        own = home() if kind == "wheelhouse" else lab / ".labctl"
        self.staging = own / f".staging-{self.key}"
        self.due_path = own / f".due-{self.key}.json"
        self.record_path = own / f".pushed-{self.key}.json"
        self.fetched_path = own / f".fetched-{name}.json"
        self.record: dict[str, list[Any]] = read_json(self.record_path)
        self.due: dict[str, str] = read_json(self.due_path)
        self._saved = dict(self.record)
        self.at = Below(self.root)
        self.staged_at = Below(self.staging)

    def look(self, path: str) -> tuple[str, os.stat_result | None]:
        """(hash of the file here, its stat); "" and None if there is none.

        Unchanged since the record, it is not read. A file that a push left here without its
        record being written is recorded now.
        """
        place = self.at(path)
        found = lstat(place)
        if found is None:
            return "", None
        if not stat.S_ISREG(found.st_mode):
            return NOT_A_FILE, found
        known = self.record.get(path)
        if known and known[1] == found.st_size and known[2] == found.st_mtime_ns:
            return str(known[0]), found
        sha256 = sha256_of(Path(place))
        if sha256 == self.due.get(path) or (known and sha256 == known[0]):
            self.note(path, sha256, found)
        return sha256, found

    def present(self, path: str) -> str:
        """The hash of the file here, "" if there is none."""
        return self.look(path)[0]

    def edited(self, path: str, present: str) -> bool:
        """Whether what is `present` at this path is somebody's work here."""
        known = self.record.get(path)
        return bool(present) and (known is None or present != known[0])

    def staged(self, entry: PushedFile) -> os.stat_result | None:
        """The stat of the staged file if it is `entry`, whole; else None.

        rsync gives a file its time only when its checksum was right. Where the time is another
        one (tar, a file system with coarse times), the content is read, and gets it then.
        """
        place = self.staged_at(entry.path)
        found = lstat(place)
        if found is None or not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
            return None
        if found.st_mtime_ns == entry.mtime_ns:
            return found
        if not entry.sha256 or sha256_of(Path(place)) != entry.sha256:
            return None
        os.utime(place, ns=(entry.mtime_ns, entry.mtime_ns))
        return os.lstat(place)

    def note(self, path: str, sha256: str, found: os.stat_result) -> None:
        self.record[path] = [sha256, found.st_size, found.st_mtime_ns]

    def save(self) -> None:
        if self.record != self._saved:
            write_json(self.record_path, self.record)
            self._saved = dict(self.record)


def lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
