"""What there is: from the record at once, or asked of the provider and the server."""

from __future__ import annotations

import time
from typing import Any

from labctl.actions.ground import Ground
from labctl.errors import ConnectError


def status(ground: Ground, *, refresh: bool) -> dict[str, Any]:
    """Server, runs, clocks and dollars of a lab, as plain values.

    `server` is None where there is none. `reachable` is None when nobody asked. Costs are the
    price times the hours since creation; there is no figure where the price is not known.
    """
    machine: dict[str, Any] = {}
    reachable: bool | None = None
    why = ""
    if refresh:
        from labctl.actions.provision import adopt

        adopt(ground)
    server = ground.state.server_of_lab(ground.lab_id)
    if refresh and server is not None and server.state == "running":
        from labctl.actions import runs

        try:
            machine = runs.refresh(ground, server)
            reachable = True
        except ConnectError as error:
            reachable, why = False, error.what
    now = time.time()
    hours = (now - server.created_at) / 3600 if server else 0.0
    return {
        "lab": ground.config.name,
        "lab_id": ground.lab_id,
        "server": server,
        "reachable": reachable,
        "why": why,
        "disk": machine.get("disk"),
        "clocks": _clocks(ground, hours) if server else {},
        "cost_usd": round(hours * server.offer.price_usd_per_hour, 4) if server else 0.0,
        "runs": list(reversed(ground.state.runs(ground.lab_id))),
        "now": now,
    }


def _clocks(ground: Ground, hours: float) -> dict[str, Any]:
    """The server's age and the limits that lab.yaml names; `enforced` says who acts on them."""
    need = ground.config.server.need
    return {
        "up_s": hours * 3600,
        "ttl_s": need.ttl_s,
        "idle_s": need.idle_s,
        "budget_usd": need.budget_usd,
        "enforced": False,
    }
