"""The statistics of an assignment, from its grades, its results and the ledger's costs."""

from __future__ import annotations

import time

import msgspec

from labctl.courses.assignment_seats import list_assignment_seats
from labctl.courses.grade_store import GradeStore
from labctl.courses.grades import list_grades
from labctl.courses.records.cost_report import compute_assignment_costs, list_due_times
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.grade_statistics import GradeStatistics, compute_statistics
from labctl.courses.records.spending import list_spans


def read_statistics(folder: CourseFolder, assignment: str) -> GradeStatistics:
    """Return the statistics; NotFoundError if course.yaml has no such assignment.

    Costs are those in the ledger: no provider is queried.
    """
    grades = list_grades(folder, assignment)
    grade_store = GradeStore(folder, assignment)
    records = [
        grade_store.read_record(seat.name) for seat in list_assignment_seats(folder, assignment)
    ]
    found = compute_statistics(
        assignment,
        folder.config.assignments[assignment].points,
        grades,
        [record.raw for record in records if record is not None and record.raw is not None],
    )
    spans = list_spans(folder.ledger.list_entries(), time.time())
    costs = compute_assignment_costs(
        [span for span in spans if not span.seat.startswith(".")], list_due_times(folder.config)
    )
    own = next((cost for cost in costs if cost.assignment == assignment), None)
    if own is None or not grades:
        return found
    return msgspec.structs.replace(found, hours=own.hours / len(grades), usd=own.usd / len(grades))
