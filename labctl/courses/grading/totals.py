"""The record of a whole grade: the automatic grading's, with the marks of the rubric. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from labctl.courses.grading.record import GradeRecord
from labctl.courses.grading.results import GradeResults
from labctl.courses.records.gradebook import Grade
from labctl.courses.records.marks import RubricItem, as_test, describe_items


def build_total_record(
    assignment: str, seat: str, grade: Grade, record: GradeRecord | None
) -> GradeRecord:
    """Return the record of the total, from which a student's feedback is made; it is not stored.

    `record` is that of the automatic grading, None if the rubric has all points.
    """
    stamp = grade.stamp
    if record is None:
        record = GradeRecord(
            assignment=assignment,
            seat=seat,
            students=(grade.student,),
            student=grade.student,
            number=stamp.number,
            received=stamp.received,
            bundle_sha256="",
            key="",
            outcome="graded",
            points=grade.points,
        )
    raw = record.raw or GradeResults(score=0.0)
    return msgspec.structs.replace(
        record,
        raw=msgspec.structs.replace(raw, score=grade.score or 0.0),
        points=grade.points,
        score=grade.final,
        late_s=stamp.late_s,
        penalty=stamp.penalty,
        free_days=stamp.free_days,
    )


def describe_marks(grade: Grade) -> str:
    """Return the lines of a rubric's items, and what the automatic grading gave."""
    automatic = "" if grade.automatic is None else f"automatic grading: {grade.automatic:g}"
    return "\n".join(filter(None, [describe_items(grade.items), automatic]))


def add_items(results: GradeResults, items: Sequence[RubricItem]) -> GradeResults:
    """Return the results with a line for each item, for the feedback page."""
    return msgspec.structs.replace(
        results, tests=(*results.tests, *(as_test(item) for item in items))
    )
