"""The status of a lab: from the records at once, or refreshed from provider and server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from labctl.config.member_ids import list_lab_ids
from labctl.errors import BusyError, ConnectError
from labctl.events import report_wait
from labctl.lazy import lazy_imports
from labctl.lifecycle.lab_status import Clocks, FreeDisk, InterruptedDown, LabStatus
from labctl.model import Run, Server
from labctl.servers.context import LabContext
from labctl.servers.cost import spent_usd
from labctl.servers.provider_traits import describe_provider
from labctl.servers.watch_reports import parse_watch
from labctl.state.disks import STOPPED, find_stopped_disk, list_kept_disks
from labctl.state.measured_runs import list_measured
from labctl.state.server_ends import EXPLAINED, list_ends
from labctl.wire.codec import to_json

if TYPE_CHECKING:  # `status` without a refresh starts faster without them
    from labctl.wire.runs import StatusReply
    from labctl.wire.watchdog import WatchRecord

with lazy_imports(__name__):
    from labctl.lifecycle import reconcile
    from labctl.runs import runs
    from labctl.servers import (
        adoption,
        deadlines,
        disk_retention,
        firewall,
        gang,
        guard,
        kept_disks,
        moves,
        open_costs,
        pending_attempts,
    )
    from labctl.state import ledgers

# Kind of the ledger entry of a `labctl run --down` that was interrupted before it ended the server.
INTERRUPTED_DOWN = "interrupted down"


def read_status(context: LabContext, *, refresh: bool, why: bool = False) -> LabStatus:
    """Return the lab's status from its records, with `refresh` after asking provider and server.

    With `why`, it has the watchdog's last decisions.
    """
    answers = _query_all(context, why=why) if refresh else _StatusAnswers()
    machine = answers.machine
    server = context.state.get_lab_server(context.lab_id)
    now = time.time()
    ends = list_ends(context.state, context.lab_id)
    reasons = {end.server_id: str(end.detail.get("why") or "") for end in ends}
    watch, watched_at = _last_watch(context, server) if server else ({}, None)
    others = list_other_servers(context)
    lab_ids = _list_recorded_lab_ids(context, others)
    return LabStatus(
        lab=context.config.name,
        lab_id=context.lab_id,
        executor=_find_executor(context, server, is_config_complete=refresh),
        keeper=answers.keeper,
        server=server,
        unfinished_up=server is None
        and _has_unfinished_up(context, refresh and not answers.provider_problem),
        servers=tuple(others),
        count=context.config.server.count,
        joinable=answers.joinable,
        reachable=answers.reachable,
        why=answers.failure,
        provider_problem=answers.provider_problem,
        disk=FreeDisk(**machine.disk._asdict()) if machine else None,
        clocks=_read_clocks(context, server, watch, now) if server else None,
        watch=watch,
        watched_at=watched_at,
        is_unguarded=bool(machine and server and not watch and guard.is_unguarded(context, server)),
        interrupted_down=_find_interrupted_down(context, server) if server else None,
        cost_usd=round(sum(spent_usd(context.state, one, now) for one in lab_ids), 4),
        stopped=find_stopped_disk(context.state, server),
        stop_reasons=tuple(
            _list_stop_reasons(context, server, parse_watch(watch), watched_at, now)
        ),
        kept=tuple(disk for one in lab_ids for disk in list_kept_disks(context.state, one)),
        moving=tuple(one for one in context.state.list_servers(context.lab_id) if one.moving),
        ended={server_id: why for server_id, why in reasons.items() if why},
        last_end=reasons[ends[-1].server_id] if ends else "",
        runs=tuple(_list_runs(context, lab_ids)),
        now=now,
        measured=list_measured(context.state, context.lab_id),
    )


class _StatusAnswers(NamedTuple):
    """What provider and server said; without a query, nothing. `failure` is the server's."""

    keeper: str = ""
    provider_problem: str = ""
    machine: StatusReply | None = None
    reachable: bool | None = None
    failure: str = ""
    joinable: Server | None = None


def _query_all(context: LabContext, *, why: bool) -> _StatusAnswers:
    """Query the provider, and then the server that its answer leaves on record."""
    answers = _StatusAnswers()
    try:
        answers = answers._replace(keeper=_refresh_records(context))
    except BusyError as error:
        if not deadlines.is_guarded_elsewhere(context.provider):
            raise
        # A server of a course works without its keeper.
        answers = answers._replace(provider_problem=error.what)
    server = context.state.get_lab_server(context.lab_id)
    if server is not None and server.state == "running":
        disk_retention.renew(context, server)
        try:
            with report_wait(context.reporter, f"reading the runs on {server.alias}"):
                machine = _query_server(context, server, why)
        except ConnectError as error:
            return answers._replace(reachable=False, failure=error.what)
        return answers._replace(reachable=True, machine=machine)
    if server is None and not answers.provider_problem:
        answers = answers._replace(joinable=adoption.find_joinable(context))
        _explain_last_end(context)
    return answers


def _list_runs(context: LabContext, lab_ids: Sequence[str]) -> list[Run]:
    """List the recorded runs, the newest first. One on all servers counts as that of the first."""
    found: dict[str, Run] = {}
    for lab_id in lab_ids:
        for run in context.state.list_runs(lab_id):
            found.setdefault(run.id, run)
    if len(lab_ids) == 1:
        return list(reversed(found.values()))
    return sorted(found.values(), key=lambda run: run.created_at, reverse=True)


def list_other_servers(context: LabContext) -> list[Server]:
    """List the recorded servers beside the first, by rank, however many lab.yaml asks for."""
    every = [one for one in context.state.list_servers() if one.lab_id != context.lab_id]
    if not every or context.rank is not None:
        return []
    ranks = {lab_id: rank for rank, lab_id in enumerate(list_lab_ids(context.lab_id))}
    others = [one for one in every if one.lab_id in ranks]
    return sorted(others, key=lambda one: ranks[one.lab_id])


def _list_recorded_lab_ids(context: LabContext, servers: Sequence[Server]) -> list[str]:
    """List the lab ids of all servers that the lab has or had: lab.yaml may ask for fewer now."""
    recorded = context.state.list_lab_ids() | {server.lab_id for server in servers}
    recorded.discard(context.lab_id)
    if not recorded or context.rank is not None:
        return [context.lab_id]
    others = list_lab_ids(context.lab_id)[1:]
    return [context.lab_id, *(lab_id for lab_id in others if lab_id in recorded)]


def _refresh_records(context: LabContext) -> str:
    """Merge what the keeper and the provider know into the records; return the keeper's host."""
    keeper = ""
    if context.state.list_events(lab_id=context.lab_id, kind=ledgers.HANDED, limit=1):
        keeper = reconcile.merge_keeper_records(context)
    waiting = report_wait(
        context.reporter, f"checking the server ({describe_provider(context.provider)})"
    )
    with waiting, open_costs.explain_open_costs(context):
        adopted = adoption.adopt(context)
        if adopted is None:
            pending_attempts.settle_attempts(context)
        others = [*gang.build_members(context)[1:], *gang.list_surplus(context)]
        for member in others:
            adoption.adopt(member)
        for part in filter(None, [moves.build_part(context, one) for one in moves.PARTS]):
            adoption.adopt(part)
        if adopted is not None and adopted.state == "running":
            firewall.admit(context, adopted)
        # Also those of servers that lab.yaml asked for before.
        ranked = list_lab_ids(context.lab_id)[1:] if context.rank is None else ()
        kept_disks.list_shown_disks(context, ranked)
    return keeper


def _query_server(context: LabContext, server: Server, why: bool) -> StatusReply:
    """Record the server's runs and its watchdog's report, and return its reply."""
    machine = runs.refresh(context, server)
    reported = parse_watch(machine.watch)
    record_watch(context, server, guard.read_watchdog(context, server) if why else reported)
    return machine


def _find_executor(context: LabContext, server: Server | None, *, is_config_complete: bool) -> str:
    """Return how runs are started.

    A provider may have one executor alone. It is not loaded for a look at the record, which has
    what `up` used.
    """
    configured = context.config.server.executor
    if server is None or is_config_complete or configured != "docker":
        return configured
    events = context.state.list_events(server_id=server.id, kind="ready", limit=1)
    return str(events[0].detail.get("executor") or configured) if events else configured


def _has_unfinished_up(context: LabContext, refresh: bool) -> bool:
    """Return whether a request for a server has no reply, and may still lead to one."""
    if refresh:
        return bool(pending_attempts.list_pending_attempts(context))
    return bool(context.state.list_open_attempts(context.lab_id))


def _find_interrupted_down(context: LabContext, server: Server) -> InterruptedDown | None:
    for line in context.state.list_events(server_id=server.id, kind=INTERRUPTED_DOWN, limit=1):
        return InterruptedDown(run=line.run_id, why=line.detail["why"], at=line.at)
    return None


def _explain_last_end(context: LabContext) -> None:
    """Ask again why the last server ended: a keeper may notice the end after its student does."""
    for end in list_ends(context.state, context.lab_id)[-1:]:
        if end.kind != "gone" or end.detail.get("why"):
            continue
        if why := adoption.explain_end(context, end.server_id):
            detail = {"why": why}
            context.state.record(
                EXPLAINED, lab_id=context.lab_id, server_id=end.server_id, detail=detail
            )


def _read_clocks(context: LabContext, server: Server, watch: dict[str, Any], now: float) -> Clocks:
    need = context.config.server.need
    return Clocks(
        up_s=now - server.created_at,
        ttl_s=need.ttl_s,
        idle_s=need.idle_s,
        budget_usd=need.budget_usd,
        enforced=bool(watch.get("alive")),
    )


def _list_stop_reasons(
    context: LabContext,
    server: Server | None,
    report: WatchRecord | None,
    watched_at: float | None,
    now: float,
) -> list[str]:
    """List the limits by which the watchdog may have stopped the server, the likeliest first."""
    if server is None or server.state != "stopped" or _was_stopped_here(context, server):
        return []
    if report is None or watched_at is None:
        return []
    if report.ending:
        return [report.ending]
    clocks = {
        "ttl": report.ttl_left_s,
        "budget": report.budget_left_s,
        "idle": report.idle_left_s,
    }
    left = {name: left_s for name, left_s in clocks.items() if left_s is not None}
    passed = [name for name in sorted(left, key=left.__getitem__) if watched_at + left[name] <= now]
    # A busy server may be idle later. For any other, the report says which limit comes first.
    if report.ends_by in passed and not report.busy:
        return [report.ends_by]
    # The report of a busy server has no idle clock.
    return passed or (["idle"] if context.config.server.need.idle_s else [])


def _was_stopped_here(context: LabContext, server: Server) -> bool:
    """Whether `labctl stop` stopped it, and nothing has started it since."""
    changes = [
        line.kind
        for line in context.state.list_events(server_id=server.id)
        if line.kind in (STOPPED, "started")
    ]
    return changes[-1:] == [STOPPED]


def record_watch(context: LabContext, server: Server, watch: WatchRecord | None) -> None:
    """Record the watchdog's report, the ledger's only source for idle hours."""
    if watch is None:
        return
    elapsed_s, idle_s = watch.elapsed_s, watch.idle_total_s
    share = round(min(1.0, idle_s / elapsed_s), 4) if elapsed_s else None
    context.state.record(
        "watch",
        lab_id=context.lab_id,
        server_id=server.id,
        detail={"watch": to_json(watch), "idle_share": share},
    )


def _last_watch(context: LabContext, server: Server) -> tuple[dict[str, Any], float | None]:
    reports = context.state.list_events(server_id=server.id, kind="watch", limit=1)
    return (reports[0].detail["watch"], reports[0].at) if reports else ({}, None)
