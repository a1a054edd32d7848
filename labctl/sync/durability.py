"""Files that survive a crash of this machine: written to its disk, and read back from there."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from labctl.errors import DiskFullError, TransferError

# How a kernel, a sandbox or a file system says that it has no such call.
NOT_OFFERED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def sync_files(folder: Path, files: Iterable[Path]) -> None:
    """Wait until the contents of `files`, all in the file system of `folder`, are on the disk.

    One syncfs where the system has it, else one fsync for each file. TransferError where the disk
    fails, DiskFullError where it turns out to be full only now.
    """
    try:
        if not _sync_filesystem(folder):
            for path in files:
                _sync(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise _lost(error) from error


def sync_directories(paths: Iterable[Path], top: Path) -> None:
    """Wait until the names of `paths` are on the disk: each directory from there up to `top`."""
    directories: set[Path] = set()
    for path in paths:
        for directory in path.parents:
            if directory in directories:
                break
            directories.add(directory)
            if directory == top:
                break
    try:
        for directory in directories:
            _sync(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _lost(error) from error


def hash_on_disk(path: Path) -> tuple[str, os.stat_result]:
    """The sha256 of what the disk has of a file that was synced, and the stat it belongs to."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if sys.platform == "linux":
            # Else the page cache would answer, whatever the disk has made of it.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        found = os.fstat(descriptor)
        return hashlib.file_digest(file, "sha256").hexdigest(), found


def _sync_filesystem(folder: Path) -> bool:
    """Whether there is a syncfs; OSError where it reports an error of the disk."""
    if sys.platform != "linux":
        return False
    import ctypes

    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is None:
        return False
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if syncfs(descriptor) == 0:
            return True
        number = ctypes.get_errno()
    finally:
        os.close(descriptor)
    if number in NOT_OFFERED:
        return False
    raise OSError(number, os.strerror(number), str(folder))


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
    finally:
        os.close(descriptor)


def _lost(error: OSError) -> TransferError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "make room, then labctl pull"
        return DiskFullError("the disk of this machine is full", why=str(error), hint=hint)
    return TransferError(
        "the disk of this machine did not keep what arrived",
        why=str(error),
        hint="check the disk (dmesg), then labctl pull",
    )
