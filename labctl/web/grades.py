"""Grades from the course's folder: labctl's own record, or a results.json of another grader.

They contain output of students' programs, so they are only ever shown as text.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from labctl.config.course_schema import AssignmentConfig
from labctl.courses.grading.record import FEEDBACK, FILE, RESULTS, GradeRecord, decode
from labctl.courses.records.gradebook import read_results
from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.courses.records.membership import read_frozen_members
from labctl.courses.records.student import Student
from labctl.web.view import GradeView

MAX_BYTES = 4 * 1024**2
# characters of feedback that are shown
MAX_FEEDBACK = 2000


class Grades:
    """Grades in `folder/ASSIGNMENT/STUDENT/`. A file is read again when it changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # file -> its time and size when it was read, and the grade in it
        self._cache: dict[str, tuple[tuple[int, int], GradeView | None]] = {}

    def read_grades(
        self,
        student: Student,
        assignments: Mapping[str, AssignmentConfig],
        released: frozenset[tuple[str, str]],
        frozen: Mapping[str, Mapping[str, str]],
    ) -> tuple[GradeView, ...]:
        """Return a student's grades; for an assignment without one, the grade of the team.

        `frozen` are the seats of closed assignments, by assignment and student.
        """
        grades = []
        for name, rules in assignments.items():
            seats = frozen.get(name)
            seat = student.seat if seats is None else seats.get(student.id, student.id)
            for owner in dict.fromkeys((student.id, seat)):
                grade = self._read(name, owner, rules.points)
                if grade is not None:
                    is_released = (name, student.id) in released or (name, "") in released
                    is_public = is_released and self._has_feedback(name, owner)
                    grades.append(msgspec.structs.replace(grade, released=is_public))
                    break
        return tuple(grades)

    def _has_feedback(self, assignment: str, owner: str) -> bool:
        """Tell whether the feedback belongs to this grade; grading again removes the old one."""
        directory = self._folder / assignment / owner
        return (directory / FEEDBACK).exists() or not (directory / FILE).exists()

    def _read(self, assignment: str, name: str, points: float) -> GradeView | None:
        for filename in (FILE, RESULTS):
            file = f"{self._folder}/{assignment}/{name}/{filename}"
            try:
                stat = os.stat(file)  # noqa: PTH116  # ten times faster; a thousand per snapshot
            except OSError:
                self._cache.pop(file, None)
                continue
            stamp = (stat.st_mtime_ns, stat.st_size)
            cached = self._cache.get(file)
            if cached is None or cached[0] != stamp:
                cached = (stamp, _read_grade(Path(file), stat.st_size, assignment, points))
                self._cache[file] = cached
            return cached[1]
        return None


def find_frozen_seats(
    entries: Sequence[CourseLedgerEntry], assignments: Mapping[str, AssignmentConfig]
) -> dict[str, dict[str, str]]:
    """Return assignment -> student -> seat, for the assignments that have closed."""
    closed = [entry for entry in entries if entry.kind == "closed"]
    seats = {}
    for name, rules in assignments.items():
        members = read_frozen_members(closed, name, rules)
        if members is not None:
            seats[name] = {
                student: seat for seat, students in members.items() for student in students
            }
    return seats


def find_released(entries: Iterable[CourseLedgerEntry]) -> frozenset[tuple[str, str]]:
    """Return the (assignment, student) pairs that were released; student "" means everybody."""
    releases = (entry for entry in entries if entry.kind == "released")
    return frozenset((str(entry.detail.get("assignment", "")), entry.student) for entry in releases)


def _read_grade(file: Path, size: int, assignment: str, points: float) -> GradeView:
    empty = GradeView(assignment=assignment, points=points)
    if file.name == RESULTS:
        results = read_results(file)
        feedback = results.output[:MAX_FEEDBACK] or results.problem
        return msgspec.structs.replace(empty, score=results.score, feedback=feedback)
    if size > MAX_BYTES:
        return msgspec.structs.replace(empty, feedback=f"{file.name} is too large to show")
    try:
        record = decode(file.read_bytes())
    except OSError:
        return msgspec.structs.replace(empty, feedback=f"{file.name} cannot be read")
    if record is None:
        return msgspec.structs.replace(empty, feedback="the record has another version")
    return _convert_record(record)


def _convert_record(record: GradeRecord) -> GradeView:
    feedback = record.message or (record.raw.output if record.raw else "")
    return GradeView(
        assignment=record.assignment,
        number=record.number,
        score=record.score,
        points=record.points,
        feedback=feedback[:MAX_FEEDBACK],
        claim=record.comparison.describe(),
        agrees=record.comparison.agrees,
        flags=tuple(" - ".join(filter(None, [flag.what, flag.evidence])) for flag in record.flags),
    )
