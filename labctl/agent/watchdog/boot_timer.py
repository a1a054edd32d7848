"""The timer of the machine's first boot, which ends the machine even without a watchdog.

The timer polls a file with one line: the boot's id, the deadline in seconds of uptime, and the
deadline in Unix seconds. The file is replaced by rename, and only if the first boot has made one.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ...wire.watchdog import ServerLimits
from ..host.paths import read_boottime_s, read_text, write_text

FILE = Path("/var/lib/labctl/ttl")
# The watchdog acts first: it saves results and stops runs. The timer only ends the machine.
LATER_S = 120.0  # the same as labctl/servers/deadlines.py adds before a watchdog is armed
NEVER_S = 10 * 365 * 86400.0
CLOSE_S = 5.0


def is_armed(file: Path = FILE) -> bool:
    """Return whether the first boot left a timer that this process may change."""
    return os.geteuid() == 0 and file.exists()


def update_timer(
    boot: str, limits: ServerLimits, elapsed_s: float, *, waits: bool, file: Path = FILE
) -> None:
    """Set the timer to the end by ttl and budget plus LATER_S; without limits, to years from now.

    While an end is under way (`waits`), the timer is at least LATER_S after the last call.
    """
    if not is_armed(file):
        return
    now = read_boottime_s()
    latest_s = limits.latest_s
    due = NEVER_S if latest_s is None else now + latest_s - elapsed_s + LATER_S
    if waits:
        due = max(due, now + LATER_S)
    timer_boot, _, times = read_text(file).partition(" ")
    due_text = times.partition(" ")[0]
    if timer_boot == boot and due_text.isdecimal() and abs(int(due_text) - due) < CLOSE_S:
        return
    try:
        write_text(file, f"{boot} {due:.0f} {time.time() + due - now:.0f}\n")
    except OSError as error:
        print(f"{file} was not written: {error}", file=sys.stderr, flush=True)
