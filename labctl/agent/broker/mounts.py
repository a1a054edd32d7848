"""What an account mounts, held fast: a symlink that is swapped afterwards leads nowhere.

Each directory is opened from the root on, one name at a time and through no link, must belong to
the account, and is bound below a directory that only root can change. The engine is told that
place, never the account's own path.
"""

from __future__ import annotations

import ctypes
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..host.paths import drop_tree
from .http import Refusal
from .rules import Account, Bind

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
PLACE = Path("/run/labctl/mounts")
# Data sets that staff shares with every account: seen at SHARED_TARGET, read-only.
SHARED = Path("/srv/labctl")
SHARED_TARGET = "/lab/shared"

_libc = ctypes.CDLL(None, use_errno=True)


def roots(account: Account) -> tuple[str, ...]:
    """Where an account's mounts may lie."""
    return (f"{account.home}/labctl", f"/dev/shm/labctl-{account.uid}")


def opened(account: Account, path: str) -> int:
    """A descriptor of the account's own directory or file at `path`, for binding only.

    Refusal (403) for a path outside its roots, through a link, or of somebody else's.
    """
    if not any(path == root or path.startswith(root + "/") for root in roots(account)):
        raise Refusal(403, f"{path[:200]!r} is not below the account's ~/labctl")
    names = path.split("/")[1:]
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        raise Refusal(403, f"{path[:200]!r} is no plain path")
    here = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            below = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = below
            _proved(account, os.fstat(here), path)
        found = os.fstat(here)
        if found.st_uid != account.uid or not _mountable(found.st_mode):
            raise Refusal(403, f"{path[:200]!r} does not belong to {account.name}")
    except OSError as error:
        os.close(here)
        raise Refusal(400, f"bind source path does not exist: {path[:200]}: {error}") from None
    except Refusal:
        os.close(here)
        raise
    return here


def _proved(account: Account, found: os.stat_result, path: str) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise Refusal(403, f"{path[:200]!r} leads through a link")
    if found.st_uid not in (0, account.uid):
        raise Refusal(403, f"{path[:200]!r} leads through a directory of somebody else's")


def _mountable(mode: int) -> bool:
    return stat.S_ISDIR(mode) or stat.S_ISREG(mode)


def begin() -> None:
    """Make the place, and drop what an earlier broker left there."""
    PLACE.mkdir(mode=0o700, parents=True, exist_ok=True)
    for one in PLACE.iterdir():
        release(one.name)
    if not os.path.ismount(PLACE):
        _mount(str(PLACE), str(PLACE), MS_BIND)
        _mount("none", str(PLACE), MS_PRIVATE)


def hold(account: Account, name: str, binds: list[Bind]) -> list[dict[str, Any]]:
    """Bind each below PLACE/<name>; the mounts as the engine takes them."""
    folder = PLACE / name
    folder.mkdir(mode=0o700)
    made = []
    try:
        for number, bind in enumerate(binds):
            place = folder / str(number)
            _held(account, bind, place)
            made.append(_told(str(place), bind.target, bind.read_only))
    except BaseException:
        release(name)
        raise
    if SHARED.is_dir() and all(bind.target != SHARED_TARGET for bind in binds):
        made.append(_told(str(SHARED), SHARED_TARGET, True))
    return made


def _held(account: Account, bind: Bind, place: Path) -> None:
    source = opened(account, bind.source)
    try:
        if stat.S_ISDIR(os.fstat(source).st_mode):
            place.mkdir(mode=0o700)
        else:
            place.touch(mode=0o600)
        _mount(f"/proc/self/fd/{source}", str(place), MS_BIND)
        flags = MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV
        _mount("none", str(place), flags | (MS_RDONLY if bind.read_only else 0))
    finally:
        os.close(source)


def _told(source: str, target: str, read_only: bool) -> dict[str, Any]:
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": read_only}


def release(name: str) -> None:
    """Drop the binds of a container that has started, or that is gone. Absent ones are fine."""
    folder = PLACE / name
    if not folder.is_dir():
        return
    for one in folder.iterdir():
        while _libc.umount2(str(one).encode(), MNT_DETACH) == 0:
            continue  # as often as something is mounted there
        with suppress(OSError):
            one.rmdir() if one.is_dir() else one.unlink()
    drop_empty(folder)


def drop_empty(folder: Path) -> None:
    """Never what lies in a mount that could not be dropped."""
    if not any(os.path.ismount(one) for one in folder.iterdir()):
        drop_tree(folder)


def held() -> list[str]:
    return [one.name for one in PLACE.iterdir()]


def _mount(source: str, target: str, flags: int) -> None:
    if _libc.mount(source.encode(), target.encode(), None, flags, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount {source} at {target}: {os.strerror(number)}")
