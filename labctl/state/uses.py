"""Locks that say which commands of this machine use a lab's server. They end with the process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from labctl.state import State

# A `labctl run` that starts or follows a run; a `forward` or `serve` that is open in a terminal; a
# `profile` that shows its page.
Use = Literal["run", "forward", "profile"]


@contextmanager
def _open_lock_file(state: State, lab_id: str, use: str) -> Iterator[int]:
    """Open the file of one use of one lab. Its users hold a lock on it."""
    file = state.path.parent / "locks" / f"{lab_id}.{use}"
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def hold_use(state: State, lab_id: str, use: Use) -> Iterator[None]:
    """Mark the lab's server as used until the block ends; any number of processes can do so."""
    with _open_lock_file(state, lab_id, use) as descriptor:
        # A file system without locks leaves no mark; `State.lock` reports such a directory.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


def is_used(state: State, lab_id: str, use: Use) -> bool:
    """Whether any process of this machine holds this use now, the caller's own included."""
    with _open_lock_file(state, lab_id, use) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass  # a file system without locks
        return False


@contextmanager
def hold_forward(state: State, lab_id: str, service: str, local_port: int) -> Iterator[None]:
    """Let other processes find an open forward of this one until the block ends.

    If another process has such a forward, that one is found.
    """
    with _open_lock_file(state, lab_id, f"forward.{service}") as descriptor:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(local_port).encode(), 0)
        yield


def find_forward_port(state: State, lab_id: str, service: str) -> int:
    """Find the local port of a forward that another process has open; 0 without one."""
    with _open_lock_file(state, lab_id, f"forward.{service}") as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(os.pread(descriptor, 8, 0) or b"0")
        except OSError:
            pass  # a file system without locks
        return 0
