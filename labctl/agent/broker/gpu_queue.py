"""The queue for GPUs: accounts that found no free one, in the order of their requests.

An account keeps its position until a GPU is free for it; that GPU is then reserved for TURN_S. An
account that does not use it by then loses its position. An account whose lease has ended joins the
end of the queue like any other. The queue survives a restart of the broker, as leases do.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..host.paths import write_text

PLACE = Path("/run/labctl/gpu-queue.json")
TURN_S = 600.0


class Waiter(NamedTuple):
    """An account in the queue. `wanted` are UUIDs, () for any GPU.

    `turn_ends_s` is on CLOCK_BOOTTIME, 0 until all GPUs that it wants are free.
    """

    uid: int
    wanted: tuple[str, ...]
    turn_ends_s: float = 0.0


def assign_gpus(
    queue: list[Waiter], free: list[str], now_s: float
) -> tuple[list[Waiter], dict[str, Waiter]]:
    """Return the current queue, and which free GPU (UUID) is reserved for which account."""
    waiting, reserved = [], {}
    for waiter in queue:
        available = [uuid for uuid in free if uuid not in reserved]
        uuids = (
            [uuid for uuid in available if uuid in waiter.wanted]
            if waiter.wanted
            else available[:1]
        )
        if len(uuids) < max(1, len(waiter.wanted)):
            updated = waiter._replace(turn_ends_s=0.0)
        else:
            # An end later than a full turn was written before the machine restarted.
            latest_s = now_s + TURN_S
            updated = waiter._replace(turn_ends_s=min(waiter.turn_ends_s or latest_s, latest_s))
            if updated.turn_ends_s <= now_s:
                continue
        waiting.append(updated)
        reserved.update(dict.fromkeys(uuids, updated))
    return waiting, reserved


class GpuQueue:
    """The queue of this server, in a file that root owns. The caller serializes calls."""

    def __init__(self, path: Path = PLACE) -> None:
        self._path = path
        self._waiters = _load(path)

    def advance(self, free: list[str], now_s: float) -> dict[str, Waiter]:
        """Start and end turns; return the reserved GPUs, and for whom."""
        waiting, reserved = assign_gpus(self._waiters, free, now_s)
        self._store(waiting)
        return reserved

    def join(self, uid: int, wanted: list[str]) -> int:
        """Add the account; return its position, counted from 1.

        An account that waits for the same GPUs keeps its position. One that wants others goes to
        the end, or it could extend its turn forever.
        """
        entries = [(waiter.uid, waiter.wanted) for waiter in self._waiters]
        if (uid, tuple(wanted)) in entries:
            return entries.index((uid, tuple(wanted))) + 1
        waiting = [waiter for waiter in self._waiters if waiter.uid != uid]
        self._store([*waiting, Waiter(uid, tuple(wanted))])
        return len(waiting) + 1

    def leave(self, uid: int) -> None:
        self._store([waiter for waiter in self._waiters if waiter.uid != uid])

    def _store(self, waiting: list[Waiter]) -> None:
        if waiting == self._waiters:
            return
        self._waiters = waiting
        with suppress(OSError):  # without the file, only a restart of the broker forgets the queue
            write_text(self._path, json.dumps(waiting))


def _load(path: Path) -> list[Waiter]:
    """Read the queue of an earlier broker process; a damaged file is an empty queue."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return [
            Waiter(int(uid), tuple(map(str, wanted)), float(ends_s)) for uid, wanted, ends_s in rows
        ]
    except (OSError, ValueError, TypeError):
        return []
