"""The record of a whole grade: the automatic grading's, with the marks of the rubric. Pure."""

from __future__ import annotations

import msgspec

from labctl.courses.grading.record import GradeRecord
from labctl.courses.grading.results import GradeResults
from labctl.courses.records.gradebook import Grade
from labctl.courses.records.marks import as_test, describe_items


def build_total_record(
    assignment: str, seat: str, grade: Grade, record: GradeRecord | None
) -> GradeRecord:
    """Return the record from which a student's feedback is made; it is not stored.

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
    automatic = "" if grade.automatic is None else f"automatic grading: {grade.automatic:g}"
    parts = [raw.output, automatic, describe_items(grade.items)]
    total = msgspec.structs.replace(
        raw,
        score=grade.score or 0.0,
        output="\n".join(filter(None, parts)),
        tests=(*raw.tests, *(as_test(item) for item in grade.items)),
    )
    return msgspec.structs.replace(
        record,
        raw=total,
        points=grade.points,
        score=grade.final,
        late_s=stamp.late_s,
        penalty=stamp.penalty,
        free_days=stamp.free_days,
    )
