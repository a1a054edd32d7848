"""What a line of the ledger is."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from labctl.model import Value

KINDS = (
    "up",
    "cost",
    "down",
    "budget",
    "extend",
    "due",
    "warned",
    "refused",
    "collected",
    "graded",
    "released",
    "joined",
    "left",
    "roster",
    "plan",
    "torn",
)
"""What a line may be. `torn` says that the end of the file was damaged and put aside."""


class Entry(Value, frozen=True):
    """One line. `n` counts from 1; `at` in Unix seconds; `by` is who did it, `why` their reason."""

    n: int
    at: float
    kind: str
    seat: str = ""
    student: str = ""
    by: str = ""
    why: str = ""
    detail: dict[str, Any] = msgspec.field(default_factory=dict)


class Draft(Value, frozen=True):
    """A line that is to be appended."""

    kind: str
    seat: str = ""
    student: str = ""
    by: str = ""
    why: str = ""
    detail: dict[str, Any] = msgspec.field(default_factory=dict)
    at: float | None = None


def joined(before: Entry, after: Entry) -> Entry | None:
    """Two `cost` lines of one server as one; None where they do not follow one another.

    Mostly idle stretches and busy ones stay apart, as do times at different prices.
    """
    first, second = _measured(before), _measured(after)
    if first is None or second is None or abs(first.until - second.since) > 1e-3:
        return None
    if first.mostly_idle != second.mostly_idle:
        return None
    if abs(first.price - second.price) > 1e-6 * max(first.price, second.price):
        return None
    detail = {
        **before.detail,
        "until": second.until,
        "usd": first.usd + second.usd,
        "idle_s": first.idle_s + second.idle_s,
    }
    return msgspec.structs.replace(before, at=after.at, detail=detail)


class _Measured(NamedTuple):
    since: float
    until: float
    usd: float
    idle_s: float

    @property
    def price(self) -> float:
        """Dollars a second."""
        return self.usd / (self.until - self.since)

    @property
    def mostly_idle(self) -> bool:
        return self.idle_s * 2 >= self.until - self.since


def _measured(entry: Entry) -> _Measured | None:
    """None for a line that measures nothing, or that a person gave a reason for."""
    detail = entry.detail
    if entry.by or entry.why:
        return None
    found = _Measured(*(float(detail.get(key, 0.0)) for key in ("from", "until", "usd", "idle_s")))
    return found if found.until > found.since else None
