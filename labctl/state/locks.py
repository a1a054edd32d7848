"""One action at a time on one lab: a lock that the kernel drops when its holder dies."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from labctl.errors import LabError, LockHeldError
from labctl.lazy import lazy_imports
from labctl.parallel import CanceledError, is_canceled

if TYPE_CHECKING:
    from filelock import FileLock

with lazy_imports(__name__):
    import filelock

# Seconds before a wait is announced: by then the holder has written its note, and a shorter wait
# needs no message.
ANNOUNCED_S = 0.5
MOST_NOTE_BYTES = 4096


@contextmanager
def hold_lock(
    file: Path,
    what: str,
    *,
    wait_s: float,
    is_command: bool = True,
    on_wait: Callable[[str], None] = lambda holder: None,
    inheritable: bool = False,
) -> Iterator[None]:
    """Hold a lock on `file` for the action `what`; LockHeldError, with its holder, after `wait_s`.

    `what` is a command of labctl, such as "push", or without `is_command` what the holder does,
    such as "uploading the image X". `on_wait` is called once, with a description of the holder, if
    the lock is not free. Programs that inherit open files also hold an `inheritable` lock. The lock
    is not re-entrant: a thread that takes it twice waits for itself.
    """
    note = {"pid": os.getpid(), "what": what, "is_command": is_command}
    lock = _make_lock(file, note, inheritable=inheritable)
    is_held = _acquire(lock, min(wait_s, ANNOUNCED_S))
    if not is_held and wait_s > ANNOUNCED_S:
        on_wait(_describe_holder(file))
        is_held = _acquire(lock, wait_s - ANNOUNCED_S)
    if not is_held:
        holder = _describe_holder(file)
        raise LockHeldError(
            f"cannot start {f'`{what}`' if is_command else what}: {holder}",
            holder=holder,
            why=f"two at the same time would interfere; waited {wait_s:g} s",
            hint="try again when it has finished",
        )
    try:
        yield
    finally:
        lock.release()


def _make_lock(file: Path, note: Mapping[str, object], *, inheritable: bool) -> filelock.FileLock:
    """Create a lock for one call only, so that threads exclude each other; any can release it."""

    def write_note(descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({**note, "since": time.time()}).encode(), 0)
        os.set_inheritable(descriptor, inheritable)

    # A different kind of lock would not exclude processes that use this one.
    return filelock.FileLock(
        file, mode=0o600, thread_local=False, fallback_to_soft=False, on_acquired=write_note
    )


def _acquire(lock: FileLock, wait_s: float) -> bool:
    """Acquire a lock within `wait_s` seconds; False if it is not free, LabError if that fails."""
    file = Path(lock.lock_file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock.acquire(timeout=wait_s, cancel_check=is_canceled)
    except filelock.Timeout:
        if is_canceled():
            raise CanceledError from None
        return False
    except OSError as error:
        raise LabError(
            f"cannot lock {file}",
            why=error.strerror or "",
            hint="move it to a local disk; for labctl's state: export LABCTL_STATE_DIR=DIR",
        ) from error
    return True


def _describe_holder(file: Path) -> str:
    """Describe the holder of the lock; its note may be missing, or be from another program."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            note = json.loads(os.pread(descriptor, MOST_NOTE_BYTES, 0))
        finally:
            os.close(descriptor)
        since = time.strftime("%H:%M:%S", time.localtime(note["since"]))
        is_command = note.get("is_command", True)  # earlier versions write no such key
        doing = f"running `{note['what']}`" if is_command else note["what"]
        return f"labctl (pid {note['pid']}) has been {doing} since {since}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "another labctl is working on this lab"
