"""The lines of the ledger."""

from __future__ import annotations

from typing import Any

import msgspec

from labctl.model import Value

# The kinds of lines. `torn` records that a damaged end of the file was moved aside.
KINDS = (
    "up",
    "cost",
    "down",
    "budget",
    "extend",
    "cancel",
    "due",
    "closed",
    "warned",
    "refused",
    "collected",
    "graded",
    "released",
    "mark",
    "comment",
    "saved_comment",
    "excuse",
    "regrade",
    "answered",
    "joined",
    "left",
    "roster",
    "plan",
    "canvas",
    "torn",
)


class CourseLedgerEntry(Value, frozen=True):
    """One line. `n` counts from 1; `at` is in Unix seconds; `by` did it, for the reason `why`."""

    n: int
    at: float
    kind: str
    seat: str = ""
    student: str = ""
    by: str = ""
    why: str = ""
    detail: dict[str, Any] = msgspec.field(default_factory=dict)


class CourseLedgerDraft(Value, frozen=True):
    """A line to append. Without `at` it gets the present time."""

    kind: str
    seat: str = ""
    student: str = ""
    by: str = ""
    why: str = ""
    detail: dict[str, Any] = msgspec.field(default_factory=dict)
    at: float | None = None


def merge_cost_entries(
    before: CourseLedgerEntry, after: CourseLedgerEntry
) -> CourseLedgerEntry | None:
    """Merge two `cost` lines of one server; return None if they are not adjacent.

    Mostly idle and mostly busy stretches stay apart, as do times at different prices.
    """
    if before.by or before.why or after.by or after.why:
        return None  # a person wrote this line
    first, second = before.detail, after.detail
    try:
        since, between, until = first["from"], first["until"], second["until"]
        first_s, second_s = between - since, until - second["from"]
        if abs(between - second["from"]) > 1e-3 or first_s <= 0 or second_s <= 0:
            return None
        first_usd, second_usd = first["usd"], second["usd"]
        first_idle_s, second_idle_s = first.get("idle_s", 0.0), second.get("idle_s", 0.0)
        if (first_idle_s * 2 >= first_s) != (second_idle_s * 2 >= second_s):
            return None
        # The same price: the dollars are in proportion to the seconds.
        first_scaled, second_scaled = first_usd * second_s, second_usd * first_s
        if abs(first_scaled - second_scaled) > 1e-6 * max(first_scaled, second_scaled):
            return None
        detail = {
            **second,
            **first,
            "until": until,
            "usd": first_usd + second_usd,
            "idle_s": first_idle_s + second_idle_s,
        }
    except (KeyError, TypeError):
        return None  # not a measurement
    return CourseLedgerEntry(
        n=before.n,
        at=after.at,
        kind=before.kind,
        seat=before.seat,
        student=before.student,
        detail=detail,
    )
