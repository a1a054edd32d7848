"""Released grades, as the ledger has them: what students and the course system were given. Pure.

A released grade stays as it was released, whatever is graded or corrected afterwards, until it is
released again.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from labctl.courses.records.gradebook import Grade, Stamp, points_text
from labctl.courses.records.ledger_entries import Draft, Entry

KIND = "released"


def released_lines(entries: Iterable[Entry], assignment: str) -> dict[str, Entry]:
    """Return the last line of a release for each student."""
    lines = (one for one in entries if one.kind == KIND)
    return {one.student: one for one in lines if one.detail.get("assignment") == assignment}


def is_complete(line: Entry) -> bool:
    """Whether a line says which grade was released: those of earlier versions do not."""
    return "score" in line.detail


def released_line(assignment: str, grade: Grade, by: str, why: str = "") -> Draft:
    """Return the ledger's line for a grade that is released."""
    detail = {
        "assignment": assignment,
        "seat": grade.team or grade.student,
        "score": grade.score,
        "points": grade.points,
        "stamp": msgspec.to_builtins(grade.stamp),
        "corrected": grade.corrected,
    }
    return Draft(kind=KIND, student=grade.student, by=by, why=why, detail=detail)


def as_released(grade: Grade, line: Entry | None) -> Grade:
    """Return the grade that was released to this student, `grade` itself where none was."""
    if line is None or not is_complete(line):
        return grade
    detail = line.detail
    seat = str(detail["seat"])
    before = Grade(
        student=grade.student,
        score=detail["score"],
        points=detail["points"],
        stamp=msgspec.convert(detail["stamp"], Stamp),
        team="" if seat == grade.student else seat,
        released=True,
        owner=grade.owner,
        corrected=bool(detail["corrected"]),
    )
    if (before.score, before.final, before.points) == (grade.score, grade.final, grade.points):
        return before
    return msgspec.structs.replace(before, unreleased=grade, change=_why(before, grade))


def change_text(grade: Grade) -> str:
    """Return the difference that a release would make: "alice: 40 -> 50 (corrected by hand)"."""
    assert grade.unreleased is not None
    now = points_text(grade.unreleased.final) or "no grade"
    return f"{grade.student}: {points_text(grade.final)} -> {now} ({grade.change})"


def _why(before: Grade, now: Grade) -> str:
    if now.score is None:
        return now.problem
    found = []
    if now.team != before.team:
        found.append(f"of {now.team or now.student} instead of {before.team or before.student}")
    if now.corrected:
        found.append("corrected by hand")
    if now.stamp.number != before.stamp.number:
        found.append(f"submission {now.stamp.number} instead of {before.stamp.number}")
    if now.stamp.penalty != before.stamp.penalty:
        found.append(f"{now.stamp.penalty}% off for lateness instead of {before.stamp.penalty}%")
    if now.points != before.points:
        found.append(f"out of {points_text(now.points)} instead of {points_text(before.points)}")
    return ", ".join(found) or "graded again"
