"""Figures as the dashboard writes them: short, with their unit, and the same for the same value.

A part of a page is sent again only where its text differs; so ages are left to the browser, which
is given the moment.
"""

from __future__ import annotations

import time

from markupsafe import Markup

from labctl.insight.report.formatting import SPACE, size, visible

__all__ = ["clock", "moment", "percent", "shown", "size", "span", "usd"]


def usd(value: float | None) -> str:
    """`$4.20`; `-` where there is none. Never $0.00 for what is not nothing."""
    if value is None:
        return "-"
    if 0 < value < 0.005:
        return "< $0.01"
    return f"{'-' if value < 0 else ''}${abs(value):,.2f}"


def percent(value: float | None) -> str:
    """Of percent, not of a share."""
    return "-" if value is None else f"{value:.0f}{SPACE}%"


def span(seconds: float | None) -> str:
    """`45 s`, `12 min`, `2 h 5 min`, `3 d`; `-` where there is none."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{max(0, seconds):.0f}{SPACE}s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes}{SPACE}min"
    hours, rest = divmod(minutes, 60)
    if hours < 36:
        return f"{hours}{SPACE}h" + (f" {rest}{SPACE}min" if rest else "")
    return f"{round(hours / 24)}{SPACE}d"


def clock(at: float | None) -> str:
    """`21 Nov 14:05 UTC`; "-" for none."""
    if not at:
        return "-"
    try:
        return time.strftime("%d %b %H:%M UTC", time.gmtime(at))
    except (OverflowError, OSError, ValueError):
        return "-"


def moment(at: float | None) -> Markup:
    """A time element: the browser's script turns it into `3 min ago` and keeps it so."""
    if not at:
        return Markup("-")
    return Markup('<time data-at="{}">{}</time>').format(int(at), clock(at))


def shown(value: object) -> object:
    """Plain text without what would steer it; what is HTML already stays as it is."""
    return visible(value) if type(value) is str else value
