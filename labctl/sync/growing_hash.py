"""Hash files while they are still being written, from their contents on the disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from labctl.sync.durability import drop_cache, sync_descriptor

# Bytes that a step flushes to the disk and reads back. Larger steps would leave more work for the
# end; smaller ones would commit the file system's journal more often.
STEP_BYTES = 32 * 1024**2
BLOCK_BYTES = 1024**2


class NotGrowingError(Exception):
    """The file became shorter, so its hash may cover bytes that are gone."""


class GrowingFiles:
    """The files of `paths` that do not exist yet, and will be written from start to end.

    A file is hashed while it grows until `finish` is called, or until it cannot be read. Call
    `close` at the end.
    """

    def __init__(self, folder: Path, paths: Iterable[str]) -> None:
        self._folder = folder
        self._paths = {path for path in paths if not os.path.lexists(folder / path)}
        self._hashes: dict[str, _GrowingHash] = {}

    def __len__(self) -> int:
        return len(self._paths)

    def get_hashed_bytes(self, path: str) -> int:
        """Return how many bytes of this file are hashed, 0 if the file is not followed."""
        growing = self._hashes.get(path)
        return growing.hashed_bytes if growing is not None else 0

    def advance(self) -> None:
        """Hash what has arrived since the last call. TransferError if the disk fails."""
        for path in sorted(self._paths):
            try:
                if path not in self._hashes:
                    self._hashes[path] = _GrowingHash(self._folder / path)
                self._hashes[path].advance()
            except FileNotFoundError:
                continue  # it has not begun to arrive
            except (OSError, NotGrowingError):
                self._forget(path)

    def finish(self, path: str) -> tuple[str, os.stat_result] | None:
        """Return (sha256, the stat it belongs to) of a file that is now complete.

        None if the file was not hashed while it grew, and for each call after the first.
        TransferError if the disk fails.
        """
        growing = self._hashes.get(path)
        try:
            return growing.finish() if growing is not None else None
        except (OSError, NotGrowingError):
            return None
        finally:
            self._forget(path)

    def close(self) -> None:
        for path in list(self._hashes):
            self._forget(path)

    def _forget(self, path: str) -> None:
        self._paths.discard(path)
        if growing := self._hashes.pop(path, None):
            growing.close()


class _GrowingHash:
    """Hashes one file. Each byte is on the disk, and read back from there, before it is hashed.

    A program that goes back to write earlier bytes again makes the hash wrong.
    """

    def __init__(self, path: Path) -> None:
        self.hashed_bytes = 0
        self._digest = hashlib.sha256()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def advance(self) -> None:
        """Hash what has arrived, in full steps. TransferError if the disk fails."""
        size = os.fstat(self._descriptor).st_size
        end = size - size % STEP_BYTES
        if end != self.hashed_bytes:
            sync_descriptor(self._descriptor)
            self._hash_up_to(end)

    def finish(self) -> tuple[str, os.stat_result]:
        """Hash the rest of the complete file; return (sha256, the stat it belongs to)."""
        sync_descriptor(self._descriptor)
        status = os.fstat(self._descriptor)
        self._hash_up_to(status.st_size)
        return self._digest.hexdigest(), status

    def close(self) -> None:
        os.close(self._descriptor)

    def _hash_up_to(self, end: int) -> None:
        drop_cache(self._descriptor, self.hashed_bytes, end)
        buffer = memoryview(bytearray(BLOCK_BYTES))
        while self.hashed_bytes != end:
            wanted = min(BLOCK_BYTES, max(0, end - self.hashed_bytes))
            count = os.preadv(self._descriptor, [buffer[:wanted]], self.hashed_bytes)
            if count == 0:
                raise NotGrowingError
            self._digest.update(buffer[:count])
            self.hashed_bytes += count
