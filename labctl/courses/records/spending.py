"""Dollars and hours of seats, from the ledger's lines and what is alive now. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from labctl.courses.records.ledger_entries import Entry
from labctl.model import Value

HOUR_S = 3600.0


class Living(Value, frozen=True):
    """A server that its provider still shows, by its own tags: nothing here needs the ledger."""

    server_id: str
    seat: str
    created_at: float
    usd_per_hour: float
    stopped: bool = False


class Spent(Value, frozen=True):
    """What one seat has had. `usd` counts up to now; `idle` is the part in which nothing ran."""

    usd: float = 0.0
    hours: float = 0.0
    idle_usd: float = 0.0
    idle_hours: float = 0.0


def spent_usd(
    entries: Iterable[Entry], seat: str, now: float, living: Sequence[Living] | None = None
) -> float:
    """Dollars of a seat up to `now`. `living` None: the provider was not asked.

    Every second of a server counts once, however often it was written down. What lives and is not
    in the ledger is counted by its tags, from its creation; so an empty ledger resets nothing.
    """
    return spending(entries, now, living).get(seat, Spent()).usd


def hours(
    entries: Iterable[Entry], seat: str, now: float, living: Sequence[Living] | None = None
) -> float:
    """Hours of a seat's servers up to `now`, counted as the dollars are."""
    return spending(entries, now, living).get(seat, Spent()).hours


def allowance_usd(entries: Iterable[Entry], seat: str, budget_usd: float | None) -> float | None:
    """The seat's whole budget: the course's, and what was given on top; None has no end."""
    if budget_usd is None:
        return None
    given = (one for one in entries if one.kind == "budget" and one.seat == seat)
    return max(0.0, budget_usd + sum(float(one.detail.get("usd", 0.0)) for one in given))


def due_extensions(entries: Iterable[Entry], assignment: str) -> dict[str, int]:
    """Student -> seconds after the due time; the last word on each counts, 0 took it back."""
    found: dict[str, int] = {}
    for one in entries:
        if one.kind == "due" and one.detail.get("assignment") == assignment:
            found[one.student or one.seat] = int(one.detail.get("seconds", 0))
    return {student: seconds for student, seconds in found.items() if seconds}


class Span(Value, frozen=True):
    """A stretch of one server's life. Those of one server never overlap."""

    seat: str
    server_id: str
    since: float
    until: float
    usd: float
    idle_s: float = 0.0


def spending(
    entries: Iterable[Entry], now: float, living: Sequence[Living] | None = None
) -> dict[str, Spent]:
    """What every seat has had, in one pass over the lines."""
    totals: dict[str, Spent] = {}
    for one in spans(entries, now, living):
        whole = max(one.until - one.since, 0.0)
        part = one.idle_s / whole if whole > 0 else 0.0
        before = totals.get(one.seat, Spent())
        totals[one.seat] = Spent(
            usd=before.usd + one.usd,
            hours=before.hours + whole / HOUR_S,
            idle_usd=before.idle_usd + one.usd * part,
            idle_hours=before.idle_hours + one.idle_s / HOUR_S,
        )
    return totals


def spans(
    entries: Iterable[Entry], now: float, living: Sequence[Living] | None = None
) -> list[Span]:
    """Every second of every server, once, with what it cost; each server's in order."""
    servers: dict[tuple[str, str], _Life] = {}
    for one in entries:
        server_id = str(one.detail.get("server_id", ""))
        if one.kind in ("up", "cost", "down") and server_id:
            servers.setdefault((one.seat, server_id), _Life()).take(one)
    for alive in living or ():
        servers.setdefault((alive.seat, alive.server_id), _Life()).show(alive, now)
    found: list[Span] = []
    for (seat, server_id), life in servers.items():
        if living is None:
            life.guess(now)
        found += life.told(seat, server_id)
    return found


class _Life:
    """One server's seconds: those that were written down, then those that were not."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float, float, float]] = []
        self.up_at: float | None = None
        self.price = 0.0
        self.ended = False

    def take(self, entry: Entry) -> None:
        detail = entry.detail
        if entry.kind == "up":
            self.up_at = float(detail.get("created_at", entry.at))
            self.price = float(detail.get("usd_per_hour", 0.0))
            self.ended = False
        elif entry.kind == "down":
            self.ended = True
        else:
            begin, end = float(detail.get("from", entry.at)), float(detail.get("until", entry.at))
            idle_s = float(detail.get("idle_s", 0.0))
            if end > begin:  # a clock that was set back measures nothing
                self.spans.append((begin, end, float(detail.get("usd", 0.0)), idle_s))

    def show(self, living: Living, now: float) -> None:
        """Count what no line covers: from its creation, by its own tags, up to now."""
        if not living.stopped:
            self._fill(living.created_at, now, living.usd_per_hour)

    def guess(self, now: float) -> None:
        """It was made, and nothing says that it has ended: it goes on, as far as is known."""
        if not self.ended and self.up_at is not None:
            last = max((end for _, end, _, _ in self.spans), default=self.up_at)
            self._fill(last, now, self.price)

    def _fill(self, since: float, now: float, price: float) -> None:
        at = since
        for begin, end, _, _ in sorted(self.spans):
            if begin > at:
                self.spans.append((at, begin, (begin - at) / HOUR_S * price, 0.0))
            at = max(at, end)
        if now > at:
            self.spans.append((at, now, (now - at) / HOUR_S * price, 0.0))

    def told(self, seat: str, server_id: str) -> Iterator[Span]:
        """What was written down twice counts once: the part that lies beyond the one before."""
        at = float("-inf")
        for begin, end, usd, idle_s in sorted(self.spans):
            since, whole = max(begin, at), end - begin
            at = max(at, end)
            if end <= since:
                continue
            share = (end - since) / whole
            idle_s = min(max(idle_s, 0.0), whole) * share
            yield Span(
                seat=seat,
                server_id=server_id,
                since=since,
                until=end,
                usd=usd * share,
                idle_s=idle_s,
            )
