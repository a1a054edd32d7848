"""One action at a time on one lab: a lock that the kernel drops when its holder dies."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from labctl.errors import BusyError, LabError

if TYPE_CHECKING:
    from filelock import FileLock

# By then the holder has written who it is, and nobody need hear of a moment's wait.
ANNOUNCED_S = 0.5
MOST_NOTE_BYTES = 4096


@contextmanager
def hold_lock(
    file: Path,
    what: str,
    *,
    wait_s: float,
    on_wait: Callable[[str], None] = lambda holder: None,
    inheritable: bool = False,
) -> Iterator[None]:
    """Hold `file` for the action `what`. BusyError that names the holder after `wait_s` seconds.

    `on_wait` is called once, with who holds it, where there is somebody to wait for. An
    `inheritable` lock is held by programs too that are started with their files left open.
    Not re-entrant: the same thread that takes it twice waits for itself.
    """
    lock = _make_lock(file, what, inheritable=inheritable)
    taken = _take(lock, min(wait_s, ANNOUNCED_S))
    if not taken and wait_s > ANNOUNCED_S:
        on_wait(_describe_holder(file))
        taken = _take(lock, wait_s - ANNOUNCED_S)
    if not taken:
        holder = _describe_holder(file)
        error = BusyError(
            f"cannot begin `{what}`: {holder}",
            why=f"two at a time would undo each other; waited {wait_s:g} s",
            hint="try again when it is done",
        )
        error.holder = holder
        raise error
    try:
        yield
    finally:
        lock.release()


def _make_lock(file: Path, what: str, *, inheritable: bool) -> FileLock:
    """A lock of this call alone, so that threads exclude each other, and any may release it."""
    # Imported late: `labctl status` locks nothing.
    from filelock import FileLock

    def write_note(descriptor: int) -> None:
        note = json.dumps({"pid": os.getpid(), "what": what, "since": time.time()})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, note.encode(), 0)
        os.set_inheritable(descriptor, inheritable)

    # Another kind of lock would not keep out who uses this one.
    return FileLock(
        file, mode=0o600, thread_local=False, fallback_to_soft=False, on_acquired=write_note
    )


def _take(lock: FileLock, wait_s: float) -> bool:
    """Whether it was free within `wait_s` seconds; LabError where the file cannot be locked."""
    from filelock import Timeout

    file = Path(lock.lock_file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock.acquire(timeout=wait_s)
    except Timeout:
        return False
    except OSError as error:
        raise LabError(
            f"cannot lock {file}",
            why=error.strerror or "",
            hint="move it to a local disk of your own; labctl's state: export LABCTL_STATE_DIR=DIR",
        ) from error
    return True


def _describe_holder(file: Path) -> str:
    """Who holds the lock, in words; its note may not be there yet, or be another program's."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            note = json.loads(os.pread(descriptor, MOST_NOTE_BYTES, 0))
        finally:
            os.close(descriptor)
        since = time.strftime("%H:%M:%S", time.localtime(note["since"]))
        return f"labctl (pid {note['pid']}) is busy with `{note['what']}` since {since}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another labctl is busy with this lab"
