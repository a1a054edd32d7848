"""The lock that allows one transfer of a lab at a time.

Pushes and pulls of one lab share staging directories here and on its server. Only the holder of
this lock may use them, so that a transfer can safely continue what a killed one left there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path

from labctl.events import Reporter, report_lock_wait
from labctl.state.locks import hold_lock

# The longest time of one transfer. The kernel releases the lock of a process that has died.
WAIT_S = 6 * 3600.0


@contextmanager
def share_transfers() -> Iterator[None]:
    """Let the parts that run inside the block transfer side by side, under one lock.

    They must not share a directory, neither on the server nor here. Inside such a block, another
    one changes nothing.
    """
    if _shared.get() is not None:
        yield
        return
    token = _shared.set(_SharedLock())
    try:
        yield
    finally:
        _shared.reset(token)


@contextmanager
def name_command(command: str) -> Iterator[None]:
    """Let transfers inside the block name `command`, which the user has typed, to who waits."""
    token = _command.set(command)
    try:
        yield
    finally:
        _command.reset(token)


@contextmanager
def hold_transfers(
    lab_root: Path, what: str, reporter: Reporter, *, wait_s: float = WAIT_S
) -> Iterator[None]:
    """Hold the transfer lock of the lab in `lab_root` for `what`, such as "push".

    A part of a larger command is named after that, see `name_command`.
    Other processes and threads wait, and their reporters name the holder. BusyError, also with the
    holder's name, after `wait_s` seconds. Not re-entrant, but parts may share it.
    """
    # In the lab itself: processes with different state directories still write to these files.
    lock = lab_root / ".labctl" / "transfer.lock"
    name = _command.get() or what
    # An rsync that briefly outlives a killed labctl inherits the lock.
    lock_for_one = report_lock_wait(
        reporter,
        lambda on_wait, _: hold_lock(lock, name, wait_s=wait_s, on_wait=on_wait, inheritable=True),
    )
    shared = _shared.get()
    with lock_for_one if shared is None else shared.hold(lock_for_one):
        yield


class _SharedLock:
    """A lock that the first of several threads acquires and the last one releases."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._holders = 0
        self._held = ExitStack()

    @contextmanager
    def hold(self, lock: AbstractContextManager[None]) -> Iterator[None]:
        """Hold `lock`, or the lock that another thread has acquired here."""
        with self._guard:
            if not self._holders:
                self._held.enter_context(lock)
            self._holders += 1
        try:
            yield
        finally:
            with self._guard:
                self._holders -= 1
                if not self._holders:
                    self._held.close()


_shared: ContextVar[_SharedLock | None] = ContextVar("labctl_transfers", default=None)
_command: ContextVar[str] = ContextVar("labctl_command", default="")
