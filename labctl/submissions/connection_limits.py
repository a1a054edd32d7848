"""Bounds on what students' connections take: each is a process of the receiver's account."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labctl.errors import BusyError
from labctl.submissions.receiver import checked

# Of one student, at the same time: connections that broke stay for a while.
MAX_CONNECTIONS = 12
# Memory of one: it carries lines and parts of 8 MiB, and another process reads bundles.
MAX_MEMORY_BYTES = 512 * 1024**2


@contextmanager
def hold_connection(places: Path, student: str) -> Iterator[None]:
    """Take one of the student's places below `places`.

    Raises:
        BusyError: all of the student's places are taken. Hundreds of connections of one student
            would end the service for all.
    """
    places.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    for number in range(MAX_CONNECTIONS):
        descriptor = os.open(places / f"{checked(student)}.{number}", flags, 0o600)
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
        why="another one is taken when one of them has ended, which may take some minutes",
        hint="end what still runs: labctl up, labctl submit; then try again",
    )
