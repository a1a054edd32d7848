"""Hash files during their transfer: complete ones, and large ones that still grow."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from labctl.parallel import start_daemon
from labctl.sync.durability import hash_on_disk, sync_file
from labctl.sync.growing_hash import STEP_BYTES, GrowingFiles

# A smaller file is hashed after the transfer: one syncfs for all is faster than an fsync for each.
SMALLEST_BYTES = 4 * 1024**2
# seconds between two checks of the files that still grow
POLL_S = 0.1


class BackgroundHasher:
    """Syncs and hashes large files of `folder`, one after the other, in a thread of its own.

    Only files that are `expected` (names that were checked, with their sizes) are hashed.

    With `follow`, the caller promises that a file which does not exist yet is written from its
    start to its end, and that `add` is called after each time that a file was written. Then such a
    file is hashed while it grows, and `add` only hashes the rest. A file that is added again, or
    changes after it was added, is hashed again as a whole.
    """

    def __init__(self, folder: Path, expected: Mapping[str, int], *, follow: bool = False) -> None:
        self._folder = folder
        self._expected = expected
        self._due: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._found: dict[str, tuple[str, os.stat_result]] = {}
        large = (path for path, size in expected.items() if size >= STEP_BYTES)
        self._growing = GrowingFiles(folder, large if follow else ())
        self._is_canceled = False

    def __enter__(self) -> BackgroundHasher:
        self._work_done = start_daemon(self._work)
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
            self._work_done.result()

    def add(self, path: str) -> None:
        """Hash this file, which is complete. Small files are left out."""
        if path in self._expected:
            self._due.put(path)

    def find(self, path: str) -> tuple[str, os.stat_result] | None:
        """Return (sha256, its stat) of a file that has not changed since; None without a hash.

        The contents of such a file are on the disk.
        """
        found = self._found.get(path)
        with contextlib.suppress(OSError):  # a file that is gone has no hash
            if found and _identity(found[1]) == _identity((self._folder / path).lstat()):
                return found
        return None

    def get_hashed_bytes(self, path: str) -> int:
        """Return how many bytes of a file that still grows are hashed."""
        return self._growing.get_hashed_bytes(path)

    def _work(self) -> None:
        with contextlib.closing(self._growing):
            # A TransferError ends it: the kernel reports a failed write once.
            while (path := self._wait_for_file()) is not None and not self._is_canceled:
                self._hash(path)

    def _wait_for_file(self) -> str | None:
        """Return the next complete file, None after the last; hash growing files until then."""
        while self._growing and not self._is_canceled:
            try:
                return self._due.get(timeout=POLL_S)
            except queue.Empty:
                self._growing.advance()
        return self._due.get()

    def _hash(self, path: str) -> None:
        file = self._folder / path
        try:
            if found := self._growing.finish(path):
                self._found[path] = found
            elif file.lstat().st_size >= SMALLEST_BYTES:
                sync_file(file)
                self._found[path] = hash_on_disk(file)
        except OSError:
            # It is hashed after the transfer, and deleted if it cannot be read.
            self._found.pop(path, None)


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
