"""The timer of the machine's first boot, which ends it even without a watchdog: told what changes.

It reads one line all the time: the boot's id, the deadline in seconds of uptime, and the same in
Unix seconds. It is replaced whole, by rename, and only where the first boot has left one.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ..host.paths import read_text, write_text
from .decisions import Limits
from .state_files import boottime_s

FILE = Path("/var/lib/labctl/ttl")
# The watchdog goes first: it saves results and stops runs, the timer only ends the machine.
LATER_S = 120.0  # the same as labctl/servers/deadlines.py adds before a watchdog is armed
NEVER_S = 10 * 365 * 86400.0
CLOSE_S = 5.0


def is_armed(file: Path = FILE) -> bool:
    """Whether the first boot left a timer here that this process may move."""
    return os.geteuid() == 0 and file.exists()


def tell_timer(
    boot: str, limits: Limits, elapsed_s: float, *, waits: bool, file: Path = FILE
) -> None:
    """Let the timer follow ttl and budget, later by LATER_S; without either it waits for years.

    While an end is under way (`waits`) it waits as well, but never longer than LATER_S after the
    last call.
    """
    if not is_armed(file):
        return
    now = boottime_s()
    latest_s = limits.latest_s
    due = NEVER_S if latest_s is None else now + latest_s - elapsed_s + LATER_S
    if waits:
        due = max(due, now + LATER_S)
    known, _, rest = read_text(file).partition(" ")
    at = rest.partition(" ")[0]
    if known == boot and at.isdecimal() and abs(int(at) - due) < CLOSE_S:
        return
    try:
        write_text(file, f"{boot} {due:.0f} {time.time() + due - now:.0f}\n")
    except OSError as error:
        print(f"{file} was not written: {error}", file=sys.stderr, flush=True)
