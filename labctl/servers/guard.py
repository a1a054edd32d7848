"""Control the watchdog on a server: arm it with lab.yaml's limits, read its state, extend it.

A watchdog's report is a WatchRecord; None if the server has no watchdog.
"""

from __future__ import annotations

import time

import msgspec

from labctl.model import Need, Server
from labctl.providers import (
    Guarded,
    Keep,
    Leasable,
    Provider,
    ReclaimNoticeSource,
    Stoppable,
    SubmitsJobs,
)
from labctl.servers import cost, deadlines, disk_retention
from labctl.servers.context import LabContext
from labctl.state import LedgerEntry
from labctl.wire.codec import to_json
from labctl.wire.watchdog import (
    EXTEND,
    GUARD,
    WATCH,
    EndingRecord,
    ExtendRequest,
    GuardLimits,
    GuardRequest,
    WatchRecord,
    WatchRequest,
)

DECISIONS = 20
EVENT = "guarded"
# how long the disk of a server without a deadline is kept; each `up` restarts this time
NO_DEADLINE_S = 30 * 86_400.0


def arm(
    context: LabContext,
    server: Server,
    *,
    budget_left_usd: float | None = None,
    ceiling_s: int | None = None,
    always: bool = False,
) -> WatchRecord | None:
    """Give the server's watchdog lab.yaml's limits, and move the provider's timer to match.

    Safe to repeat. `budget_left_usd` is what this server may cost, None for the whole budget.
    Without `always`, does nothing and returns None if there is nothing to guard: no limit, no
    price, no store, and no watchdog armed before. Time and dollars that the watchdog has counted
    stay counted, even if this machine has lost its own record of them.
    """
    if isinstance(context.provider, Guarded):
        return _watch_foreign(context, server, context.provider)
    if isinstance(context.provider, SubmitsJobs):
        return None
    if not (always or ceiling_s or _has_reason_to_guard(context, server)):
        return None
    need, price = deadlines.get_server_need(context, server), server.offer.price_usd_per_hour
    before = context.state.list_events(server_id=server.id, kind=EVENT)
    budget = need.budget_usd if budget_left_usd is None else budget_left_usd
    limits = _derive_limits(need, price, budget, ceiling_s)
    disk = _decide_disk(context, server, deadlines.span_s(need, price, budget))
    request = GuardRequest(
        lab=context.config.name,
        lab_id=_find_guarded_lab_id(context, server),
        server_id=server.id,
        limits=limits,
        ending=_describe_ending(context, server, disk),
        elapsed_s=max(0.0, time.time() - server.created_at),
        stopped_s=cost.sum_stopped_s(context.state, server.id),
        store=context.config.store,
        mirror_s=context.config.mirror_s,
        notices=_find_notice_service(context.provider),
    )
    watch = context.open_agent(server).call(GUARD, request).watch
    if not before or _has_changed(before[-1], limits):
        detail = {"limits": to_json(limits)}
        context.state.record(EVENT, lab_id=context.lab_id, server_id=server.id, detail=detail)
    _settle_disk(context, server, watch)
    if not deadlines.is_timer_denied(context, server):
        deadlines.move_timer(context, server, watch)
    return watch


def _find_notice_service(provider: Provider) -> str:
    """Return the name of the service by which a server learns of its reclaim; "" for EC2's."""
    return provider.notice_service if isinstance(provider, ReclaimNoticeSource) else ""


def is_unguarded(context: LabContext, server: Server) -> bool:
    """Whether the server has no watchdog because nothing calls for one: no limit, price or store.

    Servers that somebody else guards, and those whose runs are jobs of a cluster, are not.
    """
    if isinstance(context.provider, Guarded | SubmitsJobs):
        return False
    return not _has_reason_to_guard(context, server)


def _has_reason_to_guard(context: LabContext, server: Server) -> bool:
    """Whether the server has a limit, a price or a store, or had a watchdog armed before."""
    need = deadlines.get_server_need(context, server)
    if any((need.ttl_s, need.idle_s, need.budget_usd is not None, context.config.store)):
        return True
    if server.offer.price_usd_per_hour:
        return True
    return bool(context.state.list_events(server_id=server.id, kind=EVENT, limit=1))


def _has_changed(event: LedgerEntry, limits: GuardLimits) -> bool:
    """Whether a person gave other limits than those on record; a default replaces none."""
    recorded = event.detail.get("limits")
    return recorded is not None and not limits.ttl_is_default and recorded != to_json(limits)


def restore_limits(context: LabContext, need: Need, server_id: str) -> Need:
    """Return the need with the limits that a server was given, if it names none itself.

    They may come from the options of the `up` that created the server.
    """
    events = context.state.list_events(server_id=server_id, kind=EVENT, limit=1)
    recorded = events[0].detail.get("limits") if events else None
    if recorded is None:
        return need
    idle_s = need.idle_s or recorded.get("idle_s")
    need = msgspec.structs.replace(need, idle_s=idle_s)
    if recorded.get("ttl_is_default") or not deadlines.has_no_limit(need):
        return need
    return msgspec.structs.replace(
        need,
        ttl_s=recorded.get("ttl_s"),
        max_ttl_s=recorded.get("ceiling_s"),
        budget_usd=recorded.get("budget_whole_usd"),
    )


def _settle_disk(context: LabContext, server: Server, watch: WatchRecord | None) -> None:
    """Let the disk go with the server, or keep it past the watchdog's deadline."""
    if _can_lose_disk(context):
        # Only now does its watchdog know who saves its results.
        disk_retention.release(context, server)
    elif disk_retention.is_kept(context, server):
        # Others may have extended the deadline.
        _keep_disk_past(context, server, deadlines.list_seconds_left(watch))


def _derive_limits(
    need: Need, price_usd_per_hour: float, budget_usd: float | None, ceiling_s: int | None
) -> GuardLimits:
    return GuardLimits(
        ttl_s=deadlines.ttl_s(need, price_usd_per_hour),
        ttl_is_default=deadlines.has_no_limit(need),
        idle_s=need.idle_s,
        budget_usd=budget_usd,
        budget_whole_usd=need.budget_usd,
        price_usd_per_hour=price_usd_per_hour,
        ceiling_s=ceiling_s,
    )


def read_watchdog(
    context: LabContext, server: Server, *, decisions: int = DECISIONS
) -> WatchRecord | None:
    """Return the watchdog's report now, with the last `decisions`; None if none was armed."""
    request = WatchRequest(_find_guarded_lab_id(context, server), decisions)
    return context.open_agent(server).call(WATCH, request).watch


def extend(context: LabContext, server: Server, span_s: int) -> WatchRecord | None:
    """Move the deadline by `span_s` seconds and suspend the idle limit for as long.

    PolicyError beyond the ceiling or the budget, NotFoundError if nothing guards the server.
    """
    if isinstance(context.provider, Guarded):
        watch = context.provider.extend_life(server.id, span_s)
        return watch or read_watchdog(context, server)
    request = ExtendRequest(_find_guarded_lab_id(context, server), span_s)
    extended = context.open_agent(server).call(EXTEND, request).watch
    if _should_hold_disk(context, server):
        _keep_disk_past(context, server, deadlines.list_seconds_left(extended) or [span_s])
    return extended


def _watch_foreign(context: LabContext, server: Server, provider: Guarded) -> WatchRecord | None:
    """Return the report of a watchdog that somebody else armed, and record for which lab."""
    if not context.state.list_events(server_id=server.id, kind=EVENT, limit=1):
        detail = {"as": provider.get_guarded_lab_id(server.id)}
        context.state.record(EVENT, lab_id=context.lab_id, server_id=server.id, detail=detail)
    return read_watchdog(context, server)


def _find_guarded_lab_id(context: LabContext, server: Server) -> str:
    """Return the id of the lab that the watchdog was armed for."""
    events = context.state.list_events(server_id=server.id, kind=EVENT, limit=1)
    return str(events[0].detail.get("as") or context.lab_id) if events else context.lab_id


def can_lose_results(context: LabContext) -> bool:
    """Whether a server's deadline or budget can end it while it holds the only copy of its results.

    That is so if neither a store nor a keeper saves them, and the disk is deleted with the server.
    """
    return _is_unsaved(context) and not isinstance(context.provider, Keep)


def should_keep_disk(context: LabContext) -> bool:
    """Whether the provider must keep a server's disk, because nothing else saves its results."""
    return _is_unsaved(context) and isinstance(context.provider, Keep)


def _is_unsaved(context: LabContext) -> bool:
    if isinstance(context.provider, Guarded):
        return False  # whoever armed its watchdog saves its results
    return _disk_at_end(context.provider) == "goes" and not _can_lose_disk(context)


def _can_lose_disk(context: LabContext) -> bool:
    """Whether a keeper or a store saves a server's results, or it has none."""
    return bool(context.saver_s) or _can_send_to_store(context) or not context.has_results


def _can_send_to_store(context: LabContext) -> bool:
    """Whether the lab has a store that its servers can write to.

    Only a server's own permissions open a bucket; with them it can keep its disk, too.
    """
    provider, store = context.provider, context.config.store
    if store.startswith("s3://") and isinstance(provider, Keep):
        return provider.can_keep_itself
    return bool(store)


def _should_hold_disk(context: LabContext, server: Server) -> bool:
    """Whether the provider must keep this server's disk.

    A disk that the provider keeps already stays kept, even if the lab's newer servers keep their
    disks by themselves: this server cannot.
    """
    if _can_lose_disk(context) or not isinstance(context.provider, Keep):
        return False
    return should_keep_disk(context) or disk_retention.is_kept(context, server)


def _decide_disk(context: LabContext, server: Server, span_s: float | None) -> str:
    """Decide what happens to the server's disk when it ends by itself, within `span_s` from now.

    None means a server without a deadline, which its provider may still reclaim.
    """
    if _should_hold_disk(context, server):
        ends_at = time.time() + (NO_DEADLINE_S if span_s is None else span_s)
        if disk_retention.keep_until(context, server, ends_at):
            return "stays"
    return _disk_at_end(context.provider)


def _keep_disk_past(context: LabContext, server: Server, left_s: list[float]) -> None:
    """Have the disk kept past the server's end, which is the first of these limits."""
    if left_s:
        disk_retention.keep_until(context, server, time.time() + min(left_s))


def _describe_ending(context: LabContext, server: Server, disk: str) -> EndingRecord:
    """Say how the watchdog ends a server of this provider, and what happens to its disk."""
    provider = context.provider
    if isinstance(provider, Leasable):
        return EndingRecord("release", disk, lease=server.id)
    return EndingRecord("poweroff", disk, saver_s=context.saver_s)


def _disk_at_end(provider: Provider) -> str:
    """Return what happens to a disk when its server ends: "stays", "keepable" or "goes"."""
    if isinstance(provider, Keep):
        return "keepable" if provider.can_keep_itself else "goes"
    return "stays" if isinstance(provider, Leasable | Stoppable) else "goes"
