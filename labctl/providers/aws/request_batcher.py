"""Calls of several threads about several servers, sent as one.

Who asks about one server is never kept waiting. Where several servers were asked about lately, a
call waits a moment for company, the longer the more there are: thirty threads that each poll make
one call every few seconds. An answer is never older than the question.
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
LATELY_S = 10.0
# Waited for company, for each other server that was asked about lately.
PACE_S = 0.1
LONGEST_PACE_S = 6.0


class Together(Generic[Answer]):
    """`ask` takes ids, without doubles, and returns an answer for those that have one."""

    def __init__(self, ask: Callable[[list[str]], dict[str, Answer]], most: int = 100) -> None:
        self._ask = ask
        self._most = most
        self._lock = threading.Lock()
        self._waiting: dict[str, Future[Answer | None]] = {}
        self._busy = False
        self._asked_at: dict[str, float] = {}

    def call(self, item: str) -> Answer | None:
        """The answer for one id, or None. What `ask` raises reaches everyone who asked with it."""
        with self._lock:
            waited_for = self._waiting.setdefault(item, Future())
            leads = not self._busy
            self._busy = True
        if leads:
            self._send_all()
        try:
            return waited_for.result(LONGEST_WAIT_S)
        except TimeoutError:
            raise BusyError("AWS did not answer a call that others waited for too") from None

    def _send_all(self) -> None:
        """Until nobody waits: the one who leads serves those who came meanwhile too."""
        try:
            time.sleep(self._pace_s())
            while batch := self._next():
                self._answer(batch)
                time.sleep(self._pace_s())
        except BaseException:
            # Ctrl-C in between: the next caller leads.
            with self._lock:
                self._busy = False
            raise

    def _pace_s(self) -> float:
        with self._lock:
            now = time.monotonic()
            self._asked_at.update(dict.fromkeys(self._waiting, now))
            recent = {item: at for item, at in self._asked_at.items() if now - at < LATELY_S}
            self._asked_at = recent
            return min(LONGEST_PACE_S, PACE_S * (len(recent) - 1)) if self._waiting else 0.0

    def _next(self) -> dict[str, Future[Answer | None]]:
        with self._lock:
            batch = {item: self._waiting.pop(item) for item in list(self._waiting)[: self._most]}
            self._asked_at.update(dict.fromkeys(batch, time.monotonic()))
            self._busy = bool(batch)
            return batch

    def _answer(self, batch: dict[str, Future[Answer | None]]) -> None:
        try:
            found = self._ask(list(batch))
        except BaseException as error:
            for waited_for in batch.values():
                waited_for.set_exception(error)
            if not isinstance(error, LabError):
                raise
            return
        for item, waited_for in batch.items():
            waited_for.set_result(found.get(item))
