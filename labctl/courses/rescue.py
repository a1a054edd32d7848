"""A server's last minutes: its watchdog stops the runs, and the keeper brings their results home.

The watchdog stops them `Ground.saver_s` before a limit and waits: all of it is inside the budget.
"""

from __future__ import annotations

import time
from typing import Any, Literal

from labctl.errors import LabError
from labctl.model import Server
from labctl.servers import guard
from labctl.servers.context import Ground
from labctl.state import State

Limit = Literal["budget", "time"]
LIMITS: dict[str, Limit] = {"budget": "budget", "ttl": "time"}
# Seconds before the wind-down from which on the keeper asks that server alone: a round and a bit.
NEAR_S = 100.0
POLL_S = 3.0


def is_near_end(state: State, server: Server, now: float, left_s: float) -> bool:
    """Whether the server's watchdog, as last heard of, winds down for a limit now or soon.

    `left_s` is for how long the ledger has money: it counts where the watchdog fell silent since.
    """
    said = state.events(server_id=server.id, kind="watch", limit=1)
    if not said:
        armed = state.events(server_id=server.id, kind=guard.EVENT, limit=1)
        return bool(armed) and left_s < NEAR_S
    watch = said[0].detail.get("watch", {})
    ends_in_s = min(_ends_in_s(watch) - (now - said[0].at), left_s)
    return bool(_limit_under_way(watch)) or ends_in_s < NEAR_S


def await_end(ground: Ground, server: Server) -> Limit | None:
    """Wait until the watchdog stops the runs; which limit it is for, None where the end moved away.

    One that stays silent, or that somebody has stopped, is not waited for beyond the limit.
    """
    limit: Limit | None = None
    give_up = time.monotonic() + NEAR_S + ground.saver_s / 2
    while time.monotonic() < give_up:
        try:
            watch = guard.watch(ground, server)
        except LabError:
            watch = {}
        if (now := _limit_under_way(watch)) is not None:
            return now
        if watch:
            limit = LIMITS.get(str(watch.get("ends_by")))
            if _ends_in_s(watch) > 2 * NEAR_S:
                return None
        time.sleep(POLL_S)
    return limit or "budget"


def _limit_under_way(watch: dict[str, Any]) -> Limit | None:
    return LIMITS.get(str(watch.get("ending")))


def _ends_in_s(watch: dict[str, Any]) -> float:
    """Seconds until it winds down for a limit. A student who is root there may answer anything."""
    value = watch.get("ends_in_s")
    known = isinstance(value, int | float) and str(watch.get("ends_by")) in LIMITS
    return float(value) if known and value is not None else float("inf")
