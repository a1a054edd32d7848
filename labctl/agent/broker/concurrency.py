"""Limits on how many operations of a kind an account may run at once."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from typing import Iterator

from .http import LimitRefusal
from .rules import BrokerAccount


class AccountLimit:
    """A limit for each account. `what` completes "an account ... at once"."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._running: Counter[int] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, account: BrokerAccount) -> Iterator[None]:
        """Run one operation inside. Refusal (429) if the account is at its limit."""
        with self._lock:
            if self._running[account.uid] >= self._most:
                raise LimitRefusal(429, f"an account {self._what} at once")
            self._running[account.uid] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running[account.uid] -= 1
