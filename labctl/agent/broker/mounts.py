"""Mounts of accounts, pinned so that swapping a symlink afterwards has no effect.

Each directory is opened from the root, one name at a time and never through a link, must belong to
the account or, read-only, to the data sets that staff shares, and is bind-mounted below a directory
that only root can change. The engine gets that path, never the account's own path.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...wire.containment import is_contained
from ..host.engine_objects import Mount
from ..host.paths import drop_tree
from .http import HttpRefusal
from .rules import BindMount, BrokerAccount
from .shared_data import SHARED, SHARED_TARGET

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
PLACE = Path("/run/labctl/mounts")

_libc = ctypes.CDLL(None, use_errno=True)


def list_roots(account: BrokerAccount) -> tuple[str, ...]:
    """Return the directories in which an account's mounts may be."""
    return (f"{account.home}/labctl", f"/dev/shm/labctl-{account.uid}")


def open_owned_path(account: BrokerAccount, path: str) -> int:
    """Return a descriptor, for bind mounts only, of the account's own directory or file.

    Refusal (403) for a path outside its roots, through a link, or owned by another account.
    """
    if not any(path == root or path.startswith(root + "/") for root in list_roots(account)):
        raise HttpRefusal(403, f"{path[:200]!r} is not below the account's ~/labctl")

    def check(status: os.stat_result) -> None:
        if status.st_uid not in (0, account.uid):
            raise HttpRefusal(403, f"{path[:200]!r} passes through a directory of another account")

    descriptor = _open_path(path, check)
    status = os.fstat(descriptor)
    if status.st_uid != account.uid or not _is_mountable(status.st_mode):
        os.close(descriptor)
        raise HttpRefusal(403, f"{path[:200]!r} does not belong to {account.name}")
    return descriptor


def open_shared_path(bind: BindMount) -> int:
    """Return a descriptor, for bind mounts only, of a directory that staff shares.

    Every container has all of SHARED read-only, so its parts need no check of their owner. Refusal
    (403) for a mount that could write there, for a link, and for anything but a directory.
    """
    if not bind.read_only:
        raise HttpRefusal(403, f"{bind.source[:200]!r} is shared data, which is read-only")
    descriptor = _open_path(bind.source, lambda status: None)
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise HttpRefusal(403, f"{bind.source[:200]!r} is not a directory")
    return descriptor


def _open_path(path: str, check: Callable[[os.stat_result], None]) -> int:
    """Open a path from the root without following links; `check` may refuse each part."""
    if not is_contained(path[1:]):
        raise HttpRefusal(403, f"{path[:200]!r} is not a plain path")
    descriptor = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in path.split("/")[1:]:
            next_descriptor = os.open(
                name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor
            )
            os.close(descriptor)
            descriptor = next_descriptor
            status = os.fstat(descriptor)
            if stat.S_ISLNK(status.st_mode):
                raise HttpRefusal(403, f"{path[:200]!r} contains a symbolic link")
            check(status)
    except OSError as error:
        os.close(descriptor)
        raise HttpRefusal(400, f"bind source path does not exist: {path[:200]}: {error}") from None
    except HttpRefusal:
        os.close(descriptor)
        raise
    return descriptor


def _is_mountable(mode: int) -> bool:
    return stat.S_ISDIR(mode) or stat.S_ISREG(mode)


def prepare_directory() -> None:
    """Create the directory for mounts, and remove those of an earlier broker."""
    PLACE.mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in PLACE.iterdir():
        release(entry.name)
    if not os.path.ismount(PLACE):
        _mount(str(PLACE), str(PLACE), MS_BIND)
        _mount("none", str(PLACE), MS_PRIVATE)


def bind_mounts(account: BrokerAccount, name: str, binds: list[BindMount]) -> list[Mount]:
    """Bind-mount each below PLACE/<name>; return the mounts as the engine takes them."""
    folder = PLACE / name
    folder.mkdir(mode=0o700)
    engine_mounts = []
    try:
        for number, bind in enumerate(binds):
            path = folder / str(number)
            _bind(account, bind, path)
            engine_mounts.append(_engine_mount(str(path), bind.target, bind.read_only))
    except BaseException:
        release(name)
        raise
    if SHARED.is_dir() and all(bind.target != SHARED_TARGET for bind in binds):
        engine_mounts.append(_engine_mount(str(SHARED), SHARED_TARGET, True))
    return engine_mounts


def _bind(account: BrokerAccount, bind: BindMount, path: Path) -> None:
    if bind.source.startswith(f"{SHARED}/"):
        source = open_shared_path(bind)
    else:
        source = open_owned_path(account, bind.source)
    try:
        if stat.S_ISDIR(os.fstat(source).st_mode):
            path.mkdir(mode=0o700)
        else:
            path.touch(mode=0o600)
        _mount(f"/proc/self/fd/{source}", str(path), MS_BIND)
        flags = MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV
        _mount("none", str(path), flags | (MS_RDONLY if bind.read_only else 0))
    finally:
        os.close(source)


def _engine_mount(source: str, target: str, read_only: bool) -> Mount:
    return Mount("bind", target, Source=source, ReadOnly=read_only)


def release(name: str) -> None:
    """Remove the binds of a container that has started or is gone. Absent ones are fine."""
    folder = PLACE / name
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        while _libc.umount2(str(entry).encode(), MNT_DETACH) == 0:
            continue  # until nothing is mounted there
        with suppress(OSError):
            entry.rmdir() if entry.is_dir() else entry.unlink()
    drop_empty(folder)


def drop_empty(folder: Path) -> None:
    """Remove the directory, unless something is still mounted in it."""
    if not any(os.path.ismount(entry) for entry in folder.iterdir()):
        drop_tree(folder)


def list_held() -> list[str]:
    return [entry.name for entry in PLACE.iterdir()]


def _mount(source: str, target: str, flags: int) -> None:
    if _libc.mount(source.encode(), target.encode(), None, flags, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount {source} at {target}: {os.strerror(number)}")
