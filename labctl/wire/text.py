"""Durations, sizes and dollars as people read them: one form for each, in messages and reports.

Every function takes one unit and chooses the one to write. Values that lab.yaml and options accept
(`1h30m`, `8GB`) are written by labctl.config.scalars, so that they can be copied back.
"""

from __future__ import annotations

import math
from typing import Sequence


def duration_text(seconds: float) -> str:
    """Write a duration in at most two units: 42 s, 3 min, 1 h 5 min, 2 d 4 h.

    From two minutes on it is rounded to a minute; parts smaller than the two units are dropped.
    A negative duration is written as 0 s, infinity and NaN as unknown.
    """
    if not math.isfinite(seconds):
        return "unknown"
    if 0 < seconds < 0.5:
        return "< 1 s"
    whole_s = round(max(0, seconds))
    if whole_s < 120:
        return f"{whole_s} s"
    minutes = (whole_s + 30) // 60
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h" + (f" {minutes} min" if minutes else "")
    days, hours = divmod(hours, 24)
    if days < 100:
        return f"{days} d" + (f" {hours} h" if hours else "")
    if days < 730:
        return f"{days} d"
    return f"{days // 365:,} years" if days < 365_000_000 else "over 1,000,000 years"


def bytes_text(count: float) -> str:
    """Write bytes in the largest unit of which there is at least one: 512 B, 2.8 KiB, 186 GiB."""
    return scale_text(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def scale_text(count: float, factor: int, units: Sequence[str]) -> str:
    """Write a number in one of the units, each `factor` times the one before it.

    It has a decimal below 100; bytes are whole.
    """
    for unit in units[:-1]:
        text = f"{count:.0f}" if unit == "B" or count >= 99.95 else f"{count:.1f}"
        # As it is written: 1023.7 KiB would be 1024 KiB.
        if float(text) < factor:
            return f"{text} {unit}"
        count /= factor
    return f"{count:,.0f} {units[-1]}" if count >= 99.95 else f"{count:.1f} {units[-1]}"


def dollars_text(usd: float) -> str:
    """Write an amount of US dollars: $0.19, $1,234.50; an amount above zero is never $0.00."""
    if 0 < usd < 0.005:
        return "< $0.01"
    return f"{'-' if usd <= -0.005 else ''}${abs(usd):,.2f}"


def price_text(usd_per_hour: float) -> str:
    """Write a price per hour: $2.40/h. Below a dollar, up to four decimals: $0.0316."""
    if 0.00005 <= usd_per_hour < 0.995:
        whole, _, decimals = f"{usd_per_hour:.4f}".partition(".")
        return f"${whole}.{decimals.rstrip('0').ljust(2, '0')}/h"
    return f"{dollars_text(usd_per_hour)}/h"


def price_range_text(low_usd_per_hour: float, high_usd_per_hour: float) -> str:
    """Write the lowest and the highest of a price per hour: $0.1642-0.2087/h."""
    low, high = price_text(low_usd_per_hour), price_text(high_usd_per_hour)
    return f"{low.replace('/h', '')}-{high.replace('$', '')}"
