"""The check of this machine's clock, for providers that refuse requests with a wrong time."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from labctl.http_client import open_session
from labctl.model import Check
from labctl.providers import ClockSource
from labctl.text import duration_text

CLOCK_TIMEOUT_S = 5.0
# The header `Date` of a reply has whole seconds, and a slow reply makes it less exact.
CLOCK_WARNING_S = 30.0
# AWS refuses requests whose time is 5 minutes off.
CLOCK_ERROR_S = 240.0


def list_clock_checks(provider: object) -> list[Check]:
    """Check this machine's clock if the provider refuses requests with a wrong time."""
    return [check_clock(provider.clock_url)] if isinstance(provider, ClockSource) else []


def check_clock(url: str) -> Check:
    """Compare the clock with that of a web server; skipped if it does not answer."""
    host = urlsplit(url).hostname
    before = time.time()
    try:
        at = parsedate_to_datetime(_fetch_date(url)).timestamp()
    except (OSError, TypeError, ValueError):
        detail = f"not checked, because {host} did not answer with the time"
        return Check(name="clock", ok=True, skipped=True, detail=detail)
    # The server rounds down, on average by half a second.
    ahead = (before + time.time()) / 2 - (at + 0.5)
    if abs(ahead) < CLOCK_WARNING_S:
        return Check(name="clock", ok=True, detail=f"right, compared with {host}")
    side = "ahead" if ahead > 0 else "behind"
    return Check(
        name="clock",
        ok=abs(ahead) < CLOCK_ERROR_S,
        warning=True,
        detail=f"{duration_text(abs(ahead))} {side} of {host}; clouds refuse requests with a wrong "
        "time",
        next="sudo timedatectl set-ntp true\nsudo sntp -sS time.apple.com   # on macOS",
    )


def _fetch_date(url: str) -> str:
    """Fetch the header `Date` of a reply; a refusal has one, too."""
    with open_session() as session:
        response = session.head(url, timeout=CLOCK_TIMEOUT_S, allow_redirects=True)
        return str(response.headers.get("Date", ""))
