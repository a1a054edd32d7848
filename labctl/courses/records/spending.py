"""Dollars and hours of seats, from the ledger's lines and the running servers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.model import Value

HOUR_S = 3600.0


class RunningServer(Value, frozen=True):
    """A server that its provider still lists. Its values come from its tags, not the ledger."""

    server_id: str
    seat: str
    created_at: float
    usd_per_hour: float
    stopped: bool = False


class SeatSpending(Value, frozen=True):
    """The dollars and hours of one seat up to now; `idle_*` is the part in which nothing ran."""

    usd: float = 0.0
    hours: float = 0.0
    idle_usd: float = 0.0
    idle_hours: float = 0.0


def spent_usd(
    entries: Iterable[CourseLedgerEntry],
    seat: str,
    now: float,
    living: Sequence[RunningServer] | None = None,
) -> float:
    """Return the dollars of a seat up to `now`. `living` is None if the provider was not asked.

    Every second of a server counts once, however often it was recorded. A running server that the
    ledger does not know counts from its creation, by its tags: an empty ledger resets nothing.
    """
    return compute_spending(entries, now, living).get(seat, SeatSpending()).usd


def allowance_usd(
    entries: Iterable[CourseLedgerEntry], seat: str, budget_usd: float | None
) -> float | None:
    """Return a seat's total budget: the course's plus later grants; None without a limit."""
    if budget_usd is None:
        return None
    grants = (entry for entry in entries if entry.kind == "budget" and entry.seat == seat)
    granted_usd = sum(float(grant.detail.get("usd", 0.0)) for grant in grants)
    return max(0.0, budget_usd + granted_usd)


def read_due_extensions(entries: Iterable[CourseLedgerEntry], assignment: str) -> dict[str, int]:
    """Return each student's extension in seconds. The last line counts; 0 revokes it."""
    seconds_by_student: dict[str, int] = {}
    for entry in entries:
        if entry.kind == "due" and entry.detail.get("assignment") == assignment:
            seconds_by_student[entry.student or entry.seat] = int(entry.detail.get("seconds", 0))
    return {student: seconds for student, seconds in seconds_by_student.items() if seconds}


class ServerSpan(Value, frozen=True):
    """A stretch of one server's lifetime. Those of one server never overlap."""

    seat: str
    server_id: str
    since: float
    until: float
    usd: float
    idle_s: float = 0.0


def compute_spending(
    entries: Iterable[CourseLedgerEntry], now: float, living: Sequence[RunningServer] | None = None
) -> dict[str, SeatSpending]:
    """Return the dollars and hours of every seat, in one pass over the lines."""
    totals: dict[str, SeatSpending] = {}
    for span in list_spans(entries, now, living):
        length_s = max(span.until - span.since, 0.0)
        idle_share = span.idle_s / length_s if length_s > 0 else 0.0
        before = totals.get(span.seat, SeatSpending())
        totals[span.seat] = SeatSpending(
            usd=before.usd + span.usd,
            hours=before.hours + length_s / HOUR_S,
            idle_usd=before.idle_usd + span.usd * idle_share,
            idle_hours=before.idle_hours + span.idle_s / HOUR_S,
        )
    return totals


def list_spans(
    entries: Iterable[CourseLedgerEntry], now: float, living: Sequence[RunningServer] | None = None
) -> list[ServerSpan]:
    """Return every second of every server once, with its cost, in order for each server."""
    servers: dict[tuple[str, str], _Lifetime] = {}
    for entry in entries:
        server_id = str(entry.detail.get("server_id", ""))
        if entry.kind in ("up", "cost", "down") and server_id:
            servers.setdefault((entry.seat, server_id), _Lifetime()).add_entry(entry)
    for server in living or ():
        servers.setdefault((server.seat, server.server_id), _Lifetime()).add_running(server, now)
    stretches: list[ServerSpan] = []
    for (seat, server_id), lifetime in servers.items():
        if living is None:
            lifetime.assume_running(now)
        stretches += lifetime.as_spans(seat, server_id)
    return stretches


class _Lifetime:
    """The seconds of one server: those recorded in the ledger, and those since then."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float, float, float]] = []
        self.up_at: float | None = None
        self.price = 0.0
        self.ended = False

    def add_entry(self, entry: CourseLedgerEntry) -> None:
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
            if end > begin:  # not if the clock was set back
                self.spans.append((begin, end, float(detail.get("usd", 0.0)), idle_s))

    def add_running(self, living: RunningServer, now: float) -> None:
        """Add the time that no line covers, since its creation, at the price in its tags."""
        if not living.stopped:
            self._fill(living.created_at, now, living.usd_per_hour)

    def assume_running(self, now: float) -> None:
        """Add the time until now if the ledger has no end of the server."""
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

    def as_spans(self, seat: str, server_id: str) -> Iterator[ServerSpan]:
        """Yield the server's spans; the overlap of two records counts once."""
        at = float("-inf")
        for begin, end, usd, idle_s in sorted(self.spans):
            since, length_s = max(begin, at), end - begin
            at = max(at, end)
            if end <= since:
                continue
            share = (end - since) / length_s
            idle_s = min(max(idle_s, 0.0), length_s) * share
            yield ServerSpan(
                seat=seat,
                server_id=server_id,
                since=since,
                until=end,
                usd=usd * share,
                idle_s=idle_s,
            )
