"""What grading wrote down for each assignment and seat: labctl's own record, or a results.json that
another grader left there.

What they say is partly a student's program's output: it is only ever shown as text.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from labctl.config.course_schema import AssignmentConfig
from labctl.courses.grading.record import FEEDBACK, FILE, RESULTS, Record, decode
from labctl.courses.records.ledger import Entry
from labctl.courses.records.membership import frozen_members
from labctl.courses.records.student import Student
from labctl.model import Value
from labctl.web.view import Grade

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
        self._known: dict[str, tuple[tuple[int, int], Grade | None]] = {}

    def of(
        self,
        student: Student,
        assignments: Mapping[str, AssignmentConfig],
        released: frozenset[tuple[str, str]],
        frozen: Mapping[str, Mapping[str, str]],
    ) -> tuple[Grade, ...]:
        """A student's grades; a team's where the student has none of their own.

        `frozen` are the seats of closed assignments, by assignment and student.
        """
        found = []
        for name, rules in assignments.items():
            seats = frozen.get(name)
            seat = student.seat if seats is None else seats.get(student.id, student.id)
            for owner in dict.fromkeys((student.id, seat)):
                grade = self._read(name, owner, rules.points)
                if grade is not None:
                    said = (name, student.id) in released or (name, "") in released
                    public = said and self._shown(name, owner)
                    found.append(msgspec.structs.replace(grade, released=public))
                    break
        return tuple(found)

    def _shown(self, assignment: str, owner: str) -> bool:
        """Whether the feedback is of this grade: one that is made anew takes the old one back."""
        place = self._folder / assignment / owner
        return (place / FEEDBACK).exists() or not (place / FILE).exists()

    def _read(self, assignment: str, name: str, points: float) -> Grade | None:
        for kept in (FILE, RESULTS):
            file = f"{self._folder}/{assignment}/{name}/{kept}"
            try:
                about = os.stat(file)  # noqa: PTH116  # a thousand at each look: a tenth of the time
            except OSError:
                self._known.pop(file, None)
                continue
            stamp = (about.st_mtime_ns, about.st_size)
            known = self._known.get(file)
            if known is None or known[0] != stamp:
                known = (stamp, _grade(Path(file), about.st_size, assignment, points))
                self._known[file] = known
            return known[1]
        return None


def frozen_seats(
    entries: Sequence[Entry], assignments: Mapping[str, AssignmentConfig]
) -> dict[str, dict[str, str]]:
    """Assignment -> student -> seat, of those that have closed."""
    lines = [one for one in entries if one.kind == "closed"]
    found = {}
    for name, rules in assignments.items():
        members = frozen_members(lines, name, rules)
        if members is not None:
            found[name] = {student: seat for seat, them in members.items() for student in them}
    return found


def released_of(entries: Iterable[Entry]) -> frozenset[tuple[str, str]]:
    """(assignment, student) that were released; student "" for everybody."""
    lines = (one for one in entries if one.kind == "released")
    return frozenset((str(one.detail.get("assignment", "")), one.student) for one in lines)


def _grade(file: Path, size: int, assignment: str, points: float) -> Grade:
    empty = Grade(assignment=assignment, points=points)
    if size > MOST_BYTES:
        return msgspec.structs.replace(empty, said=f"its {file.name} is too large to be shown")
    try:
        data = file.read_bytes()
        if file.name == FILE:
            record = decode(data)
            if record is not None:
                return _recorded(record)
            return msgspec.structs.replace(empty, said="its record is of another version")
        found = msgspec.json.decode(data, type=_Results)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return msgspec.structs.replace(empty, said=f"its {file.name} cannot be read")
    scores = [one.score for one in found.tests if one.score is not None]
    score = found.score if found.score is not None else (sum(scores) if scores else None)
    return msgspec.structs.replace(empty, score=score, said=found.output[:MOST_SAID])


def _recorded(record: Record) -> Grade:
    said = record.told or (record.raw.output if record.raw else "")
    return Grade(
        assignment=record.assignment,
        number=record.number,
        score=record.score,
        points=record.points,
        said=said[:MOST_SAID],
        claim=record.comparison.told(),
        agrees=record.comparison.agrees,
        flags=tuple(" - ".join(filter(None, [one.what, one.evidence])) for one in record.flags),
    )
