"""Formats of numbers in the report. A no-break space keeps a number and its unit on one line."""

from __future__ import annotations

import math
import re
import time
import unicodedata

from labctl.text import bytes_text, dollars_text, duration_text, optional_text

NOT_MEASURED = "not measured"
SPACE = "\u00a0"
MINUS = "\u2212"
# Unicode categories of control characters, such as those that reverse the writing direction.
STEERING = ("Cc", "Cf", "Cs", "Co", "Cn")
# Line ends, tabs, and the joiners that some scripts need.
HARMLESS = "\n\t\u200c\u200d"


def percent(share: float | None, digits: int = 1) -> str:
    """Format 0.9963 as 99.6%. Only 1 becomes 100%, and only 0 becomes 0%."""
    if share is None:
        return NOT_MEASURED
    step = 10.0**-digits
    value = share * 100
    if 0 < share < 1:
        value = min(max(value, step), 100 - step)
    text = f"{value:.{digits}f}"
    return f"{text.removesuffix('.' + '0' * digits) if share in (0, 1) else text}%"


def bare_percent(share: float, digits: int = 1) -> str:
    """Format a percentage without its sign, for the lower end of a range."""
    return percent(share, digits).removesuffix("%")


def count(number: float, one: str, many: str = "") -> str:
    noun = one if number == 1 else many or one + "s"
    return f"{number:,.0f}{SPACE}{noun}"


def dollars(usd: float | None) -> str:
    return "free" if usd == 0 else optional_text(usd, dollars_text, NOT_MEASURED)


def size(number: float | None) -> str:
    return NOT_MEASURED if number is None else _keep_together(bytes_text(number))


def span(seconds: float | None) -> str:
    return NOT_MEASURED if seconds is None else _keep_together(duration_text(seconds))


def _keep_together(text: str) -> str:
    """Let no line break between a number and its unit."""
    return re.sub(r"(?<=[0-9]) (?=[A-Za-z])", SPACE, text)


def date(at: float) -> str:
    """Format a Unix second as `3 November 2026, 14:05 UTC`; "" if no calendar has it."""
    try:
        utc = time.gmtime(at)
    except (OverflowError, OSError, ValueError):
        return ""
    return f"{utc.tm_mday}{SPACE}{time.strftime('%B %Y, %H:%M', utc)} UTC"


def number(value: float, digits: int = 4) -> str:
    """Format a number with about four significant digits, and an exponent only if needed."""
    if not math.isfinite(value):
        return "not a number"
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
    """Replace each control character that could change how the rest of the text reads."""
    return "".join(
        c if c in HARMLESS or unicodedata.category(c) not in STEERING else "\ufffd" for c in text
    )
