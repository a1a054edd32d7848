"""The costs of servers, computed from the ledger: prices, and when each server ran.

Terminated machines disappear from a provider's lists within the hour, so tags cannot show the
past: what is not in the ledger is unknown, and reported as unknown.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from labctl.config.member_ids import list_lab_ids
from labctl.model import Run, Server, Value
from labctl.servers.context import LabContext
from labctl.state import LedgerEntry, State
from labctl.state.disks import STOPPED, KeptDisk, list_kept_disks

HOUR_S = 3600.0
ENDS = ("terminated", "gone", STOPPED)
# "created" is written when we create a server, "adopted" when we find it by its tags.
BEGINS = ("created", "adopted")


class ServerCost(Value, frozen=True):
    """The life and cost of one server. Dollars are None if no price is on record.

    `until` is when it ended, or now. `spot_saved_usd` compares with the on-demand price at its
    creation. `idle_share` (0 to 1) is the last value from its watchdog, None without one.
    """

    server_id: str
    lab: str
    lab_id: str
    provider: str = ""
    type: str = ""
    spot: bool = False
    since: float = 0.0
    until: float = 0.0
    running: bool = False
    hours: float = 0.0
    price_usd_per_hour: float | None = None
    cost_usd: float | None = None
    spot_saved_usd: float | None = None
    idle_share: float | None = None
    note: str = ""


class RunCost(Value, frozen=True):
    """The cost of one run: the hours that it ran on each server times the server's price.

    Of a run on several servers at once, `hours` are those on the first, and `cost_usd` is of all.
    `server_id` is its last server; `earlier_server_ids` are those from which it was recovered.
    """

    run_id: str
    server_id: str
    hours: float
    cost_usd: float | None
    earlier_server_ids: tuple[str, ...] = ()


class Costs(Value, frozen=True):
    """All known costs. `total_usd` sums what has a price; `complete` if all servers have one.

    `kept` are the kept disks, which cost money per month; they are in no total.
    """

    servers: tuple[ServerCost, ...]
    runs: tuple[RunCost, ...]
    kept: tuple[KeptDisk, ...]
    total_usd: float
    spot_saved_usd: float
    complete: bool


def compute_costs(context: LabContext, *, every_lab: bool = False) -> Costs:
    """Compute the lab's costs so far, or those of every lab on this machine's record."""
    now = time.time()
    lab_ids = [None] if every_lab else list_lab_ids(context.lab_id)
    servers = [one for each in lab_ids for one in list_server_costs(context.state, each, now)]
    by_id = {server.server_id: server for server in servers}
    lines: dict[tuple[str, str], list[LedgerEntry]] = {}
    for line in (line for each in lab_ids for line in context.state.list_events(lab_id=each)):
        if line.run_id:
            lines.setdefault((line.lab_id, line.run_id), []).append(line)
    runs = [
        (run, _compute_run_cost(run, lines.get((run.lab_id, run.id), []), by_id, now))
        for each in lab_ids
        for run in context.state.list_runs(each)
    ]
    return Costs(
        servers=tuple(servers),
        runs=tuple(_merge_parts(runs)),
        kept=tuple(disk for each in lab_ids for disk in list_kept_disks(context.state, each)),
        total_usd=sum(server.cost_usd or 0.0 for server in servers),
        spot_saved_usd=sum(server.spot_saved_usd or 0.0 for server in servers),
        complete=all(server.cost_usd is not None for server in servers),
    )


def spent_usd(state: State, lab_id: str, now: float, but: str = "") -> float:
    """Sum the known dollars of one lab's servers up to `now`, without the server `but`."""
    servers = list_server_costs(state, lab_id, now)
    return sum(server.cost_usd or 0.0 for server in servers if server.server_id != but)


def sum_stopped_s(state: State, server_id: str) -> float:
    """Sum the seconds that a server was stopped before its last start."""
    total_s, stopped_at = 0.0, 0.0
    for line in state.list_events(server_id=server_id):
        if line.kind == STOPPED:
            stopped_at = line.at
        elif line.kind == "started" and stopped_at:
            total_s += max(0.0, line.at - stopped_at)
            stopped_at = 0.0
    return total_s


def list_server_costs(state: State, lab_id: str | None, now: float) -> list[ServerCost]:
    """List one entry per server in the ledger or on record, the oldest first."""
    lines: dict[str, list[LedgerEntry]] = {}
    for line in state.list_events(lab_id=lab_id):
        if line.server_id:
            lines.setdefault(line.server_id, []).append(line)
    recorded = {server.id: server for server in state.list_servers(lab_id)}
    ids = dict.fromkeys([*lines, *recorded])
    entries = [_compute_life(lines.get(id_, []), recorded.get(id_), id_, now) for id_ in ids]
    return sorted(entries, key=lambda entry: entry.since)


def _compute_life(
    lines: list[LedgerEntry], server: Server | None, server_id: str, now: float
) -> ServerCost:
    begin = next((line for line in lines if line.kind in BEGINS), None)
    detail = begin.detail if begin else {}
    first = lines[0].at if lines else now
    since = detail.get("created_at") or (server.created_at if server else first)
    price = detail.get("price_usd_per_hour")
    if price is None and server is not None:
        price = server.offer.price_usd_per_hour
    on_demand = detail.get("on_demand_usd_per_hour")
    if on_demand is None and server is not None:
        on_demand = server.offer.on_demand_usd_per_hour
    up_s, until, running = _compute_running_s(lines, since, now, alive=server is not None)
    hours = up_s / HOUR_S
    spot = bool(detail.get("spot", server.offer.spot if server else False))
    watches = [line.detail for line in lines if line.kind == "watch"]
    return ServerCost(
        server_id=server_id,
        lab=detail.get("lab") or (server.lab if server else ""),
        lab_id=lines[0].lab_id if lines else (server.lab_id if server else ""),
        provider=detail.get("provider") or (server.provider if server else ""),
        type=detail.get("type") or (server.offer.type if server else ""),
        spot=spot,
        since=since,
        until=until,
        running=running,
        hours=hours,
        price_usd_per_hour=price,
        cost_usd=None if price is None else hours * price,
        spot_saved_usd=hours * (on_demand - price)
        if spot and on_demand is not None and price is not None
        else None,
        idle_share=watches[-1].get("idle_share") if watches else None,
        note=_describe_gaps(lines, begin),
    )


def _describe_gaps(lines: list[LedgerEntry], begin: LedgerEntry | None) -> str:
    """Say what the ledger does not know about a server; "" if it is complete.

    `labctl cost --json` prints these sentences: programs may compare them.
    """
    if begin is None:
        return "its price and beginning are not on record"
    if any(line.kind == "gone" for line in lines):
        return "it ended unseen: the hours count until that was noticed"
    return "" if begin.kind == "created" else "known from its tags: earlier stops are not counted"


def record_start(state: State, server: Server, kind: str = "adopted") -> None:
    """Record a server's price and start in the ledger, once."""
    if any(line.kind in BEGINS for line in state.list_events(server_id=server.id)):
        return
    offer = server.offer
    state.record(
        kind,
        lab_id=server.lab_id,
        server_id=server.id,
        detail={
            "provider": server.provider,
            "lab": server.lab,
            "type": offer.type,
            "spot": offer.spot,
            "price_usd_per_hour": offer.price_usd_per_hour,
            "on_demand_usd_per_hour": offer.on_demand_usd_per_hour,
            "created_at": server.created_at,
        },
    )


def _compute_running_s(
    lines: list[LedgerEntry], since: float, now: float, *, alive: bool
) -> tuple[float, float, bool]:
    """Return (billed seconds, Unix time of their end, whether the server still runs)."""
    total_s, started_at, ended_at = 0.0, since, now
    running = True
    for line in lines:
        if line.kind in ENDS and running:
            ended_at = line.detail.get("at", line.at)
            total_s += max(0.0, ended_at - started_at)
            running = False
        elif line.kind == "started" and not running:
            started_at, running = line.at, True
    if running and alive:
        return total_s + max(0.0, now - started_at), now, True
    if running:
        # Neither recorded as ended nor among the servers: count up to its last line in the ledger.
        ended_at = lines[-1].at if lines else since
        total_s += max(0.0, ended_at - started_at)
    return total_s, ended_at, False


def _compute_run_cost(
    run: Run, lines: list[LedgerEntry], servers: dict[str, ServerCost], now: float
) -> RunCost:
    """Sum over all servers of the run. `lines` are those of the ledger about it."""
    last = servers.get(run.server_id)
    end = run.ended_at or (last.until if last else run.started_at) or now
    start = run.started_at or end
    parts = [(last, max(0.0, end - start) / HOUR_S)]
    earlier = _list_earlier_starts(run, lines)
    for (server_id, since), (_, next_since) in pairwise([*earlier, (run.server_id, start)]):
        server = servers.get(server_id)
        until = min(server.until, next_since) if server else next_since
        parts.append((server, max(0.0, until - since) / HOUR_S))
    prices = [server.price_usd_per_hour if server else None for server, _ in parts]
    # As in the total, what an earlier server without a price on record cost is left out.
    cost = sum((price or 0.0) * hours for price, (_, hours) in zip(prices, parts, strict=True))
    return RunCost(
        run_id=run.id,
        server_id=run.server_id,
        hours=sum(hours for _, hours in parts),
        cost_usd=None if prices[0] is None else cost,
        earlier_server_ids=tuple(server_id for server_id, _ in earlier),
    )


def _merge_parts(runs: Sequence[tuple[Run, RunCost]]) -> list[RunCost]:
    """Merge the parts of each run on several servers: the hours of the first, the cost of all.

    A part on a server beside the first has the lab id of that server.
    """
    lab_of = {
        member_id: lab_id
        for lab_id in {run.lab_id for run, _ in runs}
        for member_id in list_lab_ids(lab_id)[1:]
    }
    merged: dict[tuple[str, str], RunCost] = {}
    for run, cost in sorted(runs, key=lambda pair: pair[0].lab_id in lab_of):
        key = lab_of.get(run.lab_id, run.lab_id), run.id
        first = merged.get(key)
        if first is not None:
            total = _add_usd(first.cost_usd, cost.cost_usd)
            cost = msgspec.structs.replace(first, cost_usd=total)
        merged[key] = cost
    return list(merged.values())


def _add_usd(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second


def _list_earlier_starts(run: Run, lines: list[LedgerEntry]) -> list[tuple[str, float]]:
    """List the run's servers before its last one, and the Unix second of its first line there."""
    starts: dict[str, float] = {}
    for line in lines:
        if line.server_id and line.server_id != run.server_id:
            at = line.detail.get("at", line.at)
            starts[line.server_id] = min(at, starts.get(line.server_id, at))
    return sorted(starts.items(), key=lambda start: start[1])
