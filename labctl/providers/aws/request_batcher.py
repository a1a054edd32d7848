"""Batch the calls of several threads about several servers into one call.

A call about a single server is never delayed. If there were calls about several servers lately, a
call waits a moment for others, longer for more servers: thirty threads that poll make one call
every few seconds. A result is never older than the request for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from labctl.errors import BusyError, LabError

Answer = TypeVar("Answer")
LONGEST_WAIT_S = 300.0
# Ids in one call.
MOST_ITEMS = 100
LATELY_S = 10.0
# Seconds to wait for each other server with a recent call.
PACE_S = 0.1
LONGEST_PACE_S = 6.0


class RequestBatcher(Generic[Answer]):
    """Batches calls. `ask` takes unique ids, and returns a result for each id that has one."""

    def __init__(self, ask: Callable[[list[str]], dict[str, Answer]]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._waiting: dict[str, Future[Answer | None]] = {}
        self._busy = False
        self._called_at: dict[str, float] = {}

    def call(self, item: str) -> Answer | None:
        """Return the result for one id, or None. All callers of a batch get an error of `ask`."""
        with self._lock:
            future = self._waiting.setdefault(item, Future())
            is_leader = not self._busy
            self._busy = True
        if is_leader:
            self._send_all()
        try:
            return future.result(LONGEST_WAIT_S)
        except TimeoutError:
            raise BusyError("AWS did not answer a batch of requests in time") from None

    def _send_all(self) -> None:
        """Send batches until no caller waits, including callers that arrive meanwhile."""
        try:
            time.sleep(self._pace_s())
            while batch := self._take_batch():
                self._send(batch)
                time.sleep(self._pace_s())
        except BaseException:
            # After Ctrl-C the next caller becomes the leader.
            with self._lock:
                self._busy = False
            raise

    def _pace_s(self) -> float:
        """Return how long to wait for more calls before the next batch."""
        with self._lock:
            now = time.monotonic()
            self._called_at.update(dict.fromkeys(self._waiting, now))
            recent = {item: at for item, at in self._called_at.items() if now - at < LATELY_S}
            self._called_at = recent
            return min(LONGEST_PACE_S, PACE_S * (len(recent) - 1)) if self._waiting else 0.0

    def _take_batch(self) -> dict[str, Future[Answer | None]]:
        with self._lock:
            batch = {item: self._waiting.pop(item) for item in list(self._waiting)[:MOST_ITEMS]}
            self._called_at.update(dict.fromkeys(batch, time.monotonic()))
            self._busy = bool(batch)
            return batch

    def _send(self, batch: dict[str, Future[Answer | None]]) -> None:
        try:
            answers = self._ask(list(batch))
        except BaseException as error:
            for future in batch.values():
                future.set_exception(error)
            if not isinstance(error, LabError):
                raise
            return
        for item, future in batch.items():
            future.set_result(answers.get(item))
