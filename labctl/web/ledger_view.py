"""The course's ledger as the dashboard needs it: each line is looked at once, sums are spaced.

Going over all lines of a term takes a part of a second. So the sums are made now and then, and in
between every server that is up goes on at its price: the same arithmetic, without the walk.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from labctl.config import CourseConfig
from labctl.courses.records.cost_report import CourseCosts, course_costs
from labctl.courses.records.ledger import Entry, Living
from labctl.courses.records.student import Student

# Kinds of lines that are sums and no news.
SUMS = ("cost",)
SUMS_EVERY_S = 60.0
# Of a core, at most, goes into making sums.
SHARE = 0.005
HOUR_S = 3600.0


class Books:
    """What the lines say: `news` are all that are no sums, `by_seat` the same for each seat.

    What is said of a student alone stands in `by_student`.
    """

    def __init__(self) -> None:
        self._begin(None)

    def _begin(self, first: Entry | None) -> None:
        self._first = first
        self._read = 0
        self.news: list[Entry] = []
        self.by_seat: dict[str, list[Entry]] = {}
        self.by_student: dict[str, list[Entry]] = {}
        # Server's id -> the seat that it was made for.
        self.owners: dict[str, str] = {}
        self.given_usd: dict[str, float] = {}

    def read(self, entries: Sequence[Entry]) -> None:
        """Take in the lines that came since the last time; of another ledger, all of them."""
        first = entries[0] if entries else None
        if len(entries) < self._read or first != self._first:
            self._begin(first)
        for one in entries[self._read :]:
            if one.kind in SUMS:
                continue
            self.news.append(one)
            if one.seat:
                self.by_seat.setdefault(one.seat, []).append(one)
            elif one.student:
                self.by_student.setdefault(one.student, []).append(one)
            if one.kind == "up":
                self.owners[str(one.detail.get("server_id", ""))] = one.seat
            elif one.kind == "budget":
                before = self.given_usd.get(one.seat, 0.0)
                self.given_usd[one.seat] = before + float(one.detail.get("usd", 0.0))
        self._read = len(entries)

    def of(self, seat: str, students: Iterable[str]) -> list[Entry]:
        """The lines of a seat and of its students, the oldest first."""
        found = list(self.by_seat.get(seat, ()))
        for student in students:
            found += self.by_student.get(student, ())
        return sorted(found, key=lambda one: one.n)


class Sums:
    """A course's costs: whole ones as of `at`, and each seat's dollars now."""

    def __init__(self) -> None:
        self.costs: CourseCosts | None = None
        self.at = 0.0
        self._took_s = 0.0
        self._usd: dict[str, float] = {}

    def make(
        self,
        config: CourseConfig,
        people: Sequence[Student],
        entries: Sequence[Entry],
        now: float,
        living: Sequence[Living],
    ) -> CourseCosts:
        """All of it anew, where that is due."""
        pause_s = max(SUMS_EVERY_S, self._took_s / SHARE)
        if self.costs is None or not 0 <= now - self.at < pause_s:
            begun = time.thread_time()
            self.costs = course_costs(config, people, entries, now, living)
            self._took_s = time.thread_time() - begun
            self.at = now
            self._usd = {one.seat: one.usd for one in self.costs.seats}
        return self.costs

    def spent_usd(self, now: float, living: Iterable[Living]) -> dict[str, float]:
        """Seat -> dollars: what was summed, and what its servers have cost since."""
        found = dict(self._usd)
        for one in living:
            if not one.stopped:
                hours = max(0.0, now - max(self.at, one.created_at)) / HOUR_S
                found[one.seat] = found.get(one.seat, 0.0) + hours * one.usd_per_hour
        return found
