"""The target of a push: the tree, its staging directory, and the record of what pushes brought."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ...wire.files import PushedFile, PushedRecord
from ..host.paths import CheckedPaths, hash_file, lab_dir, labctl_home, require_name
from ..reply import Failure
from .records import read_hashes, read_records, write_records

NOT_A_FILE = "not a file"


class PushTarget:
    """A tree that can be pushed to: code, a data set, a run to restore, a model, wheels, grading.

    `record` holds what a push brought, `due` the hash that each staged file must have. A file with
    neither hash was edited here.
    """

    def __init__(self, lab_name: str, lab_id: str, target: str) -> None:
        kind, _, name = target.partition("/")
        lab = lab_dir(lab_name, lab_id)
        self.key = target.replace("/", "-")
        if kind == "code":
            self.root = lab / "code"
        elif kind == "data":
            self.root = lab / "data" / require_name(name)
        elif kind == "restore":
            self.root = lab / "restore" / require_name(name)
        elif kind == "model":
            self.root = lab / "models" / require_name(name)
        elif kind == "grading":
            self.root = lab / "grading" / require_name(name)
        elif kind == "wheelhouse":
            self.root = labctl_home() / ".wheelhouse"
        else:
            raise Failure("usage", f"unknown push target {target!r}")
        meta = labctl_home() if kind == "wheelhouse" else lab / ".labctl"
        self.staging = meta / f".staging-{self.key}"
        self.due_path = meta / f".due-{self.key}.json"
        self.record_path = meta / f".pushed-{self.key}.json"
        self.fetched_path = meta / f".fetched-{name}.json"
        self.record = read_records(PushedRecord, self.record_path)
        self.due = read_hashes(self.due_path)
        self._saved = dict(self.record)
        self.at = CheckedPaths(self.root)
        self.staged_at = CheckedPaths(self.staging)

    def inspect_file(self, path: str) -> tuple[str, os.stat_result | None]:
        """Return (hash, stat) of the file here; ("", None) if it does not exist.

        A file that has not changed since the record is not read. If a push left a file here but
        could not write its record, the record is written now.
        """
        file = self.at(path)
        status = stat_or_none(file)
        if status is None:
            return "", None
        if not stat.S_ISREG(status.st_mode):
            return NOT_A_FILE, status
        entry = self.record.get(path)
        if entry and entry[1:] == (status.st_size, status.st_mtime_ns):
            return entry.sha256, status
        sha256 = hash_file(Path(file))
        if sha256 == self.due.get(path) or (entry and sha256 == entry.sha256):
            self.record_file(path, sha256, status)
        return sha256, status

    def hash_present(self, path: str) -> str:
        """Return the hash of the file here, "" if it does not exist."""
        return self.inspect_file(path)[0]

    def is_edited(self, path: str, present: str) -> bool:
        """Return whether the content with hash `present` at this path was edited on the server."""
        entry = self.record.get(path)
        return bool(present) and (entry is None or present != entry.sha256)

    def find_staged(self, entry: PushedFile) -> os.stat_result | None:
        """Return the stat of the staged file if it is `entry` and complete, else None.

        rsync sets a file's time only after its checksum matched. If the time differs (tar, or a
        file system with coarse times), the content is hashed, and the file gets its time then.
        """
        file = self.staged_at(entry.path)
        status = stat_or_none(file)
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
            return None
        if status.st_mtime_ns == entry.mtime_ns:
            return status
        if not entry.sha256 or hash_file(Path(file)) != entry.sha256:
            return None
        os.utime(file, ns=(entry.mtime_ns, entry.mtime_ns))
        return os.lstat(file)

    def record_file(self, path: str, sha256: str, status: os.stat_result) -> None:
        self.record[path] = PushedRecord(sha256, status.st_size, status.st_mtime_ns)

    def save(self) -> None:
        if self.record != self._saved:
            write_records(self.record_path, self.record)
            self._saved = dict(self.record)


def stat_or_none(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
