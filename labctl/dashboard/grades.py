"""What grading wrote down: Gradescope's results.json, one for each assignment and student.

What a results file says is partly a student's program's output: it is only ever shown as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from labctl.config.course_schema import AssignmentConfig
from labctl.courses.ledger import Entry
from labctl.courses.student import Student
from labctl.dashboard.view import Grade
from labctl.model import Value

RESULTS = "results.json"
MOST_BYTES = 4 * 1024**2
MOST_SAID = 2000


class _Test(Value, frozen=True):
    score: float | None = None
    max_score: float | None = None
    name: str = ""
    output: str = ""


class _Results(Value, frozen=True):
    """The keys of Gradescope's form that are shown. Without `score` the tests' sum counts."""

    score: float | None = None
    output: str = ""
    tests: tuple[_Test, ...] = ()


class Grades:
    """Below `folder`, `ASSIGNMENT/STUDENT/results.json`. A file is read again when it changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, tuple[tuple[int, int], Grade | None]] = {}

    def of(
        self,
        student: Student,
        assignments: Mapping[str, AssignmentConfig],
        released: frozenset[tuple[str, str]],
    ) -> tuple[Grade, ...]:
        """A student's grades; a team's where the student has none of their own."""
        found = []
        for name, rules in assignments.items():
            grade = self._read(name, student.id, rules.points)
            if grade is None and student.team:
                grade = self._read(name, student.team, rules.points)
            if grade is not None:
                public = (name, student.id) in released or (name, "") in released
                found.append(msgspec.structs.replace(grade, released=public))
        return tuple(found)

    def _read(self, assignment: str, name: str, points: float) -> Grade | None:
        file = self._folder / assignment / name / RESULTS
        try:
            about = file.stat()
        except OSError:
            self._known.pop(file, None)
            return None
        stamp = (about.st_mtime_ns, about.st_size)
        known = self._known.get(file)
        if known is None or known[0] != stamp:
            known = (stamp, _grade(file, about.st_size, assignment, points))
            self._known[file] = known
        return known[1]


def released_of(entries: Iterable[Entry]) -> frozenset[tuple[str, str]]:
    """(assignment, student) that were released; student "" for everybody."""
    lines = (one for one in entries if one.kind == "released")
    return frozenset((str(one.detail.get("assignment", "")), one.student) for one in lines)


def _grade(file: Path, size: int, assignment: str, points: float) -> Grade:
    empty = Grade(assignment=assignment, points=points)
    if size > MOST_BYTES:
        return msgspec.structs.replace(empty, said="its results.json is too large to be shown")
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_Results)
    except (OSError, msgspec.MsgspecError):
        return msgspec.structs.replace(empty, said="its results.json cannot be read")
    scores = [one.score for one in found.tests if one.score is not None]
    score = found.score if found.score is not None else (sum(scores) if scores else None)
    return msgspec.structs.replace(empty, score=score, said=found.output[:MOST_SAID])
