"""Hash files that have arrived while later ones still travel."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from labctl.errors import TransferError
from labctl.sync.durability import hash_on_disk, sync_file

# A smaller file is hashed after the transfer: one syncfs for all is faster than an fsync for each.
SMALLEST_BYTES = 4 * 1024**2


class BackgroundHasher:
    """Syncs and hashes large files of `folder`, one after the other, in a thread of its own.

    Only files that are `expected` are hashed: their names were checked. A daemon thread and no
    executor, whose exit would wait for the hash of a large file after Ctrl-C.
    """

    def __init__(self, folder: Path, expected: Collection[str]) -> None:
        self._folder = folder
        self._expected = expected
        self._due: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._found: dict[str, tuple[str, os.stat_result]] = {}
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._is_canceled = False
        self._disk_error: TransferError | None = None

    def __enter__(self) -> BackgroundHasher:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for all hashes, but not after an error. TransferError if the disk has failed."""
        self._is_canceled = error is not None
        self._due.put(None)
        if error is None:
            self._thread.join()
            if self._disk_error is not None:
                raise self._disk_error

    def add(self, path: str) -> None:
        """Hash this file, which will not change any more. Small files are left out."""
        if path in self._expected:
            self._due.put(path)

    def find(self, path: str) -> tuple[str, os.stat_result] | None:
        """Return (sha256, its stat) of a file that has not changed since; None without a hash."""
        found = self._found.get(path)
        if found is None or _identity(found[1]) != _identity((self._folder / path).lstat()):
            return None
        return found

    def _work(self) -> None:
        while (path := self._due.get()) is not None and not self._is_canceled:
            try:
                if (self._folder / path).lstat().st_size >= SMALLEST_BYTES:
                    sync_file(self._folder / path)
                    self._found[path] = hash_on_disk(self._folder / path)
            except TransferError as error:
                # The kernel reports a failed write once: a later sync would succeed.
                self._disk_error = error
                return
            except OSError:
                continue  # it is hashed after the transfer, and deleted if it cannot be read


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
