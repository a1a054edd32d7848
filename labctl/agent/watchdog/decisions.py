"""The watchdog's decisions, as pure functions of limits, elapsed time and activity.

All spans are seconds. "Elapsed" is the server's age, carried over restarts and reboots by
`carry_elapsed_s`. A budget is one more deadline: dollars divided by price. The end is when the
wind-down begins, early enough to finish before the deadline.
"""

from __future__ import annotations

from typing import NamedTuple

from ...wire.text import dollars_text, duration_text, price_text
from ...wire.watchdog import ElapsedTimeRecord, ServerLimits

WARN_AT_S = (900.0, 300.0, 60.0)
# the first warning, for a limit that is at least twice as long
HOUR_AHEAD_S = 3600.0
# A warning becomes due again once the time left exceeds its own time by this fraction.
SLACK = 0.1
# A wind-down begins at most this fraction of the limit before it, however long it takes.
MOST_EARLY = 0.5
# assumed speed of a mirror until it is measured
RATE_BYTES_S = 10e6
SETTLE_S = 3.0
TOLERANCE_S = 0.5


class Budget(NamedTuple):
    """Dollars that one server may cost, and all servers of the lab. None is no limit."""

    server_usd: float | None
    lab_usd: float | None


class LimitClock(NamedTuple):
    """A limit of `limit_s`: `left_s` until it, `ends_in_s` until the wind-down for it begins."""

    name: str
    limit_s: float
    left_s: float
    ends_in_s: float


class WatchdogDecision(NamedTuple):
    """A decision. `ends_by` is "ttl", "budget", "idle" or "".

    `warn_s` is the time left if a warning is due. Pass `warned` to the next call.
    """

    ends_by: str
    ends_in_s: float | None
    end: bool
    warn_s: float | None
    warned: dict[str, tuple[float, ...]]


def list_clocks(
    limits: ServerLimits, elapsed_s: float, idle_for_s: float, wind_down_s: float
) -> dict[str, LimitClock]:
    """Return the clocks that run. The idle clock runs only while there is no activity."""
    running = {}
    ends = (
        ("ttl", limits.deadline_s, limits.from_s),
        ("budget", limits.budget_end_s, limits.stopped_s),
    )
    for name, end, start in ends:
        if end is not None:
            left_s = end - elapsed_s
            early = min(wind_down_s, (end - start) * MOST_EARLY)
            running[name] = LimitClock(name, end - start, left_s, left_s - early)
    if limits.idle_s is not None and idle_for_s > 0:
        left_s = max(limits.idle_s - idle_for_s, limits.held_until_s - elapsed_s)
        running["idle"] = LimitClock("idle", limits.idle_s, left_s, left_s)
    return running


def decide(
    limits: ServerLimits,
    elapsed_s: float,
    idle_for_s: float,
    wind_down_s: float,
    warned: dict[str, tuple[float, ...]],
) -> WatchdogDecision:
    """Decide. Each warning is due once, only for the clock that ends first, and again after an
    extension.
    """
    running = list_clocks(limits, elapsed_s, idle_for_s, wind_down_s)
    still_warned = {
        name: tuple(at for at in warned.get(name, ()) if clock.ends_in_s <= at * (1 + SLACK))
        for name, clock in running.items()
    }
    if not running:
        return WatchdogDecision("", None, False, None, still_warned)
    first = min(running.values(), key=lambda clock: clock.ends_in_s)
    left_s = first.ends_in_s
    if left_s <= 0:
        return WatchdogDecision(first.name, left_s, True, None, still_warned)
    due = [at for at in _warnings(first) if left_s <= at and at not in still_warned[first.name]]
    still_warned[first.name] = tuple(sorted({*still_warned[first.name], *due}, reverse=True))
    return WatchdogDecision(first.name, left_s, False, left_s if due else None, still_warned)


def _warnings(clock: LimitClock) -> tuple[float, ...]:
    """Return when to warn.

    The idle clock starts at every pause, so it warns only in its second half.
    """
    if clock.name != "idle":
        return (HOUR_AHEAD_S, *WARN_AT_S) if clock.limit_s >= 2 * HOUR_AHEAD_S else WARN_AT_S
    half = clock.limit_s / 2
    return tuple(at for at in WARN_AT_S if at <= half) or (half,)


def explain_refusal(limits: ServerLimits, span_s: float) -> str:
    """Return why the ttl cannot grow by `span_s`; "" if it can."""
    if limits.ttl_s is None:
        return ""
    now = limits.from_s + limits.ttl_s + limits.extended_s
    ceiling_s = None if limits.ceiling_s is None else limits.from_s + limits.ceiling_s
    for name, limit_s in (("ceiling", ceiling_s), ("budget", limits.budget_end_s)):
        if limit_s is not None and now + span_s > limit_s + TOLERANCE_S:
            text = f"the {name} ends the server {duration_text(limit_s)} after its start"
            return f"{text}; you can extend it by at most {duration_text(max(0.0, limit_s - now))}"
    return ""


def should_restart_ttl(limits: ServerLimits, elapsed_s: float, ended: bool) -> bool:
    """Return whether the ttl restarts after a boot: its deadline passed while the server was off.

    A person who starts such a server again wants to use it. `ended` means that the ttl had ended
    the server, which happens a little before the deadline. A budget does not restart.
    """
    deadline_s = limits.deadline_s
    return deadline_s is not None and (ended or elapsed_s >= deadline_s)


def estimate_wind_down_s(
    stop_s: float,
    unsaved_bytes: float,
    rate_bytes_s: float,
    mirrored: bool,
    saver_s: float = 0.0,
) -> float:
    """Return how long the end takes: runs stop, unsaved results are sent, the machine ends.

    `saver_s` is the additional time that a keeper needs to notice and to download the results.
    """
    send_s = unsaved_bytes / max(rate_bytes_s, 1.0) if mirrored else 0.0
    return stop_s + send_s + saver_s + SETTLE_S


def carry_elapsed_s(age: ElapsedTimeRecord, boot: str, boottime_s: float, wall_s: float) -> float:
    """Return the elapsed time now, from one that was recorded earlier.

    The monotonic clock counts within a boot, the wall clock over a reboot if it went forward.
    """
    since = boottime_s - age.boottime_s
    if age.boot != boot:
        since = wall_s - age.wall_s
    return age.elapsed_s + max(0.0, since)


def limit_budget(previous: Budget, requested: Budget) -> float | None:
    """Return the dollars that this server may still cost if it was armed before.

    A caller that has lost its ledger believes that nothing was spent elsewhere: the same total
    budget never allows more than it did before. A different total budget is intended.
    """
    if previous.server_usd is None or requested.server_usd is None:
        return requested.server_usd
    increase = (requested.lab_usd or 0.0) - (previous.lab_usd or 0.0)
    return max(0.0, min(previous.server_usd + increase, requested.server_usd))


def limits_text(limits: ServerLimits) -> str:
    """Describe the limits in one line."""
    parts = []
    for name, span in (("ttl", limits.ttl_s), ("idle", limits.idle_s)):
        parts += [] if span is None else [f"{name} {duration_text(span)}"]
    parts += [f"extended by {duration_text(limits.extended_s)}"] if limits.extended_s else []
    if limits.budget_usd is not None:
        price = price_text(limits.price_usd_per_hour)
        parts.append(f"budget {dollars_text(limits.budget_usd)} at {price}")
    if limits.ceiling_s is not None:
        parts.append(f"at most {duration_text(limits.ceiling_s)} with extensions")
    return ", ".join(parts) or "none"
