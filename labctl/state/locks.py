"""One deed at a time on one lab: a lock that the kernel drops when its holder dies."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from labctl.errors import BusyError, LabError

POLL_S = 0.05
ANNOUNCED_S = 0.5


@contextmanager
def held(
    file: Path,
    what: str,
    *,
    wait_s: float,
    on_wait: Callable[[str], None] = lambda holder: None,
    inheritable: bool = False,
) -> Iterator[None]:
    """Hold `file` for the deed `what`. BusyError that names the holder after `wait_s` seconds.

    `on_wait` is called once, with who holds it, where there is somebody to wait for. An
    `inheritable` lock is held by programs too that are started with their files left open.
    Not re-entrant: the same thread that takes it twice waits for itself.
    """
    descriptor = _taken(file, what, wait_s, on_wait)
    os.set_inheritable(descriptor, inheritable)
    try:
        yield
    finally:
        # The file stays: whoever waits has it open, and would lock one that is gone.
        os.ftruncate(descriptor, 0)
        os.close(descriptor)


def _taken(file: Path, what: str, wait_s: float, on_wait: Callable[[str], None]) -> int:
    """The locked file's descriptor, with who holds it and why written inside."""
    note = json.dumps({"pid": os.getpid(), "what": what, "since": time.time()}).encode()
    descriptor = -1
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _wait(descriptor, what, wait_s, on_wait)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, note, 0)
    except OSError as error:
        _close(descriptor)
        raise LabError(
            f"cannot lock {file}",
            why=error.strerror or "",
            hint="move it to a local disk of your own; labctl's state: export LABCTL_STATE_DIR=DIR",
        ) from error
    except BaseException:
        _close(descriptor)
        raise
    return descriptor


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def _wait(descriptor: int, what: str, wait_s: float, on_wait: Callable[[str], None]) -> None:
    # flock has no time limit of its own, and a signal for one would not do in threads: so a poll.
    begun = time.monotonic()
    deadline = begun + wait_s
    is_announced = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise BusyError(
                    f"cannot begin `{what}`: {_holder(descriptor)}",
                    why=f"two at a time would undo each other; waited {wait_s:g} s",
                    hint="try again when it is done",
                ) from None
        # By now the holder has written who it is, and nobody need hear of a moment's wait.
        if not is_announced and time.monotonic() - begun >= ANNOUNCED_S:
            is_announced = True
            on_wait(_holder(descriptor))
        time.sleep(POLL_S)


def _holder(descriptor: int) -> str:
    """Who holds the lock, in words."""
    try:
        note = json.loads(os.pread(descriptor, 4096, 0))
        since = time.strftime("%H:%M:%S", time.localtime(note["since"]))
        return f"labctl (pid {note['pid']}) is busy with `{note['what']}` since {since}"
    except (ValueError, KeyError, TypeError):
        return "another labctl is busy with this lab"
