"""How many of the same thing an account may do at once."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from typing import Iterator

from .detection import TAKEN
from .http import Refusal
from .rules import Account


class AccountLimit:
    """`what` completes "an account ... at once"."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._running: Counter[int] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def hold(self, account: Account) -> Iterator[None]:
        """Do it inside; Refusal (429) where the account does so many already."""
        with self._lock:
            if self._running[account.uid] >= self._most:
                raise Refusal(429, f"{TAKEN}an account {self._what} at once")
            self._running[account.uid] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running[account.uid] -= 1
