"""One action at a time on one lab: a lock that the kernel drops when its holder dies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from labctl.decoding import decode_json
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
# seconds between two looks at how far the holder is
PROGRESS_S = 0.5
MOST_PROGRESS_CHARS = 200


class _LockNote(msgspec.Struct, frozen=True):
    """What a lock file says about its holder. Earlier versions write the first two, and `since`."""

    pid: int
    what: str
    since: float = 0.0
    is_command: bool = True
    progress: str = ""


@contextmanager
def hold_lock(
    file: Path,
    what: str,
    *,
    wait_s: float,
    is_command: bool = True,
    on_wait: Callable[[str], None] = lambda holder: None,
    on_progress: Callable[[str], None] = lambda text: None,
    inheritable: bool = False,
) -> Iterator[None]:
    """Hold a lock on `file` for the action `what`; LockHeldError, with its holder, after `wait_s`.

    `what` is a command of labctl, such as "push", or without `is_command` what the holder does,
    such as "uploading the image X". `on_wait` is called once, with a description of the holder, if
    the lock is not free, and `on_progress` with each text that the holder then gives to
    `note_progress`. Programs that inherit open files also hold an `inheritable` lock. The lock is
    not re-entrant: a thread that takes it twice waits for itself.
    """
    note = _LockNote(pid=os.getpid(), what=what, is_command=is_command)
    lock = _make_lock(file, note, inheritable=inheritable)
    is_held = _acquire(lock, min(wait_s, ANNOUNCED_S))
    if not is_held and wait_s > ANNOUNCED_S:
        on_wait(_describe_holder(file))
        watch = _ProgressWatch(file, on_progress)
        is_held = _acquire(lock, wait_s - ANNOUNCED_S, watch.read_progress)
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


def _make_lock(file: Path, note: _LockNote, *, inheritable: bool) -> filelock.FileLock:
    """Create a lock for one call only, so that threads exclude each other; any can release it."""

    def write_note(descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        current = msgspec.structs.replace(note, since=time.time())
        os.pwrite(descriptor, msgspec.json.encode(current), 0)
        os.set_inheritable(descriptor, inheritable)

    # A different kind of lock would not exclude processes that use this one.
    return filelock.FileLock(
        file, mode=0o600, thread_local=False, fallback_to_soft=False, on_acquired=write_note
    )


def note_progress(file: Path, text: str) -> None:
    """Show those who wait for the lock, which the caller holds, how far its action is."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # the note is only for people
    try:
        note = _parse_note(descriptor)
        note = msgspec.structs.replace(note, progress=text[:MOST_PROGRESS_CHARS])
        content = msgspec.json.encode(note)
        os.pwrite(descriptor, content.ljust(os.fstat(descriptor).st_size), 0)
    except (OSError, msgspec.DecodeError):
        return
    finally:
        os.close(descriptor)


class _ProgressWatch:
    """Reads what the holder of a lock notes, and passes each new text on."""

    def __init__(self, file: Path, on_progress: Callable[[str], None]) -> None:
        self._file = file
        self._on_progress = on_progress
        self._text = ""
        self._looked_at = 0.0

    def read_progress(self) -> None:
        if time.monotonic() - self._looked_at < PROGRESS_S:
            return
        self._looked_at = time.monotonic()
        try:
            text = _read_note(self._file).progress
        except (OSError, msgspec.DecodeError):
            return
        if text not in ("", self._text):
            self._text = text
            self._on_progress(text)


def _acquire(lock: FileLock, wait_s: float, on_poll: Callable[[], None] = lambda: None) -> bool:
    """Acquire a lock within `wait_s` seconds; False if it is not free, LabError if that fails."""
    file = Path(lock.lock_file)

    def poll() -> bool:
        on_poll()
        return is_canceled()

    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock.acquire(timeout=wait_s, cancel_check=poll)
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
        note = _read_note(file)
        since = time.strftime("%H:%M:%S", time.localtime(note.since))
        doing = f"running `{note.what}`" if note.is_command else note.what
        return f"labctl (pid {note.pid}) has been {doing} since {since}"
    except (OSError, ValueError, OverflowError, msgspec.DecodeError):
        return "another labctl is working on this lab"


def _read_note(file: Path) -> _LockNote:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        return _parse_note(descriptor)
    finally:
        os.close(descriptor)


def _parse_note(descriptor: int) -> _LockNote:
    """Return the note in an open lock file; msgspec.DecodeError if it has none."""
    return decode_json(os.pread(descriptor, MOST_NOTE_BYTES, 0), _LockNote)
