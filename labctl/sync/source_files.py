"""The local files of a push: find those that change during the transfer, and hash them.

A first push has thousands of small files, so each system call for a file counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labctl.model import FileEntry
from labctl.parallel import start_daemon
from labctl.sync.scan import file_identity

if TYPE_CHECKING:
    from concurrent.futures import Future

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


@contextlib.contextmanager
def hash_during_transfer(
    root: Path, files: Sequence[FileEntry]
) -> Iterator[Future[dict[str, str]]]:
    """Hash files in a thread during the block; yield their future hashes by path.

    A file that was deleted has the hash "". OSError for an unreadable file.
    """
    ending = threading.Event()
    hashes = start_daemon(
        lambda: {entry.path: _hash(f"{root}/{entry.path}", entry.size, ending) for entry in files}
    )
    try:
        yield hashes
    finally:
        ending.set()
        hashes.exception()  # waits


def _hash(path: str, size: int, ending: threading.Event) -> str:
    # Not through a Path and a file object: they take longer than the hash of a small file.
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except GONE:
        return ""
    try:
        digest = hashlib.sha256()
        # One byte more than the file has, so that one read finds its end.
        wanted = min(size + 1, BLOCK_BYTES)
        while not ending.is_set() and (block := os.read(descriptor, wanted)):
            digest.update(block)
            if len(block) < wanted:
                break
        return digest.hexdigest()
    finally:
        os.close(descriptor)
