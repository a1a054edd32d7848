"""The processes of a session: those that the first one started, unless they left it by setsid."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...wire.runs import ProcessRecord
from .paths import labctl_home

# seconds after which a process that does not end waits for a device
KILLED_WITHIN_S = 10.0
POLL_S = 0.05


class SessionMember(NamedTuple):
    """A process: when it started, in clock ticks since boot, and how long it has computed.

    `cpu_ticks` has the time of its ended children too, if it has waited for them.
    """

    start_ticks: int
    cpu_ticks: int


def is_alive(process: ProcessRecord) -> bool:
    stat = read_stat(process.pid)
    return stat is not None and stat.start_ticks == process.start_ticks


def read_stat(pid: int) -> SessionMember | None:
    """Read what the kernel says of a process of this account.

    None if it has ended, or belongs to others: the account can write the number of any process
    into its records, and root's watchdog reads them.
    """
    try:
        if Path(f"/proc/{pid}").stat().st_uid != labctl_home().stat().st_uid:
            return None
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if fields[0] == "Z":
        return None
    return SessionMember(int(fields[19]), sum(map(int, fields[11:15])))


def list_session(process: ProcessRecord) -> dict[int, SessionMember]:
    """Return the processes of a session by number; its first may have ended before the others."""
    members = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            pid = int(entry.name)
            stat = read_stat(pid)
            with suppress(OSError):
                # A number may be used again, but no process of a session is older than its leader.
                is_member = os.getsid(pid) == process.pid
                if is_member and stat and stat.start_ticks >= process.start_ticks:
                    members[pid] = stat
    return members


def kill_session(process: ProcessRecord) -> None:
    """Send SIGKILL to all of a session until it has ended, for KILLED_WITHIN_S at most.

    A process that is killed is still there for a moment, longer on a busy machine.
    """
    deadline_s = time.monotonic() + KILLED_WITHIN_S
    while (pids := list_session(process)) and time.monotonic() < deadline_s:
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def stop_session(process: ProcessRecord, grace_s: float) -> None:
    """Send SIGTERM to a session, and SIGKILL after `grace_s` seconds; return once it has ended."""
    for pid in list_session(process):
        with suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    while list_session(process):
        if time.monotonic() > deadline_s:
            kill_session(process)
            return
        time.sleep(POLL_S)
