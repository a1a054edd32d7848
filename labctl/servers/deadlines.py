"""Deadlines: every server with a price ends by itself, whatever happens to this machine.

Three guards enforce a server's deadline: the timer of its first boot, before anybody can log in;
the provider's own timer, if the account allows one; and the watchdog, which saves results first
and ends the server MARGIN_S before the other two. Once it is armed the other two follow it, so
that no two disagree.
"""

from __future__ import annotations

import math
import time

import msgspec

from labctl.errors import BusyError, DeniedError, LabError, ThrottledError
from labctl.events import Note
from labctl.model import Need, Server
from labctl.providers import Deadline, EndsBilling, FirstBoot, FixedTimer, Guarded, Provider
from labctl.servers.context import LabContext
from labctl.servers.cost import HOUR_S, spent_usd
from labctl.state import LedgerEntry
from labctl.text import add_next, dollars_text, duration_text, price_text
from labctl.wire.watchdog import WatchRecord

# Lifetime of a server with a price if its need sets no limit.
DEFAULT_TTL_S = 12 * 3600
MARGIN_S = 120.0  # the same as LATER_S in labctl/agent/watchdog/boot_timer.py
LEAST_S = 600.0  # a server past its limit may be saving its results
CLOSE_S = 60.0  # a timer at the provider that differs by less is left as it is
NEVER_S = 10 * 365 * 86400.0
EVENT, DECLINED = "deadline", "no-deadline"


def is_default(need: Need, price_usd_per_hour: float) -> bool:
    """Whether the default deadline applies: the server costs money, and nothing limits that."""
    return price_usd_per_hour > 0 and has_no_limit(need)


def has_no_limit(need: Need) -> bool:
    """Whether neither a limit was given nor the default deadline was declined."""
    limits = (need.ttl_s, need.max_ttl_s, need.budget_usd)
    return need.deadline and limits == (None, None, None)


def ttl_s(need: Need, price_usd_per_hour: float) -> int | None:
    """Return the need's ttl, or the default one; None without either."""
    return DEFAULT_TTL_S if is_default(need, price_usd_per_hour) else need.ttl_s


def span_s(need: Need, price_usd_per_hour: float, left_usd: float | None) -> float | None:
    """Return the longest life of a new server, without the margin; None if nothing limits it.

    `left_usd` is what is left of the budget, None without one.
    """
    longest = ttl_s(need, price_usd_per_hour)
    longest = need.max_ttl_s if longest is None else longest
    spans = [] if longest is None else [float(longest)]
    if left_usd is not None and price_usd_per_hour > 0:
        spans.append(max(0.0, left_usd) / price_usd_per_hour * HOUR_S)
    return min(spans) if spans else None


def boot_span_s(need: Need, price_usd_per_hour: float, left_usd: float | None) -> int | None:
    """Return the whole seconds after which the first-boot timer ends a new server."""
    span = span_s(need, price_usd_per_hour, left_usd)
    return None if span is None else math.ceil(span + MARGIN_S)


def get_server_need(context: LabContext, server: Server) -> Need:
    """Return the lab's need, without the default deadline if that was declined for this server."""
    need = context.config.server.need
    if need.deadline and context.state.list_events(server_id=server.id, kind=DECLINED, limit=1):
        return msgspec.structs.replace(need, deadline=False)
    return need


def note_declined(context: LabContext, server: Server) -> None:
    """Record that the default deadline was declined, for later `up`s of this server."""
    if context.config.server.need.deadline:
        return
    if not context.state.list_events(server_id=server.id, kind=DECLINED, limit=1):
        context.state.record(DECLINED, lab_id=context.lab_id, server_id=server.id)


def set_first_timer(context: LabContext, server: Server) -> None:
    """Set the provider's timer for a server that has none; emit a warning if that fails."""
    if server.deadline_at or _list_timer_events(context, server):
        return
    need, price = get_server_need(context, server), server.offer.price_usd_per_hour
    left = None
    if need.budget_usd is not None:
        spent = spent_usd(context.state, context.lab_id, time.time(), but=server.id)
        left = need.budget_usd - spent
    span = span_s(need, price, left)
    at = server.created_at + MARGIN_S + (span or 0.0)
    # A limit in the past was not meant for this server: `follow` sets its timer.
    if span is not None and at > time.time() + MARGIN_S:
        _set_timer(context, server, at)


def move_timer(
    context: LabContext,
    server: Server,
    watch: WatchRecord | None,
    *,
    latest_at: float | None = None,
) -> None:
    """Move the provider's timer to the limits that the watchdog reports.

    It is never set later than lab.yaml and the ledger allow, nor later than `latest_at`: a user
    who is root on the server can make its watchdog report anything.
    """
    if watch is None:
        return
    if isinstance(context.provider, FixedTimer):
        _warn_of_fixed_timer(context, server, watch)
    if not isinstance(context.provider, Deadline):
        return
    now = time.time()
    ends = [now + left for left in list_seconds_left(watch)]
    ends += _compute_local_ends(context, server, now)
    ends += [] if latest_at is None else [latest_at]
    timer_at = _get_timer_at(context, server)
    if not ends:
        # No limit is left: a timer that was set earlier must not end the server.
        if timer_at and timer_at < now + NEVER_S / 2:
            _set_timer(context, server, now + NEVER_S)
        return
    at = max(min(ends) + MARGIN_S, now + LEAST_S)
    if timer_at is None or abs(at - timer_at) >= CLOSE_S:
        _set_timer(context, server, at)


def _warn_of_fixed_timer(context: LabContext, server: Server, watch: WatchRecord) -> None:
    """Warn if a timer that cannot be moved ends the server before its watchdog does."""
    if server.deadline_at is None:
        return
    left = list_seconds_left(watch)
    if left and time.time() + min(left) < server.deadline_at:
        return
    spare = duration_text(max(0.0, server.deadline_at - time.time()))
    text = f"the timer at {context.provider.name} ends {server.alias} in {spare}"
    text += " without saving results, and cannot be moved while the server runs"
    reset = "labctl stop\nlabctl up   # its timer starts again"
    hint = reset if context.subject.kind == "lab" else context.subject.down
    context.reporter.emit(Note(text=add_next(text, hint), level="warning"))


def is_timer_denied(context: LabContext, server: Server) -> bool:
    """Whether the provider has refused a timer for this server. The user was warned then."""
    events = _list_timer_events(context, server)
    return bool(events) and not _parse_at(events[0])


def postpone(context: LabContext, server: Server, at: float) -> float:
    """Move the provider's timer to `at` for a server that is off, to keep its disk until then.

    Returns when the timer fires now; 0.0 if the server has none.
    """
    if _get_timer_at(context, server):
        _set_timer(context, server, at)
    return _get_timer_at(context, server) or 0.0


def list_armed_guards(context: LabContext, server: Server, watch: WatchRecord) -> list[str]:
    """List the guards that enforce the server's deadline now, by their names for users."""
    guards = ["watchdog"] if watch.alive else []
    guards += ["first-boot timer"] if watch.timer else []
    return guards + ([_timer_name(context.provider)] if _get_timer_at(context, server) else [])


def list_planned_guards(provider: Provider) -> list[str]:
    """List the guards that a new server will have."""
    guards = ["watchdog"]
    guards += ["first-boot timer"] if isinstance(provider, FirstBoot) else []
    return guards + ([_timer_name(provider)] if _has_timer(provider) else [])


def can_end_billing(provider: Provider) -> bool:
    """Whether one of a new server's guards ends its costs, and not only stops the machine."""
    declared = provider.ends_billing if isinstance(provider, EndsBilling) else frozenset()
    return "shutdown" in declared or ("timer" in declared and _has_timer(provider))


def is_free_when_off(provider: Provider) -> bool:
    """Whether a machine that has powered itself off costs nothing anymore but its disk."""
    return isinstance(provider, EndsBilling) and "shutdown" in provider.ends_billing


def is_guarded_elsewhere(provider: Provider) -> bool:
    """Whether somebody else, such as a course's keeper, ends the server in time."""
    return isinstance(provider, Guarded)


def explain_missing_timer(provider: Provider) -> str:
    """Return why the provider does not end servers at their deadline, or "" if it does."""
    if isinstance(provider, FixedTimer):
        return ""
    if not isinstance(provider, Deadline):
        return f"{provider.name} cannot end a server by itself at its deadline"
    lack = provider.missing_deadline_setup
    return f"{provider.name} would not end it at its deadline: {lack}" if lack else ""


def describe(context: LabContext, server: Server, watch: WatchRecord | None) -> str:
    """Say when a server with a price ends at the latest, and which guards are armed.

    "" for a server without a price, without a watchdog, or that somebody else guards.
    """
    price = server.offer.price_usd_per_hour
    if not price or watch is None or is_guarded_elsewhere(context.provider):
        return ""
    left = list_seconds_left(watch)
    if not left:
        down = context.subject.end_all
        return f"{server.alias} has no deadline: {worst_cost(price)}, until {down}"
    armed = ", ".join(list_armed_guards(context, server, watch)) or "none"
    latest = f"in {duration_text(min(left))} at the latest"
    if _ends_billing(context, server):
        return f"{server.alias} ends {latest}; armed: {armed}"
    billed = f"costs {price_text(price)} until {context.subject.end_all}"
    return f"{server.alias} powers itself off {latest}, but {billed}; armed: {armed}"


def _ends_billing(context: LabContext, server: Server) -> bool:
    """Whether a guard of this server ends its costs: a timer that was refused does not."""
    has_timer = can_end_billing(context.provider) and _get_timer_at(context, server) is not None
    return is_free_when_off(context.provider) or has_timer


def worst_cost(price_usd_per_hour: float) -> str:
    """Say what a server costs that nothing ends, per day and month."""
    day, month = 24 * price_usd_per_hour, 30 * 24 * price_usd_per_hour
    return f"{dollars_text(day)} a day, {dollars_text(month)} a month"


def month_usd(price_usd_per_hour: float) -> str:
    """Return the dollars for 30 days as a plain number, which a user can type."""
    return f"{30 * 24 * price_usd_per_hour:.2f}"


def _compute_local_ends(context: LabContext, server: Server, now: float) -> list[float]:
    """Compute the deadlines (Unix seconds) that this machine knows; a watchdog cannot move them."""
    need, price = get_server_need(context, server), server.offer.price_usd_per_hour
    ends = []
    if need.max_ttl_s is not None:
        started = context.state.list_events(server_id=server.id, kind="started", limit=1)
        since = started[0].at if started else server.created_at
        ends.append(since + need.max_ttl_s)
    if need.budget_usd is not None and price > 0:
        left = need.budget_usd - spent_usd(context.state, context.lab_id, now)
        ends.append(now + left / price * HOUR_S)
    return ends


def _set_timer(context: LabContext, server: Server, at: float) -> None:
    """Set the provider's timer, or warn why it is not set. A refusal is recorded as 0.0."""
    provider = context.provider
    if not isinstance(provider, Deadline):
        return
    try:
        provider.set_deadline(server.id, at)
    except LabError as error:
        timer_at = _get_timer_at(context, server)
        if timer_at is None and not isinstance(error, DeniedError | ThrottledError | BusyError):
            raise
        # The plan of `up` has said already that a setting is missing.
        if timer_at is not None or not provider.missing_deadline_setup:
            text = _describe_timer_failure(context, timer_at, at, error)
            context.reporter.emit(Note(text=text, level="warning"))
        if timer_at is not None or not isinstance(error, DeniedError):
            return
        at = 0.0
    context.state.record(EVENT, lab_id=context.lab_id, server_id=server.id, detail={"at": at})


def _describe_timer_failure(
    context: LabContext, timer_at: float | None, at: float, error: LabError
) -> str:
    """Say what follows if the timer cannot be set to `at`; `timer_at` is when it fires now."""
    name = context.provider.name
    if timer_at is None:
        return f"nothing at {name} ends the server if it hangs: {error.what}"
    text = f"the timer at {name} was not moved: {error.what}"
    if timer_at >= at:
        return text
    left = duration_text(timer_at - time.time())
    ends = f"it ends the server in {left} without saving results"
    return add_next(f"{text}\n  {ends}", context.subject.up)


def _list_timer_events(context: LabContext, server: Server) -> list[LedgerEntry]:
    return list(context.state.list_events(server_id=server.id, kind=EVENT, limit=1))


def _get_timer_at(context: LabContext, server: Server) -> float | None:
    """Return when the provider's timer fires, as recorded; None without a known timer."""
    events = _list_timer_events(context, server)
    return (_parse_at(events[0]) if events else server.deadline_at) or None


def _parse_at(event: LedgerEntry) -> float:
    return float(event.detail.get("at") or 0.0)


def list_seconds_left(watch: WatchRecord | None) -> list[float]:
    """Return the seconds until each of the watchdog's limits; skip what is not a finite number."""
    values = (watch.ttl_left_s, watch.budget_left_s) if watch else ()
    return [left for left in values if left is not None and math.isfinite(left)]


def _has_timer(provider: Provider) -> bool:
    if isinstance(provider, FixedTimer):
        return True
    return isinstance(provider, Deadline) and not provider.missing_deadline_setup


def _timer_name(provider: Provider) -> str:
    return f"timer at {provider.name}"
