"""What there is: from the record at once, or asked of the provider and the server."""

from __future__ import annotations

import time
from typing import Any

from labctl.errors import ConnectError
from labctl.model import Server
from labctl.servers.context import Ground
from labctl.servers.cost import spent_usd
from labctl.state.disks import list_kept_disks


def status(ground: Ground, *, refresh: bool, why: bool = False) -> dict[str, Any]:
    """Server, runs, clocks and dollars of a lab, as plain values.

    `keeper` is the host whose keeper looks after it, "" for none, or where nobody asked.
    `server` is None where there is none. `reachable` is None when nobody asked. `watch` is what its
    watchdog last said, and `watched_at` when; {} where none was heard. Costs are those of the
    ledger; "kept" are the lab's disks that outlived a server; "ended" says, by server, why it
    ended, where its provider told. With `why` the watchdog's last
    decisions are in `watch`, as "decisions".
    """
    machine: dict[str, Any] = {}
    reachable: bool | None = None
    said = ""
    keeper = ""
    if refresh:
        from labctl.servers.adoption import adopt
        from labctl.servers.gate import admit
        from labctl.servers.kept_disks import look
        from labctl.servers.open_costs import told_what_bills

        if ground.state.events(lab_id=ground.lab_id, kind="handed", limit=1):
            from labctl.lifecycle.reconcile import hear

            keeper = hear(ground)
        with told_what_bills(ground):
            adopted = adopt(ground)
            if adopted is not None and adopted.state == "running":
                admit(ground, adopted)
            look(ground)
    server = ground.state.server_of_lab(ground.lab_id)
    if refresh and server is not None and server.state == "running":
        from labctl.runs import runs
        from labctl.servers import guard, held_disks

        held_disks.renew(ground, server)
        try:
            machine = runs.refresh(ground, server)
            reachable = True
            watched = guard.watch(ground, server) if why else machine.get("watch")
            keep_watch(ground, server, watched or {})
        except ConnectError as error:
            reachable, said = False, error.what
    now = time.time()
    watch, watched_at = _last_watch(ground, server) if server else ({}, None)
    return {
        "lab": ground.config.name,
        "lab_id": ground.lab_id,
        "keeper": keeper,
        "server": server,
        "reachable": reachable,
        "why": said,
        "disk": machine.get("disk"),
        "clocks": _clocks(ground, server, watch, now) if server else {},
        "watch": watch,
        "watched_at": watched_at,
        "cost_usd": round(spent_usd(ground.state, ground.lab_id, now), 4),
        "kept": list_kept_disks(ground.state, ground.lab_id),
        "ended": _ended(ground),
        "runs": list(reversed(ground.state.runs(ground.lab_id))),
        "now": now,
    }


def _ended(ground: Ground) -> dict[str, str]:
    """Why servers have ended, by id, where their provider said it."""
    gone = ground.state.events(lab_id=ground.lab_id, kind="gone")
    return {one.server_id: one.detail["why"] for one in gone if one.detail.get("why")}


def _clocks(ground: Ground, server: Server, watch: dict[str, Any], now: float) -> dict[str, Any]:
    """The server's age and the limits that lab.yaml names; `enforced` whether it acts on them."""
    need = ground.config.server.need
    return {
        "up_s": now - server.created_at,
        "ttl_s": need.ttl_s,
        "idle_s": need.idle_s,
        "budget_usd": need.budget_usd,
        "enforced": bool(watch.get("alive")),
    }


def keep_watch(ground: Ground, server: Server, watch: dict[str, Any]) -> None:
    """Write down what the watchdog says: the ledger's only knowledge of idle hours."""
    if not watch:
        return
    elapsed_s, idle_s = watch.get("elapsed_s") or 0.0, watch.get("idle_total_s") or 0.0
    share = round(min(1.0, idle_s / elapsed_s), 4) if elapsed_s else None
    ground.state.record(
        "watch",
        lab_id=ground.lab_id,
        server_id=server.id,
        detail={"watch": watch, "idle_share": share},
    )


def _last_watch(ground: Ground, server: Server) -> tuple[dict[str, Any], float | None]:
    said = ground.state.events(server_id=server.id, kind="watch", limit=1)
    return (said[0].detail["watch"], said[0].at) if said else ({}, None)
