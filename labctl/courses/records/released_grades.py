"""Released grades, as recorded in the ledger. Pure.

A released grade stays the same, whatever is graded or corrected afterwards, until it is released
again.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from labctl.courses.records.gradebook import Grade, Stamp, points_text
from labctl.courses.records.ledger_entries import CourseLedgerDraft, CourseLedgerEntry
from labctl.courses.records.marks import RubricItem
from labctl.decoding import convert_value

KIND = "released"


def list_released_lines(
    entries: Iterable[CourseLedgerEntry], assignment: str
) -> dict[str, CourseLedgerEntry]:
    """Return each student's last line about a release of this assignment."""
    lines = (entry for entry in entries if entry.kind == KIND)
    return {line.student: line for line in lines if line.detail.get("assignment") == assignment}


def is_complete(line: CourseLedgerEntry) -> bool:
    """Tell whether a line has the released grade: those of earlier versions do not."""
    return "score" in line.detail


def draft_released_line(assignment: str, grade: Grade, by: str, why: str = "") -> CourseLedgerDraft:
    """Return the ledger's line for the release of a grade."""
    stamp = msgspec.to_builtins(grade.stamp)
    if not grade.stamp.free_days.used:
        del stamp["free_days"]  # as in the lines of versions without free days
    detail = {
        "assignment": assignment,
        "seat": grade.team or grade.student,
        "score": grade.score,
        "points": grade.points,
        "stamp": stamp,
        "corrected": grade.corrected,
    }
    if grade.items:
        detail["automatic"] = grade.automatic
        # A list, as it is read again: a release without a change writes no line.
        detail["items"] = [_item_as_json(item) for item in grade.items]
    return CourseLedgerDraft(kind=KIND, student=grade.student, by=by, why=why, detail=detail)


def _item_as_json(item: RubricItem) -> object:
    content = msgspec.to_builtins(item)
    if item.mark is not None and item.mark.submission is None:
        del content["mark"]["submission"]  # as in the lines of versions that did not store it
    return content


def as_released(grade: Grade, line: CourseLedgerEntry | None) -> Grade:
    """Return the grade that was released to this student, or `grade` itself if none was.

    An excuse counts at once.
    """
    if grade.excused or line is None or not is_complete(line):
        return grade
    before = read_released_grade(line, grade.owner)
    if _list_values(before) == _list_values(grade):
        return before
    return msgspec.structs.replace(before, unreleased=grade, change=_reason_text(before, grade))


def read_released_grade(line: CourseLedgerEntry, owner: str = "") -> Grade:
    """Return the grade that a complete line released to its student."""
    detail = line.detail
    seat = str(detail["seat"])
    return Grade(
        student=line.student,
        score=detail["score"],
        points=detail["points"],
        stamp=convert_value(detail["stamp"], Stamp),
        team="" if seat == line.student else seat,
        released=True,
        owner=owner,
        corrected=bool(detail["corrected"]),
        automatic=detail.get("automatic", detail["score"]),
        items=convert_value(detail.get("items", ()), tuple[RubricItem, ...]),
    )


def _list_values(grade: Grade) -> tuple[object, ...]:
    """Return what a student sees of a grade, and a release would change."""
    marks = [(item.name, item.points, item.mark and item.mark.points) for item in grade.items]
    return grade.score, grade.final, grade.points, marks


def change_text(grade: Grade) -> str:
    """Describe what a release would change: "alice: 40 -> 50 (corrected by hand)"."""
    assert grade.unreleased is not None
    now = points_text(grade.unreleased.final) or "no grade"
    return f"{grade.student}: {points_text(grade.final)} -> {now} ({grade.change})"


def _reason_text(before: Grade, now: Grade) -> str:
    if now.score is None:
        return now.problem
    reasons = []
    if now.team != before.team:
        reasons.append(f"from {now.team or now.student} instead of {before.team or before.student}")
    if now.corrected:
        reasons.append("corrected by hand")
    given = {item.name: item.mark and item.mark.points for item in before.items}
    for item in now.items:
        if item.mark and item.mark.points != given.get(item.name):
            reasons.append(f"{item.name} marked {points_text(item.mark.points)}")
    if now.items and now.automatic != before.automatic:
        automatic = [points_text(one.automatic) or "none" for one in (now, before)]
        reasons.append(f"automatic grading {' instead of '.join(automatic)}")
    if now.stamp.number != before.stamp.number:
        reasons.append(f"submission {now.stamp.number} instead of {before.stamp.number or 'none'}")
    if now.stamp.penalty != before.stamp.penalty:
        reasons.append(f"{now.stamp.penalty}% off for lateness instead of {before.stamp.penalty}%")
    if now.points != before.points:
        reasons.append(f"out of {points_text(now.points)} instead of {points_text(before.points)}")
    return ", ".join(reasons) or "graded again"
