"""A machine that sleeps: all processes of one labctl stand still, its ssh connections too."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Twice as long as ssh's keep-alives of 2 s go unanswered before a link counts as dead.
ASLEEP_S = 14.0


def list_processes(belongs: Callable[[int], bool]) -> list[int]:
    """The ids of the processes for which `belongs` holds, without those that have ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if belongs(int(entry.name)):
                found.append(int(entry.name))
    return found


def has_home(home: str) -> Callable[[int], bool]:
    """Whether a process has this home in its environment, as a labctl and its ssh have."""
    entry = f"HOME={home}".encode()
    return lambda pid: entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def in_session(session: int) -> Callable[[int], bool]:
    return lambda pid: os.getsid(pid) == session


@contextmanager
def asleep(belongs: Callable[[int], bool]) -> Iterator[None]:
    """Stop these processes for longer than the keep-alives, then let them go on."""
    stopped = list_processes(belongs)
    assert stopped, "nothing to put to sleep"
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
        time.sleep(ASLEEP_S)
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
