"""The lock that allows one transfer of a lab at a time.

Pushes and pulls of one lab share staging directories here and on its server. Only the holder of
this lock may use them, so that a transfer can safely continue what a killed one left there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labctl.events import Note, Reporter
from labctl.state.locks import hold_lock

# The longest time of one transfer. The kernel releases the lock of a process that has died.
WAIT_S = 6 * 3600.0


@contextmanager
def hold_transfers(
    lab_root: Path, what: str, reporter: Reporter, *, wait_s: float = WAIT_S
) -> Iterator[None]:
    """Hold the transfer lock of the lab in `lab_root` for `what`, such as "push".

    Other processes and threads wait, and their reporters name the holder. BusyError, also with the
    holder's name, after `wait_s` seconds. Not re-entrant.
    """

    def announce(holder: str) -> None:
        reporter.emit(Note(text=f"{holder}; waiting for it to finish"))

    # In the lab itself: processes with different state directories still write to these files.
    lock = lab_root / ".labctl" / "transfer.lock"
    # An rsync that briefly outlives a killed labctl inherits the lock.
    with hold_lock(lock, what, wait_s=wait_s, on_wait=announce, inheritable=True):
        yield
