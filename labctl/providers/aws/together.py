"""Calls of several threads about several servers, sent as one.

The first caller sends at once. Whoever comes while a call is under way waits for its end and then
goes with everybody else who came meanwhile. So one caller never waits for company, thirty at once
make two calls, and an answer is never older than the question.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from labctl.errors import BusyError, LabError

Answer = TypeVar("Answer")
LONGEST_WAIT_S = 300.0


class Together(Generic[Answer]):
    """`ask` takes ids, without doubles, and returns an answer for those that have one."""

    def __init__(self, ask: Callable[[list[str]], dict[str, Answer]], most: int = 100) -> None:
        self._ask = ask
        self._most = most
        self._lock = threading.Lock()
        self._waiting: dict[str, Future[Answer | None]] = {}
        self._busy = False

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
            while batch := self._next():
                self._answer(batch)
        except BaseException:
            # Ctrl-C in between: the next caller leads.
            with self._lock:
                self._busy = False
            raise

    def _next(self) -> dict[str, Future[Answer | None]]:
        with self._lock:
            batch = {item: self._waiting.pop(item) for item in list(self._waiting)[: self._most]}
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
