"""What a line of the ledger is."""

from __future__ import annotations

from typing import Any

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
