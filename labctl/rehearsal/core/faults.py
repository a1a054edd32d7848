"""Counts of injected faults: which call of an action is lost, and which is one too many.

Every fault is a value of the scenario with a pattern for the name of an action.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from labctl.rehearsal.core.scenario import OneTimeFault, Throttle

Fault = TypeVar("Fault", bound=OneTimeFault)
# Whether a pattern of the scenario names the present call.
Matches = Callable[[str], bool]


class FaultCounts:
    """Counts losses, failures and call rates. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: Counter[tuple[str, OneTimeFault]] = Counter()
        self._buckets: dict[Throttle, tuple[float, float]] = {}

    def take(self, kind: str, faults: tuple[Fault, ...], matches: Matches) -> Fault | None:
        """Count the call for the first fault that names it; return the fault if it is due."""
        with self._lock:
            for fault in faults:
                if not matches(fault.action):
                    continue
                self._seen[kind, fault] += 1
                if fault.skip < self._seen[kind, fault] <= fault.skip + fault.count:
                    return fault
        return None

    def is_throttled(self, throttles: tuple[Throttle, ...], matches: Matches) -> bool:
        """Count the call; return whether it is one more than a throttle allows now."""
        with self._lock:
            for throttle in throttles:
                if not matches(throttle.action):
                    continue
                now = time.monotonic()
                tokens, since = self._buckets.get(throttle, (float(throttle.burst), now))
                tokens = min(float(throttle.burst), tokens + (now - since) * throttle.rate)
                self._buckets[throttle] = (tokens - 1 if tokens >= 1 else tokens, now)
                if tokens < 1:
                    return True
        return False

    def reset(self) -> None:
        """Reset the counts, for example after a change of the scenario."""
        with self._lock:
            self._seen.clear()
            self._buckets.clear()
