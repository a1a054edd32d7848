"""A server's last minutes: its watchdog stops the runs, and the keeper saves their results.

The watchdog stops the runs `LabContext.saver_s` before a limit and waits, so that saving them stays
within the budget.
"""

from __future__ import annotations

from typing import Literal

from labctl.errors import LabError
from labctl.model import Server
from labctl.retry import poll_until
from labctl.servers import guard
from labctl.servers.context import LabContext
from labctl.servers.watch_reports import parse_watch
from labctl.state import State
from labctl.wire.watchdog import WatchRecord

Limit = Literal["budget", "time"]
LIMITS: dict[str, Limit] = {"budget": "budget", "ttl": "time"}
# Seconds before the wind-down at which the keeper polls that server alone: a bit over one round.
NEAR_S = 100.0
POLL_S = 3.0


def is_near_end(state: State, server: Server, now: float, left_s: float) -> bool:
    """Tell whether the server's watchdog winds down for a limit now or soon, by its last report.

    `left_s` is for how long the ledger has money: it decides if the watchdog has been silent since.
    """
    reports = state.list_events(server_id=server.id, kind="watch", limit=1)
    if not reports:
        armed = state.list_events(server_id=server.id, kind=guard.EVENT, limit=1)
        return bool(armed) and left_s < NEAR_S
    watch = parse_watch(reports[0].detail.get("watch")) or WatchRecord()
    ends_in_s = min(_ends_in_s(watch) - (now - reports[0].at), left_s)
    return watch.ending in LIMITS or ends_in_s < NEAR_S


def await_shutdown(context: LabContext, server: Server) -> Limit | None:
    """Wait until the watchdog stops the runs; return its limit, or None if the end was postponed.

    A watchdog that is silent or was stopped is not waited for beyond the limit.
    """
    watch = WatchRecord()

    def is_decided() -> bool:
        nonlocal watch
        try:
            current = guard.read_watchdog(context, server)
        except LabError:
            return False
        watch = current or watch
        return current is not None and (
            current.ending in LIMITS or _ends_in_s(current) > 2 * NEAR_S
        )

    if poll_until(is_decided, pause_s=POLL_S, deadline_s=NEAR_S + context.saver_s / 2):
        return LIMITS.get(watch.ending)
    return LIMITS.get(watch.ends_by, "budget")


def _ends_in_s(watch: WatchRecord) -> float:
    """Return the seconds until the wind-down for a limit, or infinity."""
    if watch.ends_in_s is None or watch.ends_by not in LIMITS:
        return float("inf")
    return watch.ends_in_s
