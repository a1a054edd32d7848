"""The course's ledger for the dashboard: each line is read once, and costs are summed rarely.

Reading all lines of a term takes a part of a second. So the costs are summed at intervals. Between
them, each running server adds its price: the same arithmetic without the lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from labctl.config import CourseConfig
from labctl.courses.records.cost_report import CourseCosts, compute_course_costs
from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.courses.records.marks import KIND as MARK_KIND
from labctl.courses.records.marks import ItemMark, add_mark
from labctl.courses.records.released_grades import KIND as RELEASED_KIND
from labctl.courses.records.released_grades import is_complete, read_released_grade
from labctl.courses.records.spending import RunningServer
from labctl.courses.records.student import Student

# kinds of ledger lines that repeat sums; they are not shown as events
SUMS = ("cost",)
SUMS_EVERY_S = 60.0
# largest share of a core that is spent on summing
SHARE = 0.005
HOUR_S = 3600.0


class LedgerView:
    """The lines of a ledger, by subject: `news` are all but sums, `by_seat` those of each seat.

    `by_student` has the lines of a student without a seat, `by_kind` those of each kind. `marks`
    are assignment -> student -> item -> the mark that counts. `released` is the final score of each
    assignment and student that was released last; None in a line of an early version.
    """

    def __init__(self) -> None:
        self._reset(None)

    def _reset(self, first: CourseLedgerEntry | None) -> None:
        self._first = first
        self._read = 0
        self.news: list[CourseLedgerEntry] = []
        self.by_seat: dict[str, list[CourseLedgerEntry]] = {}
        self.by_student: dict[str, list[CourseLedgerEntry]] = {}
        self.by_kind: dict[str, list[CourseLedgerEntry]] = {}
        self.marks: dict[str, dict[str, dict[str, ItemMark]]] = {}
        self.released: dict[tuple[str, str], float | None] = {}
        # server id -> the seat that it was created for
        self.owners: dict[str, str] = {}
        self.given_usd: dict[str, float] = {}

    def read(self, entries: Sequence[CourseLedgerEntry]) -> None:
        """Read the lines added since the last call; all of them if the ledger is another one."""
        first = entries[0] if entries else None
        if len(entries) < self._read or first != self._first:
            self._reset(first)
        for entry in entries[self._read :]:
            if entry.kind in SUMS:
                continue
            self.news.append(entry)
            self.by_kind.setdefault(entry.kind, []).append(entry)
            if entry.seat:
                self.by_seat.setdefault(entry.seat, []).append(entry)
            elif entry.student:
                self.by_student.setdefault(entry.student, []).append(entry)
            if entry.kind == "up":
                self.owners[str(entry.detail.get("server_id", ""))] = entry.seat
            elif entry.kind == RELEASED_KIND:
                key = (str(entry.detail.get("assignment", "")), entry.student)
                is_whole = is_complete(entry)
                self.released[key] = read_released_grade(entry).final if is_whole else None
            elif entry.kind == MARK_KIND:
                add_mark(self.marks, entry)
            elif entry.kind == "budget":
                before = self.given_usd.get(entry.seat, 0.0)
                self.given_usd[entry.seat] = before + float(entry.detail.get("usd", 0.0))
        self._read = len(entries)

    def of_kinds(self, *kinds: str) -> list[CourseLedgerEntry]:
        """Return the lines of these kinds, those of each kind the oldest first."""
        return [entry for kind in kinds for entry in self.by_kind.get(kind, ())]

    def entries_of(self, seat: str, students: Iterable[str]) -> list[CourseLedgerEntry]:
        """Return the lines of a seat and of its students, the oldest first."""
        entries = list(self.by_seat.get(seat, ()))
        for student in students:
            entries += self.by_student.get(student, ())
        return sorted(entries, key=lambda entry: entry.n)


class CostSums:
    """A course's costs: complete as of `at`, and each seat's dollars now."""

    def __init__(self) -> None:
        self.costs: CourseCosts | None = None
        self.at = 0.0
        self._took_s = 0.0
        self._usd: dict[str, float] = {}

    def make(
        self,
        config: CourseConfig,
        people: Sequence[Student],
        entries: Sequence[CourseLedgerEntry],
        now: float,
        living: Sequence[RunningServer],
    ) -> CourseCosts:
        """Return the costs; sum them again if the last sum is too old."""
        pause_s = max(SUMS_EVERY_S, self._took_s / SHARE)
        if self.costs is None or not 0 <= now - self.at < pause_s:
            start_s = time.thread_time()
            self.costs = compute_course_costs(config, people, entries, now, living)
            self._took_s = time.thread_time() - start_s
            self.at = now
            self._usd = {seat.seat: seat.usd for seat in self.costs.seats}
        return self.costs

    def spent_usd(self, now: float, living: Iterable[RunningServer]) -> dict[str, float]:
        """Return seat -> dollars: the last sum plus the price of its servers since then."""
        spent = dict(self._usd)
        for server in living:
            if not server.stopped:
                hours = max(0.0, now - max(self.at, server.created_at)) / HOUR_S
                spent[server.seat] = spent.get(server.seat, 0.0) + hours * server.usd_per_hour
        return spent
