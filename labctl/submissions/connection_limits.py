"""Limits on students' connections: each is a process of the receiver's account."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labctl.errors import BusyError
from labctl.submissions.receiver import check_name

# For one student, at the same time: broken connections stay for a while.
MAX_CONNECTIONS = 12
# Memory of one connection: it carries lines and 8 MiB parts; another process reads bundles.
MAX_MEMORY_BYTES = 512 * 1024**2


@contextmanager
def hold_connection(places: Path, student: str) -> Iterator[None]:
    """Hold one of the student's connection slots, which are lock files in `places`.

    Raises:
        BusyError: all slots of the student are in use. Without a limit, one student's connections
            could end the service for everybody.
    """
    places.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    for number in range(MAX_CONNECTIONS):
        # Not state.locks: every command of every student begins here, and would import filelock.
        descriptor = os.open(places / f"{check_name(student)}.{number}", flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        try:
            yield
        finally:
            os.close(descriptor)
        return
    raise BusyError(
        f"{student} has {MAX_CONNECTIONS} connections to the keeper already",
        why="a broken connection can take some minutes to end",
        hint="stop commands of labctl that still run, then try again",
    )
