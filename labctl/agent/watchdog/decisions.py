"""The watchdog's clocks, pure: limits, elapsed time and signs in, a decision out.

All spans are seconds. "Elapsed" is the server's age, carried over restarts and reboots by
`carried`. A budget is one more deadline: dollars by price. An end is when the wind-down begins, so
early that it fits before the deadline.
"""

from __future__ import annotations

from typing import Any, NamedTuple

WARN_AT_S = (900.0, 300.0, 60.0)
# The first warning of a limit that is at least twice as long.
HOUR_AHEAD_S = 3600.0
# A warning is due again once there is this much more time than its own again.
SLACK = 0.1
# A wind-down begins at most this part of a limit before it, whatever its length.
MOST_EARLY = 0.5
# How fast a mirror is taken to be until one was measured.
RATE_BYTES_S = 10e6
SETTLE_S = 3.0
TOLERANCE_S = 0.5


class Limits(NamedTuple):
    """What was asked for. None is no limit. `ceiling_s` bounds `ttl_s` with all extensions.

    `from_s` (elapsed) is when the ttl began, 0 but for a server that was off at its deadline and
    was started again. Until `held_until_s` (elapsed) an extension keeps idleness from ending it.
    """

    ttl_s: float | None = None
    idle_s: float | None = None
    budget_usd: float | None = None
    price_usd_per_hour: float = 0.0
    ceiling_s: float | None = None
    extended_s: float = 0.0
    from_s: float = 0.0
    held_until_s: float = 0.0

    @property
    def deadline_s(self) -> float | None:
        """Elapsed time of the hard deadline. Without a ttl, a ceiling is one."""
        spans = [] if self.ttl_s is None else [self.ttl_s + self.extended_s]
        spans += [] if self.ceiling_s is None else [self.ceiling_s]
        return self.from_s + min(spans) if spans else None

    @property
    def budget_s(self) -> float | None:
        """Elapsed time at which the budget is spent."""
        if self.budget_usd is None or self.price_usd_per_hour <= 0:
            return None
        return self.budget_usd / self.price_usd_per_hour * 3600

    @property
    def latest_s(self) -> float | None:
        """Elapsed time at which the server ends whatever it does; None where nothing says so."""
        ends = [end for end in (self.deadline_s, self.budget_s) if end is not None]
        return min(ends) if ends else None


class Clock(NamedTuple):
    """A limit of `limit_s`: `left_s` until it, `ends_in_s` until the wind-down for it begins."""

    name: str
    limit_s: float
    left_s: float
    ends_in_s: float


class Decision(NamedTuple):
    """`ends_by` is "ttl", "budget", "idle" or "". `warn_s` is what is left where a warning is due.

    `warned` is what to hand in next time.
    """

    ends_by: str
    ends_in_s: float | None
    end: bool
    warn_s: float | None
    warned: dict[str, list[float]]


def clocks(
    limits: Limits, elapsed_s: float, idle_for_s: float, wind_down_s: float
) -> dict[str, Clock]:
    """The clocks that run. That of idleness runs only while nothing happens."""
    found = {}
    ends = (("ttl", limits.deadline_s, limits.from_s), ("budget", limits.budget_s, 0.0))
    for name, end, start in ends:
        if end is not None:
            left = end - elapsed_s
            early = min(wind_down_s, (end - start) * MOST_EARLY)
            found[name] = Clock(name, end - start, left, left - early)
    if limits.idle_s is not None and idle_for_s > 0:
        left = max(limits.idle_s - idle_for_s, limits.held_until_s - elapsed_s)
        found["idle"] = Clock("idle", limits.idle_s, left, left)
    return found


def decide(
    limits: Limits,
    elapsed_s: float,
    idle_for_s: float,
    wind_down_s: float,
    warned: dict[str, list[float]],
) -> Decision:
    """Each warning once, only for the clock that ends first; an extension makes it due again."""
    running = clocks(limits, elapsed_s, idle_for_s, wind_down_s)
    kept = {
        name: [at for at in warned.get(name, []) if clock.ends_in_s <= at * (1 + SLACK)]
        for name, clock in running.items()
    }
    if not running:
        return Decision("", None, False, None, kept)
    first = min(running.values(), key=lambda clock: clock.ends_in_s)
    left = first.ends_in_s
    if left <= 0:
        return Decision(first.name, left, True, None, kept)
    due = [at for at in _warnings(first) if left <= at and at not in kept[first.name]]
    kept[first.name] = sorted({*kept[first.name], *due}, reverse=True)
    return Decision(first.name, left, False, left if due else None, kept)


def _warnings(clock: Clock) -> tuple[float, ...]:
    """When to warn. An idle clock starts with every pause, so it warns in its second half only."""
    if clock.name != "idle":
        return (HOUR_AHEAD_S, *WARN_AT_S) if clock.limit_s >= 2 * HOUR_AHEAD_S else WARN_AT_S
    half = clock.limit_s / 2
    return tuple(at for at in WARN_AT_S if at <= half) or (half,)


def refusal(limits: Limits, span_s: float) -> str:
    """Why the ttl cannot grow by `span_s`; "" where it can."""
    if limits.ttl_s is None:
        return ""
    now = limits.from_s + limits.ttl_s + limits.extended_s
    ceiling_s = None if limits.ceiling_s is None else limits.from_s + limits.ceiling_s
    for name, most in (("ceiling", ceiling_s), ("budget", limits.budget_s)):
        if most is not None and now + span_s > most + TOLERANCE_S:
            said = f"the {name} ends it {spoken(most)} after its start"
            return f"{said}; it can be extended by {spoken(max(0.0, most - now))} at most"
    return ""


def begins_anew(limits: Limits, elapsed_s: float, ended: bool) -> bool:
    """Whether the ttl counts afresh after a boot: its deadline passed while the server was off.

    Who starts such a server again means to use it. `ended` says that the ttl had ended it, which
    is a little before the deadline. A budget goes on.
    """
    deadline_s = limits.deadline_s
    return deadline_s is not None and (ended or elapsed_s >= deadline_s)


def wind_down_s(
    stop_s: float,
    unsaved_bytes: float,
    rate_bytes_s: float,
    mirrored: bool,
    saver_s: float = 0.0,
) -> float:
    """How long the end takes: runs stop, what is unsaved is sent, the machine goes.

    `saver_s` is what a keeper needs besides to notice it and to come for the results.
    """
    send_s = unsaved_bytes / max(rate_bytes_s, 1.0) if mirrored else 0.0
    return stop_s + send_s + saver_s + SETTLE_S


def carried(state: dict[str, Any], boot: str, boottime_s: float, wall_s: float) -> float:
    """Elapsed time now, from what a state says of an earlier moment.

    In the same boot by the monotonic clock, over a reboot by the wall clock where it went forward.
    """
    since = boottime_s - float(state["boottime_s"])
    if state["boot"] != boot:
        since = wall_s - float(state["wall_s"])
    return float(state["elapsed_s"]) + max(0.0, since)


def budget_left(known: dict[str, Any], asked: dict[str, Any]) -> float | None:
    """The dollars that this server may cost, where it was armed before.

    A caller that has lost its ledger believes that nothing was spent elsewhere: the same whole
    budget never gives more than it gave before. Another whole budget was meant so.
    """
    before, wanted = known.get("budget_usd"), asked.get("budget_usd")
    if before is None or wanted is None:
        return wanted if wanted is None else float(wanted)
    grown = float(asked.get("budget_whole_usd") or 0) - float(known.get("budget_whole_usd") or 0)
    return max(0.0, min(float(before) + grown, float(wanted)))


def spoken(span_s: float) -> str:
    """A span for people: "45 s", "12 min", "1 h 30 min"."""
    whole = max(0, round(span_s))
    if whole < 120:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"


def described(limits: Limits) -> str:
    """The limits in one line."""
    parts = []
    for name, span in (("ttl", limits.ttl_s), ("idle", limits.idle_s)):
        parts += [] if span is None else [f"{name} {spoken(span)}"]
    parts += [f"extended by {spoken(limits.extended_s)}"] if limits.extended_s else []
    if limits.budget_usd is not None:
        price = limits.price_usd_per_hour
        parts.append(f"budget {limits.budget_usd:.2f} dollars at {price:.4f} an hour")
    if limits.ceiling_s is not None:
        parts.append(f"at most {spoken(limits.ceiling_s)} with extensions")
    return ", ".join(parts) or "none"
