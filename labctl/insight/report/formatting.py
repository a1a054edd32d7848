"""Figures as people read them. A figure and its unit are never parted at the end of a line."""

from __future__ import annotations

import math
import time
import unicodedata

NOT_MEASURED = "not measured"
SPACE = "\u00a0"
MINUS = "\u2212"
# Unicode's categories of controls, such as that which turns the direction of writing around.
STEERING = ("Cc", "Cf", "Cs", "Co", "Cn")
# Line ends, and what some scripts join letters with.
HARMLESS = "\n\t\u200c\u200d"


def percent(share: float | None, digits: int = 1) -> str:
    """0.9963 -> 99.6 %; never 100 or 0 for what is not all or nothing."""
    if share is None:
        return NOT_MEASURED
    step = 10.0**-digits
    value = share * 100
    if 0 < share < 1:
        value = min(max(value, step), 100 - step)
    text = f"{value:.{digits}f}"
    return f"{text.removesuffix('.' + '0' * digits) if share in (0, 1) else text}{SPACE}%"


def bare_percent(share: float, digits: int = 1) -> str:
    """The same without its sign: for the lower end of a range."""
    return percent(share, digits).removesuffix(f"{SPACE}%")


def count(number: float, one: str, many: str = "") -> str:
    said = one if number == 1 else many or one + "s"
    return f"{number:,.0f}{SPACE}{said}"


def dollars(usd: float | None) -> str:
    if usd is None:
        return NOT_MEASURED
    if usd == 0:
        return f"0{SPACE}dollars"
    return f"less than 0.01{SPACE}dollars" if usd < 0.01 else f"{usd:,.2f}{SPACE}dollars"


def size(number: float | None) -> str:
    """Bytes in the largest binary unit that leaves at least one."""
    if number is None:
        return NOT_MEASURED
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f}{SPACE}B" if unit == "B" else f"{number:.1f}{SPACE}{unit}"
        number /= 1024
    raise AssertionError


def span(seconds: float | None) -> str:
    if seconds is None:
        return NOT_MEASURED
    if seconds < 99.5:
        return f"{seconds:.1f}{SPACE}s" if seconds < 10 else f"{seconds:.0f}{SPACE}s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes}{SPACE}min"
    hours, left = divmod(minutes, 60)
    return f"{hours}{SPACE}h" + (f" {left}{SPACE}min" if left else "")


def date(at: float) -> str:
    """`3 November 2026, 14:05 UTC`; "" for a time that no calendar has."""
    try:
        found = time.gmtime(at)
    except (OverflowError, OSError, ValueError):
        return ""
    return f"{found.tm_mday}{SPACE}{time.strftime('%B %Y, %H:%M', found)} UTC"


def number(value: float, digits: int = 4) -> str:
    """Some four significant digits, without an exponent where that can be read."""
    if not math.isfinite(value):
        return "no number"
    if value == 0:
        return "0"
    size_ = abs(value)
    if 1e-4 <= size_ < 1e7:
        places = max(0, digits - 1 - math.floor(math.log10(size_)))
        text = f"{value:,.{min(places, 8)}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        text = f"{value:.{digits - 2}e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return text.replace("-", MINUS) if "e" not in text else text


def visible(text: str) -> str:
    """`text` with a sign for each character that would steer how the rest of it is read."""
    return "".join(
        c if c in HARMLESS or unicodedata.category(c) not in STEERING else "\ufffd" for c in text
    )
