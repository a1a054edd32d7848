"""Make files survive a crash of this machine: flush them to the disk, and read them back."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from labctl.errors import DiskFullError, TransferError
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    import ctypes

# Errors with which a kernel, a sandbox or a file system says that it lacks a call.
NOT_OFFERED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def sync_files(folder: Path, files: Iterable[Path]) -> None:
    """Wait until the contents of `files`, all in the file system of `folder`, are on the disk.

    Uses one syncfs where the system has it, else one fsync for each file. TransferError if the disk
    fails, DiskFullError if it turns out to be full only now.
    """
    try:
        if not _sync_filesystem(folder):
            for path in files:
                _sync(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise _make_disk_error(error) from error


def sync_file(path: Path) -> None:
    """Wait until the contents of one file are on the disk; raises the errors of `sync_files`."""
    try:
        _sync(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise _make_disk_error(error) from error


def sync_descriptor(descriptor: int) -> None:
    """Wait until the contents of an open file are on the disk; raises as `sync_files` does."""
    try:
        _flush(descriptor)
    except OSError as error:
        raise _make_disk_error(error) from error


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
        raise _make_disk_error(error) from error


def hash_on_disk(path: Path) -> tuple[str, os.stat_result]:
    """Hash what the disk holds of a synced file; return (sha256, the stat it belongs to)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        found = os.fstat(descriptor)
        drop_cache(descriptor, 0, found.st_size)
        return hashlib.file_digest(file, "sha256").hexdigest(), found


def drop_cache(descriptor: int, start: int, end: int) -> None:
    """Have the next read of these synced bytes come from the disk, not from the page cache."""
    if sys.platform == "linux" and end > start:
        os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)


def _sync_filesystem(folder: Path) -> bool:
    """Call syncfs; False if the system has none, OSError if it reports a disk error."""
    if sys.platform != "linux":
        return False
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
        _flush(descriptor)
    finally:
        os.close(descriptor)


def _flush(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise


def _make_disk_error(error: OSError) -> TransferError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some disk space, then repeat the command"
        return DiskFullError("the disk of this machine is full", why=str(error), hint=hint)
    return TransferError(
        "the disk of this machine failed to store the downloaded files",
        why=str(error),
        hint="check the disk (dmesg), then repeat the command",
    )
