"""Google's own timer of a server (maxRunDuration): when it deletes a machine, even one that hangs.

Google changes it only for a stopped machine, so it is set once, late enough for extensions.
"""

from __future__ import annotations

import math

from labctl.model import Need

# Lifetime of a server with a price if its need sets no limit; as in servers/deadlines.py.
DEFAULT_TTL_S = 12 * 3600
# The watchdog saves results and ends the server before.
MARGIN_S = 600
# Without max_ttl, a lifetime may be extended up to this multiple of it.
EXTENSION = 2
# Google's limits of the timer.
LEAST_S, MOST_S = 600, 120 * 86_400


def compute_run_limit_s(need: Need, price_usd_per_hour: float) -> int | None:
    """Return after how many seconds Google ends a new server; None for never.

    That is max_ttl, else twice the ttl, but never later than the budget pays for.
    """
    longest = _get_longest_s(need, price_usd_per_hour)
    spans = [] if longest is None else [longest]
    if need.budget_usd is not None and price_usd_per_hour > 0:
        spans.append(need.budget_usd / price_usd_per_hour * 3600)
    if not spans:
        return None
    return min(max(math.ceil(min(spans)) + MARGIN_S, LEAST_S), MOST_S)


def _get_longest_s(need: Need, price_usd_per_hour: float) -> float | None:
    if need.max_ttl_s is not None:
        return need.max_ttl_s
    if need.ttl_s is not None:
        return EXTENSION * need.ttl_s
    is_unlimited = need.budget_usd is not None or not need.deadline or price_usd_per_hour <= 0
    return None if is_unlimited else EXTENSION * DEFAULT_TTL_S
