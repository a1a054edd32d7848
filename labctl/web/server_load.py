"""How busy servers are: what watchdogs said of GPUs, and for an open page the server itself."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable

from labctl.errors import LabError
from labctl.model import Offer
from labctl.web.live_updates import Feed
from labctl.web.view import Gauge

EVERY_S = 6.0
LONGEST_S = 60.0
# What a server said of itself counts for so long; then its watchdog's word does again.
FRESH_S = 90.0
_AT = re.compile(r"GPU \S+ is at ([0-9.]+) %")
_SOME = re.compile(r"process \d+ uses a GPU")


def told_by_watchdog(offer: Offer, busy: tuple[str, ...], at: float) -> Gauge | None:
    """The mean over a server's GPUs: a watchdog names those that work, with their percent."""
    if not offer.gpu_count or any(_SOME.match(one) for one in busy):
        return None  # a partitioned GPU tells no figure
    used = [float(match[1]) for one in busy if (match := _AT.match(one))]
    return Gauge(at=at, gpus=offer.gpu_count, gpu_percent=round(sum(used) / offer.gpu_count))


class Gauges:
    """Asks the servers of those seats whose page is open, one after another."""

    def __init__(self, ask: Callable[[str], Gauge | None]) -> None:
        self._ask = ask
        self._known: dict[str, Gauge] = {}
        self._pauses: dict[str, tuple[float, float]] = {}

    def known(self) -> dict[str, Gauge]:
        """Seat's key -> what its server said lately."""
        long_ago = time.time() - FRESH_S
        return {key: one for key, one in self._known.items() if one.at > long_ago}

    async def run(self, feed: Feed) -> None:
        """For ever, until it is cancelled."""
        while True:
            await asyncio.sleep(1.0)
            for key in {name.split()[0][6:] for name in feed.watched if name.startswith("seats/")}:
                pause_s, next_at = self._pauses.get(key, (EVERY_S, 0.0))
                if time.monotonic() < next_at:
                    continue
                found = await self._asked(feed, key)
                pause_s = EVERY_S if found else min(pause_s * 2, LONGEST_S)
                self._pauses[key] = (pause_s, time.monotonic() + pause_s)

    async def _asked(self, feed: Feed, key: str) -> bool:
        try:
            seat = (await feed.snapshot()).seat_by_key.get(key)
            if seat is None or seat.state != "running":
                return False
            found = await asyncio.to_thread(self._ask, seat.name)
        except LabError:
            return False  # it is told by the seat's own state; asked again later
        if found is not None:
            # By this machine's clock: a server's may differ.
            self._known[key] = Gauge(
                at=time.time(),
                gpus=found.gpus,
                gpu_percent=found.gpu_percent,
                gpu_memory_bytes=found.gpu_memory_bytes,
                gpu_memory_total_bytes=found.gpu_memory_total_bytes,
                cpu_percent=found.cpu_percent,
            )
        return found is not None
