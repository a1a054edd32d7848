"""Formats of figures on the dashboard: short, with a unit, and equal for equal values.

A part of a page is sent again only if its text changes. Therefore ages are computed in the browser,
from the time itself.
"""

from __future__ import annotations

from datetime import UTC, tzinfo

from markupsafe import Markup

from labctl.config.times import local_time_text
from labctl.insight.report.formatting import SPACE, size, visible
from labctl.insight.report.formatting import span as report_span
from labctl.text import dollars_text, extension_text, optional_text

__all__ = ["clean_text", "format_time", "moment", "percent", "size", "span", "usd"]


def usd(value: float | None) -> str:
    return optional_text(value, dollars_text)


def percent(value: float | None) -> str:
    """Write percent, with `-` for None; the value is 0 to 100, not a share."""
    return "-" if value is None else f"{value:.0f}%"


def span(seconds: float | None) -> str:
    return optional_text(seconds, report_span)


def extension(seconds: int) -> str:
    return extension_text(seconds).replace(" ", SPACE)


def format_time(at: float | None, zone: tzinfo = UTC) -> str:
    """Write a Unix time in a zone, as `labctl submit` does; "-" for None and 0."""
    if not at:
        return "-"
    try:
        return local_time_text(at, zone)
    except (OverflowError, OSError, ValueError):
        return "-"


def moment(at: float | None, zone: tzinfo = UTC) -> Markup:
    """Return a time element, which the browser's script shows as `3 min ago`."""
    if not at:
        return Markup("-")
    return Markup('<time data-at="{}">{}</time>').format(int(at), format_time(at, zone))


def clean_text(value: object) -> object:
    """Make control characters in plain text visible; HTML (Markup) is returned unchanged."""
    return visible(value) if type(value) is str else value
