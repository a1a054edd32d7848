"""The local files of a push: find those that change during the transfer, and hash them.

A first push has thousands of small files, so each system call for a file counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from labctl.model import FileEntry
from labctl.sync.scan import file_identity

BLOCK_BYTES = 1024**2
GONE = (FileNotFoundError, NotADirectoryError)


class SourceFiles:
    """The state of a transfer's files at its start; files that change meanwhile are sent again.

    `stats` has the files that are still as they were scanned, `changed` the paths of the others.
    """

    def __init__(self, root: Path, files: Sequence[FileEntry]) -> None:
        self._root = root
        self.stats: dict[str, os.stat_result] = {}
        self.changed: list[str] = []
        for entry in files:
            status = self._stat(entry.path)
            if status and (status.st_size, status.st_mtime_ns) == (entry.size, entry.mtime_ns):
                self.stats[entry.path] = status
            else:
                self.changed.append(entry.path)

    def require_readable(self, files: Sequence[FileEntry]) -> None:
        """OSError for a file that this user may not read, before anything is sent."""
        user = os.geteuid()
        for entry in files:
            status = self.stats[entry.path]
            # The user's own readable file needs no system call. For others, groups and ACLs count.
            if status.st_uid != user or not status.st_mode & stat.S_IRUSR:
                with contextlib.suppress(*GONE):
                    os.close(os.open(f"{self._root}/{entry.path}", os.O_RDONLY))

    def list_changed(self) -> list[str]:
        """List the files of `stats` that have changed since the start."""
        return [path for path, before in self.stats.items() if not self._is_same(path, before)]

    def _is_same(self, path: str, before: os.stat_result) -> bool:
        now = self._stat(path)
        return now is not None and file_identity(before) == file_identity(now)

    def _stat(self, path: str) -> os.stat_result | None:
        try:
            return os.lstat(f"{self._root}/{path}")
        except GONE:
            return None


class SourceHasher:
    """Hashes files in a thread during their transfer. OSError for an unreadable file."""

    def __init__(self, root: Path, files: Sequence[FileEntry]) -> None:
        self._root = root
        self._files = files
        self._hashes: dict[str, str] = {}
        self._error: OSError | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> SourceHasher:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ending.set()
        self._thread.join()

    def wait(self) -> dict[str, str]:
        """Return all hashes by path, "" for a file that was deleted."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._hashes

    def _run(self) -> None:
        try:
            for entry in self._files:
                self._hashes[entry.path] = self._hash(entry)
        except OSError as error:
            self._error = error

    def _hash(self, entry: FileEntry) -> str:
        # Not through a Path and a file object: they take longer than the hash of a small file.
        try:
            descriptor = os.open(f"{self._root}/{entry.path}", os.O_RDONLY)
        except GONE:
            return ""
        try:
            digest = hashlib.sha256()
            # One byte more than the file has, so that one read finds its end.
            wanted = min(entry.size + 1, BLOCK_BYTES)
            while not self._ending.is_set() and (block := os.read(descriptor, wanted)):
                digest.update(block)
                if len(block) < wanted:
                    break
            return digest.hexdigest()
        finally:
            os.close(descriptor)
