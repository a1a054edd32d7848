"""Delayed work: a thread with a list of due times, and workers that run the work."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

WORKERS = 6

log = logging.getLogger(__name__)


class TaskTimer:
    """A timer.

    `run_after(delay_s, work)` runs `work` once on a worker; `stop` drops pending work.
    """

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._change = threading.Condition()
        self._stopped = False
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="rehearsal")
        self._thread = threading.Thread(target=self._tick, name="rehearsal-clock", daemon=True)
        self._thread.start()

    def run_after(self, delay_s: float, work: Callable[[], None]) -> None:
        with self._change:
            heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._order), work))
            self._change.notify()

    def run_now(self, work: Callable[[], None]) -> None:
        """Run it on a worker at once; unexpected errors are logged, as there is no caller."""
        self._workers.submit(work).add_done_callback(_log_error)

    def stop(self) -> None:
        """Start no more work, and wait for running work."""
        with self._change:
            self._stopped = True
            self._change.notify()
        self._thread.join()
        self._workers.shutdown(cancel_futures=True)

    def _tick(self) -> None:
        with self._change:
            while not self._stopped:
                if not self._due:
                    self._change.wait()
                    continue
                remaining_s = self._due[0][0] - time.monotonic()
                if remaining_s > 0:
                    self._change.wait(remaining_s)
                    continue
                self.run_now(heapq.heappop(self._due)[2])


def _log_error(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("a background task of the rehearsal failed", exc_info=error)
