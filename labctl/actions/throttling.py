"""Patience with a provider that has had too many calls for the moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from labctl.errors import ThrottledError

T = TypeVar("T")
PATIENCE_S = 120.0
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0


def ask_patiently(call: Callable[[], T]) -> T:
    """The answer, through throttling."""
    pause_s = FIRST_PAUSE_S
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except ThrottledError:
            if time.monotonic() > deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
