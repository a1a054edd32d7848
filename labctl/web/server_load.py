"""Load of servers: from the watchdogs' reports, and for open pages from the servers themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from labctl.errors import LabError
from labctl.model import Offer
from labctl.web.live_updates import Feed
from labctl.web.view import ServerLoad

EVERY_S = 6.0
LONGEST_S = 60.0
# time for which a server's own figures are used instead of its watchdog's
FRESH_S = 90.0


def load_from_watchdog(offer: Offer, gpu_percent: float | None, at: float) -> ServerLoad | None:
    """Return the mean use of a server's GPUs; None if the watchdog's report does not tell it.

    `gpu_percent` is the use of all of them together. It is not trusted: see `read_report`.
    """
    if not offer.gpu_count or gpu_percent is None:
        return None
    if not 0 <= gpu_percent <= 100 * offer.gpu_count:
        return None
    return ServerLoad(at=at, gpus=offer.gpu_count, gpu_percent=round(gpu_percent / offer.gpu_count))


class LoadReader:
    """Reads the load of servers whose pages are open, one after another."""

    def __init__(self, ask: Callable[[str], ServerLoad | None]) -> None:
        self._ask = ask
        self._known: dict[str, ServerLoad] = {}
        self._pauses: dict[str, tuple[float, float]] = {}

    def recent_loads(self) -> dict[str, ServerLoad]:
        """Return seat key -> load, for the servers that were read recently."""
        oldest = time.time() - FRESH_S
        return {key: gauge for key, gauge in self._known.items() if gauge.at > oldest}

    async def run(self, feed: Feed) -> None:
        """Read loads until the task is canceled."""
        while True:
            await asyncio.sleep(1.0)
            for key in {
                name.split()[0][6:] for name in feed.open_pages if name.startswith("seats/")
            }:
                pause_s, next_at = self._pauses.get(key, (EVERY_S, 0.0))
                if time.monotonic() < next_at:
                    continue
                was_read = await self._read_load(feed, key)
                pause_s = EVERY_S if was_read else min(pause_s * 2, LONGEST_S)
                self._pauses[key] = (pause_s, time.monotonic() + pause_s)

    async def _read_load(self, feed: Feed, key: str) -> bool:
        try:
            seat = (await feed.read_snapshot()).seat_by_key.get(key)
            if seat is None or seat.state != "running":
                return False
            gauge = await asyncio.to_thread(self._ask, seat.name)
        except LabError:
            return False  # the seat's own state shows the error; try again later
        if gauge is not None:
            # Use this machine's clock: a server's may differ.
            self._known[key] = ServerLoad(
                at=time.time(),
                gpus=gauge.gpus,
                gpu_percent=gauge.gpu_percent,
                gpu_memory_bytes=gauge.gpu_memory_bytes,
                gpu_memory_total_bytes=gauge.gpu_memory_total_bytes,
                cpu_percent=gauge.cpu_percent,
            )
        return gauge is not None
