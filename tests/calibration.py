"""How slow this machine is at the moment, for tests that hold labctl to a real time bound.

Such tests bear the mark `timed`. In a run of the whole suite they come last, all at once.
Each multiplies its bound by what a bare loop of the same shape takes a moment before, over what
it takes on a quiet machine.
"""

from __future__ import annotations

import subprocess
import time

DEAD_LINK_NOTICED_S = 10.0
# The same where other tests run beside and may have the processors: far less than the many minutes
# for which TCP alone goes on to send.
DEAD_LINK_NOTICED_AMONG_OTHERS_S = 60.0
WAITS = 10
WAIT_S = 0.1
# A generous time for a shell that starts, does nothing and ends.
SPAWN_S = 0.01
STEPS = 1_000_000
# Processor time of `STEPS` additions, on a 2.5 GHz server core of 2020 or a faster one.
STEPS_CPU_S = 0.1


def waiting_factor() -> float:
    """By how much a chain of short waits and processes is slower than asked for, at least 1."""
    began = time.monotonic()
    for _ in range(WAITS):
        time.sleep(WAIT_S)
        subprocess.run(["sh", "-c", ":"], check=True)
    return max(1.0, (time.monotonic() - began) / (WAITS * (WAIT_S + SPAWN_S)))


def dead_link_limit_s() -> float:
    """Seconds within which labctl notices on this machine, now, that a link is dead."""
    return DEAD_LINK_NOTICED_S * waiting_factor()


def computing_factor() -> float:
    """By how much plain Python takes more processor time than when all is quiet, at least 1."""
    began = time.process_time()
    total = 0
    for number in range(STEPS):
        total += number
    return max(1.0, (time.process_time() - began) / STEPS_CPU_S)
