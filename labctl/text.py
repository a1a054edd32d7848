"""The texts of durations, sizes, dollars and lists on the user's machine.

The agent writes some of them too, so these are in `labctl.wire.text`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from labctl.wire.text import (
    bytes_text,
    dollars_text,
    duration_text,
    price_range_text,
    price_text,
    scale_text,
)

__all__ = [
    "add_next",
    "bytes_text",
    "count_text",
    "decimal_bytes_text",
    "dollars_text",
    "duration_text",
    "elapsed_text",
    "extension_text",
    "hint_lines",
    "list_text",
    "names_text",
    "next_lines",
    "optional_text",
    "price_or_free_text",
    "price_range_text",
    "price_text",
    "timing_text",
]

T = TypeVar("T")


def optional_text(value: T | None, write: Callable[[T], str], missing: str = "-") -> str:
    """Write a value with `write`, None as `missing`."""
    return missing if value is None else write(value)


def price_or_free_text(usd_per_hour: float) -> str:
    """Write a price per hour, 0 as "free"."""
    return price_text(usd_per_hour) if usd_per_hour else "free"


def extension_text(seconds: int) -> str:
    """Write by how much a due time moves: whole days as days, as staff grants them."""
    days, rest_s = divmod(seconds, 86_400)
    return f"{days} d" if days and not rest_s else duration_text(seconds)


def elapsed_text(seconds: float) -> str:
    """Write how long something took. Clocks of whole seconds may show 0 for what took a moment."""
    return duration_text(seconds) if seconds > 0 else "< 1 s"


def timing_text(seconds: float) -> str:
    """Write a measured time with three significant digits: 1.25 s, 34.1 ms, 7.02 us."""
    if seconds >= 1000:
        return duration_text(seconds)
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def decimal_bytes_text(count: float) -> str:
    """Write bytes in powers of ten, as is usual for models: 377 kB, 10.8 MB, 1,128 GB."""
    return scale_text(count, 1000, ("B", "kB", "MB", "GB"))


def hint_lines(hint: str) -> list[str]:
    """Return the lines that show a hint: each command alone on its line, to be copied as it is.

    A comment goes below its command, in parentheses, because zsh would pass it on as arguments.
    """
    shown = []
    for line in hint.splitlines():
        command, *comment = re.split(r" {2,}# ", line, maxsplit=1)
        shown += [command, *(f"({text})" for text in comment)]
    return shown


def next_lines(hint: str) -> list[str]:
    """Return the lines that show a hint below a message; none without a hint."""
    return [
        f"{' ' * 8 if number else '  next: '}{line}" for number, line in enumerate(hint_lines(hint))
    ]


def add_next(text: str, hint: str) -> str:
    """Return a message with its hint on the lines below it."""
    return "\n".join([text, *next_lines(hint)])


def count_text(count: int, noun: str) -> str:
    """Write a count with its noun: 1 seat, 2 seats."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def list_text(names: Sequence[str], word: str = "and") -> str:
    """Write names as in a sentence: hw1, hw2 and hw3."""
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def names_text(names: Sequence[str], most: int) -> str:
    """Write the first `most` names with commas, and how many more there are: a, b and 3 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
