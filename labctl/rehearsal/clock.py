"""What happens later: one thread with a list of times, and workers for what takes long."""

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


class Clock:
    """`after(delay_s, work)` runs `work` on a worker, once; `stop` forgets what is left."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._change = threading.Condition()
        self._stopped = False
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="rehearsal")
        self._thread = threading.Thread(target=self._tick, name="rehearsal-clock", daemon=True)
        self._thread.start()

    def after(self, delay_s: float, work: Callable[[], None]) -> None:
        with self._change:
            heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._order), work))
            self._change.notify()

    def now(self, work: Callable[[], None]) -> None:
        """On a worker at once; what is not expected of it is logged, as it has no caller."""
        self._workers.submit(work).add_done_callback(_told)

    def stop(self) -> None:
        """Nothing starts any more; what runs is waited for."""
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
                left_s = self._due[0][0] - time.monotonic()
                if left_s > 0:
                    self._change.wait(left_s)
                    continue
                self.now(heapq.heappop(self._due)[2])


def _told(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("a rehearsal's work failed", exc_info=error)
