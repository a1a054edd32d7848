"""Who is next for a GPU: accounts that found none free, in the order in which they asked.

An account keeps its place until a GPU is free for it, and that GPU for TURN_S from then on. Whoever
has not come by then has lost the place. An account whose lease has ended asks like any other, and
so comes after all that wait. The queue outlives the broker, as leases do.
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
    """An account in the queue. `wanted` are UUIDs, none for any GPU. `turn_ends_s` is on
    CLOCK_BOOTTIME, 0 while not all that it wants is free."""

    uid: int
    wanted: tuple[str, ...]
    turn_ends_s: float = 0.0


def assign(
    queue: list[Waiter], free: list[str], now_s: float
) -> tuple[list[Waiter], dict[str, Waiter]]:
    """The queue as it is now, and which free GPU (UUID) is kept for which of its accounts."""
    waiting, kept = [], {}
    for waiter in queue:
        left = [uuid for uuid in free if uuid not in kept]
        chosen = [uuid for uuid in left if uuid in waiter.wanted] if waiter.wanted else left[:1]
        if len(chosen) < max(1, len(waiter.wanted)):
            now = waiter._replace(turn_ends_s=0.0)
        else:
            # An end beyond a whole turn was written before the machine started again.
            latest_s = now_s + TURN_S
            now = waiter._replace(turn_ends_s=min(waiter.turn_ends_s or latest_s, latest_s))
            if now.turn_ends_s <= now_s:
                continue
        waiting.append(now)
        kept.update(dict.fromkeys(chosen, now))
    return waiting, kept


class GpuQueue:
    """The queue of this server, in a file of root's. Calls go one after another."""

    def __init__(self, place: Path = PLACE) -> None:
        self._place = place
        self._waiters = _load(place)

    def keep(self, free: list[str], now_s: float) -> dict[str, Waiter]:
        """Let turns begin and end; the free GPUs that are kept, and for whom."""
        waiting, kept = assign(self._waiters, free, now_s)
        self._store(waiting)
        return kept

    def join(self, uid: int, wanted: list[str]) -> int:
        """The account's position from 1 on. One that waits for the same already keeps its place;
        one that wants something else comes last, or it could begin its turn anew for ever."""
        known = [(one.uid, one.wanted) for one in self._waiters]
        if (uid, tuple(wanted)) in known:
            return known.index((uid, tuple(wanted))) + 1
        waiting = [one for one in self._waiters if one.uid != uid]
        self._store([*waiting, Waiter(uid, tuple(wanted))])
        return len(waiting) + 1

    def leave(self, uid: int) -> None:
        self._store([one for one in self._waiters if one.uid != uid])

    def _store(self, waiting: list[Waiter]) -> None:
        if waiting == self._waiters:
            return
        self._waiters = waiting
        with suppress(OSError):  # without the file, only a restart of the broker forgets the queue
            write_text(self._place, json.dumps(waiting))


def _load(place: Path) -> list[Waiter]:
    """What an earlier broker wrote. A file that cannot be read is an empty queue."""
    try:
        rows = json.loads(place.read_text(encoding="utf-8"))
        return [Waiter(int(uid), tuple(map(str, of)), float(ends_s)) for uid, of, ends_s in rows]
    except (OSError, ValueError, TypeError):
        return []
