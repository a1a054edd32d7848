"""Totals of students for the pages: of what staff sees, and of what was released."""

from __future__ import annotations

from collections.abc import Sequence

from labctl.courses.records.course_total import CountedGrade, compute_total
from labctl.courses.records.excuses import KIND as EXCUSE_KIND
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.totals import HasSubmitted, ReleasedTotals
from labctl.web.ledger_view import LedgerView
from labctl.web.view import GradeView, PersonTotals


class PersonTotalsReader:
    """Computes the totals of one snapshot. A course without assignment groups has none."""

    def __init__(
        self,
        folder: CourseFolder,
        ledger: LedgerView,
        has_submitted: HasSubmitted,
    ) -> None:
        self._config = folder.config
        self._has_submitted = has_submitted
        has_groups = bool(folder.config.assignment_groups)
        entries = ledger.of_kinds("released", "closed", EXCUSE_KIND)
        self._released = ReleasedTotals(folder, entries, ledger.marks) if has_groups else None

    def read(self, student: str, seat: Seat, grades: Sequence[GradeView]) -> PersonTotals:
        if self._released is None:
            return PersonTotals()
        missing = self._released.find_missing(student, seat, self._has_submitted)
        finals = dict.fromkeys(missing, 0.0)
        finals |= {grade.assignment: grade.score for grade in grades if grade.score is not None}
        present = [
            CountedGrade(assignment=name, final=finals[name], points=rules.points)
            for name, rules in self._config.assignments.items()
            if name in finals
        ]
        return PersonTotals(
            present=compute_total(present, self._config.assignment_groups, missing),
            released=self._released.read(student, missing),
        )
