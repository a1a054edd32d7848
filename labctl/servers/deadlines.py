"""Deadlines: every server with a price ends by itself, whatever becomes of this machine.

Three guards hold a server's deadline: the timer of its first boot, before anybody can log in; the
provider's own timer, where the account allows one; and the watchdog, which saves results first and
ends MARGIN_S before the other two. Once it is armed they follow it, so that no two disagree.
"""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec

from labctl.errors import BusyError, DeniedError, LabError, ThrottledError
from labctl.events import Note
from labctl.model import Need, Server
from labctl.providers import Deadline, EndsBilling, FirstBoot, Guarded, Provider
from labctl.servers.context import Ground
from labctl.servers.cost import HOUR_S, spent_usd

# How long a server with a price lives where nothing in its need says so.
DEFAULT_TTL_S = 12 * 3600
MARGIN_S = 120.0  # the same as LATER_S in labctl/agent/watchdog/boot_timer.py
LEAST_S = 600.0  # a server whose limit is over may be saving its results
CLOSE_S = 60.0  # a timer at the provider that is off by less is left as it is
NEVER_S = 10 * 365 * 86400.0
EVENT, DECLINED = "deadline", "no-deadline"


def is_default(need: Need, price_usd_per_hour: float) -> bool:
    """Whether the default deadline applies: money is spent, and nothing limits it."""
    limits = (need.ttl_s, need.max_ttl_s, need.budget_usd)
    return price_usd_per_hour > 0 and need.deadline and limits == (None, None, None)


def ttl_s(need: Need, price_usd_per_hour: float) -> int | None:
    """The need's ttl, or the default one."""
    return DEFAULT_TTL_S if is_default(need, price_usd_per_hour) else need.ttl_s


def span_s(need: Need, price_usd_per_hour: float, left_usd: float | None) -> float | None:
    """How long a new server lives at most, without the margin; None where nothing limits it.

    `left_usd` is what is left of the budget, None without one.
    """
    longest = ttl_s(need, price_usd_per_hour)
    longest = need.max_ttl_s if longest is None else longest
    spans = [] if longest is None else [float(longest)]
    if left_usd is not None and price_usd_per_hour > 0:
        spans.append(max(0.0, left_usd) / price_usd_per_hour * HOUR_S)
    return min(spans) if spans else None


def boot_span_s(need: Need, price_usd_per_hour: float, left_usd: float | None) -> int | None:
    """Whole seconds from its first boot until the boot's own timer ends a new server."""
    span = span_s(need, price_usd_per_hour, left_usd)
    return None if span is None else math.ceil(span + MARGIN_S)


def need_of(ground: Ground, server: Server) -> Need:
    """The lab's need, without the default deadline where that was declined for this server."""
    need = ground.config.server.need
    if need.deadline and ground.state.events(server_id=server.id, kind=DECLINED, limit=1):
        return msgspec.structs.replace(need, deadline=False)
    return need


def note_declined(ground: Ground, server: Server) -> None:
    """Write down that the default deadline was declined: a later `up` of this server knows."""
    if ground.config.server.need.deadline:
        return
    if not ground.state.events(server_id=server.id, kind=DECLINED, limit=1):
        ground.state.record(DECLINED, lab_id=ground.lab_id, server_id=server.id)


def set_first(ground: Ground, server: Server) -> None:
    """Set the timer at the provider of a server that has none, where it can be; say so if not."""
    if server.deadline_at or _events(ground, server):
        return
    need, price = need_of(ground, server), server.offer.price_usd_per_hour
    left = None
    if need.budget_usd is not None:
        spent = spent_usd(ground.state, ground.lab_id, time.time(), but=server.id)
        left = need.budget_usd - spent
    span = span_s(need, price, left)
    at = server.created_at + MARGIN_S + (span or 0.0)
    # What is over already was not meant for this server: `follow` sets its timer.
    if span is not None and at > time.time() + MARGIN_S:
        _set(ground, server, at)


def follow(
    ground: Ground, server: Server, watch: dict[str, Any], *, latest_at: float | None = None
) -> None:
    """Move the timer at the provider to the watchdog's limits, as `watch` tells them.

    It is never set later than lab.yaml and the ledger allow, or `latest_at`: where somebody else
    is root, the watchdog says what they want.
    """
    if not watch or not isinstance(ground.provider, Deadline):
        return
    now = time.time()
    ends = [now + left for left in left_s(watch)]
    ends += _own_ends(ground, server, now)
    ends += [] if latest_at is None else [latest_at]
    known = _known_at(ground, server)
    if not ends:
        # There is no limit any more: a timer that was set must not end it.
        if known and known < now + NEVER_S / 2:
            _set(ground, server, now + NEVER_S)
        return
    at = max(min(ends) + MARGIN_S, now + LEAST_S)
    if known is None or abs(at - known) >= CLOSE_S:
        _set(ground, server, at)


def was_denied(ground: Ground, server: Server) -> bool:
    """Whether the provider has refused a timer for this server, which was said then."""
    events = _events(ground, server)
    return bool(events) and not _at(events[0].detail)


def postpone(ground: Ground, server: Server, at: float) -> None:
    """Let the timer at the provider spare a server that is off, for the disk's sake, until `at`."""
    if _known_at(ground, server):
        _set(ground, server, at)


def armed_guards(ground: Ground, server: Server, watch: dict[str, Any]) -> list[str]:
    """The guards that hold the server's deadline now, by the names that people read."""
    found = ["watchdog"] if watch.get("alive") else []
    found += ["first-boot timer"] if watch.get("timer") else []
    return found + ([_timer_name(ground.provider)] if _known_at(ground, server) else [])


def planned_guards(provider: Provider) -> list[str]:
    """The guards that a new server will have."""
    found = ["watchdog"]
    found += ["first-boot timer"] if isinstance(provider, FirstBoot) else []
    return found + ([_timer_name(provider)] if _has_timer(provider) else [])


def can_end_billing(provider: Provider) -> bool:
    """Whether one of a new server's guards ends what it costs, and not only the machine."""
    declared = provider.ends_billing if isinstance(provider, EndsBilling) else frozenset()
    return "shutdown" in declared or ("timer" in declared and _has_timer(provider))


def is_guarded_elsewhere(provider: Provider) -> bool:
    """Whether somebody else, such as a course's keeper, sees to the server's end."""
    return isinstance(provider, Guarded)


def describe(ground: Ground, server: Server, watch: dict[str, Any]) -> str:
    """When a server with a price ends at the latest, and which guards are armed; "" without."""
    price = server.offer.price_usd_per_hour
    if not price or not watch or is_guarded_elsewhere(ground.provider):
        return ""
    left = left_s(watch)
    if not left:
        return f"{server.alias} has no deadline: {worst_cost(price)}, until labctl down"
    armed = ", ".join(armed_guards(ground, server, watch)) or "none"
    return f"{server.alias} ends in {min(left) / HOUR_S:.1f} h at the latest; armed: {armed}"


def worst_cost(price_usd_per_hour: float) -> str:
    """What a server costs that nothing ends."""
    return f"{24 * price_usd_per_hour:.2f} dollars a day, {month_usd(price_usd_per_hour)} a month"


def month_usd(price_usd_per_hour: float) -> str:
    """Dollars for 30 days."""
    return f"{30 * 24 * price_usd_per_hour:.2f}"


def _own_ends(ground: Ground, server: Server, now: float) -> list[float]:
    """The ends that are known here: a watchdog cannot move them."""
    need, price = need_of(ground, server), server.offer.price_usd_per_hour
    ends = []
    if need.max_ttl_s is not None:
        started = ground.state.events(server_id=server.id, kind="started", limit=1)
        begun = started[0].at if started else server.created_at
        ends.append(begun + need.max_ttl_s)
    if need.budget_usd is not None and price > 0:
        left = need.budget_usd - spent_usd(ground.state, ground.lab_id, now)
        ends.append(now + left / price * HOUR_S)
    return ends


def _set(ground: Ground, server: Server, at: float) -> None:
    """Set it, or say why not. A refusal is written down as 0.0."""
    provider = ground.provider
    if not isinstance(provider, Deadline):
        return
    try:
        provider.set_deadline(server.id, at)
    except LabError as error:
        known = _known_at(ground, server)
        if known is None and not isinstance(error, DeniedError | ThrottledError | BusyError):
            raise
        ground.reporter.emit(Note(text=_not_set(provider, known, at, error), level="warning"))
        if known is not None or not isinstance(error, DeniedError):
            return
        at = 0.0
    ground.state.record(EVENT, lab_id=ground.lab_id, server_id=server.id, detail={"at": at})


def _not_set(provider: Provider, known: float | None, at: float, error: LabError) -> str:
    """What a timer that could not be set means; `known` is when the present one fires."""
    if known is None:
        return f"nothing at {provider.name} ends the server if it hangs: {error.what}"
    text = f"the timer at {provider.name} was not moved: {error.what}"
    if known >= at:
        return text
    left_h = max(0.0, known - time.time()) / HOUR_S
    return f"{text}\n  it ends the server in {left_h:.1f} h without saving; next: labctl up"


def _events(ground: Ground, server: Server) -> list[Any]:
    return list(ground.state.events(server_id=server.id, kind=EVENT, limit=1))


def _known_at(ground: Ground, server: Server) -> float | None:
    """When the timer at the provider is known to fire; None where none is known."""
    events = _events(ground, server)
    return (_at(events[0].detail) if events else server.deadline_at) or None


def _at(detail: dict[str, Any]) -> float:
    return float(detail.get("at") or 0.0)


def left_s(watch: dict[str, Any]) -> list[float]:
    """Seconds until each of the watchdog's limits; what is no number is none."""
    told = [watch.get(key) for key in ("ttl_left_s", "budget_left_s")]
    return [one for one in told if isinstance(one, int | float) and math.isfinite(one)]


def _has_timer(provider: Provider) -> bool:
    return isinstance(provider, Deadline) and not provider.deadline_lacks


def _timer_name(provider: Provider) -> str:
    return f"timer at {provider.name}"
