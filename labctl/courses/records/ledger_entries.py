"""What a line of the ledger is."""

from __future__ import annotations

from typing import Any

import msgspec

from labctl.model import Value

# What a line may be. `torn` says that the end of the file was damaged and put aside.
KINDS = (
    "up",
    "cost",
    "down",
    "budget",
    "extend",
    "due",
    "closed",
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
    if before.by or before.why or after.by or after.why:
        return None  # somebody gave a reason for this one
    first, second = before.detail, after.detail
    try:
        since, between, until = first["from"], first["until"], second["until"]
        one_s, other_s = between - since, until - second["from"]
        if abs(between - second["from"]) > 1e-3 or one_s <= 0 or other_s <= 0:
            return None
        usd, more = first["usd"], second["usd"]
        idle_s, more_s = first.get("idle_s", 0.0), second.get("idle_s", 0.0)
        if (idle_s * 2 >= one_s) != (more_s * 2 >= other_s):
            return None
        # The same price: dollars are to dollars as seconds to seconds.
        if abs(usd * other_s - more * one_s) > 1e-6 * max(usd * other_s, more * one_s):
            return None
        detail = {**second, **first, "until": until, "usd": usd + more, "idle_s": idle_s + more_s}
    except (KeyError, TypeError):
        return None  # a line that measures nothing
    return Entry(
        n=before.n,
        at=after.at,
        kind=before.kind,
        seat=before.seat,
        student=before.student,
        detail=detail,
    )
