"""One transfer of a lab at a time, whoever starts it.

Pushes and pulls of one lab share staging directories here and on its server. Only the holder of
this lock may touch them, so what a killed transfer has left there is safe to continue.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labctl.events import Note, Reporter
from labctl.state.locks import hold_lock

# As long as one transfer may take. The kernel frees the lock of a process that has died.
WAIT_S = 6 * 3600.0


@contextmanager
def hold_transfers(
    lab_root: Path, what: str, reporter: Reporter, *, wait_s: float = WAIT_S
) -> Iterator[None]:
    """Hold the transfers of the lab in `lab_root` for `what`, such as "push".

    Other processes and other threads wait, and their reporters say for whom. BusyError that names
    the holder after `wait_s`. Not re-entrant.
    """

    def announce(holder: str) -> None:
        reporter.emit(Note(text=f"{holder}; waiting until it is done"))

    # In the lab itself: whatever state directory a process uses, it writes to these very files.
    lock = lab_root / ".labctl" / "transfer.lock"
    # An rsync that outlives a killed labctl by a moment holds it too.
    with hold_lock(lock, what, wait_s=wait_s, on_wait=announce, inheritable=True):
        yield
