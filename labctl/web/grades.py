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
from labctl.courses.grading.results import subtract_penalty
from labctl.courses.records.excuses import KIND as EXCUSE_KIND
from labctl.courses.records.excuses import read_excuses
from labctl.courses.records.gradebook import Grade, Stamp, add_marks, read_results
from labctl.courses.records.ledger_entries import CourseLedgerEntry
from labctl.courses.records.marks import (
    MarkedSubmission,
    StudentMarks,
    describe_items,
    list_items,
)
from labctl.courses.records.membership import read_frozen_members
from labctl.courses.records.student import Student
from labctl.model import Value
from labctl.web.ledger_view import LedgerView
from labctl.web.view import GradeView, SubmissionView, find_counting

MAX_BYTES = 4 * 1024**2
# characters of feedback that are shown
MAX_FEEDBACK = 2000


class GradeDecisions(Value, frozen=True):
    """What people decided about grades, from the ledger.

    `released` are the scores that students see, by assignment and student; student "" means
    everybody, None a score that the ledger does not have. `frozen` are the
    seats of closed assignments, by assignment and student. `marks` are those of rubrics, by
    assignment and student; `excuses` the reasons, by assignment and student.
    """

    released: Mapping[tuple[str, str], float | None] = {}
    frozen: Mapping[str, Mapping[str, str]] = {}
    marks: Mapping[str, Mapping[str, StudentMarks]] = {}
    excuses: Mapping[tuple[str, str], str] = {}


# an automatic grade, or an empty one for marks alone, the rules, the marks, whether it is empty,
# and the submission that the marks should be for
_Parts = tuple[GradeView, AssignmentConfig, StudentMarks, bool, MarkedSubmission]


class Grades:
    """Grades in `folder/ASSIGNMENT/STUDENT/`. A file is read again when it changes.

    `list_owners` finds new directories. It must run before the grades of all students are read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # assignment -> the students and teams who have a directory
        self._owners: dict[str, set[str]] = {}
        # file -> its time and size when it was read, and the grade in it
        self._cache: dict[str, tuple[tuple[int, int], GradeView | None]] = {}
        # assignment and student -> what the grade with marks was made of, and that grade
        self._marked: dict[tuple[str, str], tuple[_Parts, GradeView]] = {}

    def list_owners(self, assignments: Iterable[str]) -> None:
        """List who has a grade: few have one in each assignment, and each look for one costs."""
        self._owners = {name: _list_names(self._folder / name) for name in assignments}

    def read_grades(
        self,
        student: Student,
        assignments: Mapping[str, AssignmentConfig],
        decisions: GradeDecisions,
        hand_ins: Sequence[SubmissionView] = (),
    ) -> tuple[GradeView, ...]:
        """Return a student's grades, with marks; without an own grade, the grade of the team.

        `hand_ins` are their submissions, the oldest first.
        """
        grades = []
        for name, rules in assignments.items():
            grade = self._read_automatic(student, name, rules, decisions)
            reason = decisions.excuses.get((name, student.id))
            marks = decisions.marks.get(name, {}).get(student.id, {})
            if reason is not None:
                grade = GradeView(
                    assignment=name, points=rules.points, feedback=reason, excused=True
                )
            elif rules.rubric and (grade is not None or marks):
                is_empty = grade is None
                grade = grade or _add_release(GradeView(assignment=name), student.id, decisions)
                parts = (grade, rules, marks, is_empty, _identify_submission(grade, hand_ins))
                grade = self._add_marks((student.id, name), parts)
            if grade is not None:
                grades.append(grade)
        return tuple(grades)

    def _add_marks(self, key: tuple[str, str], parts: _Parts) -> GradeView:
        """Return the grade with the marks of the rubric; made again only if a part has changed."""
        made = self._marked.get(key)
        if made is None or made[0] != parts:
            made = self._marked[key] = (parts, _add_marks(*parts))
        return made[1]

    def _read_automatic(
        self, student: Student, name: str, rules: AssignmentConfig, decisions: GradeDecisions
    ) -> GradeView | None:
        """Return what the automatic grading gave the student, or else their team."""
        seats = decisions.frozen.get(name)
        seat = student.seat if seats is None else seats.get(student.id, student.id)
        for owner in dict.fromkeys((student.id, seat)):
            is_graded = owner in self._owners.get(name, ())
            grade = self._read(name, owner, rules.points) if is_graded else None
            if grade is not None:
                grade = _add_release(grade, student.id, decisions)
                is_public = grade.released and self._has_feedback(name, owner)
                return msgspec.structs.replace(grade, released=is_public)
        return None

    def _has_feedback(self, assignment: str, owner: str) -> bool:
        """Tell whether the feedback belongs to this grade; grading again removes the old one."""
        directory = self._folder / assignment / owner
        return (directory / FEEDBACK).exists() or not (directory / FILE).exists()

    def _read(self, assignment: str, name: str, points: float) -> GradeView | None:
        """Return the grade in labctl's record with the corrections that staff made by hand."""
        record = self._read_file(assignment, name, FILE, points)
        results = self._read_file(assignment, name, RESULTS, points)
        if record is None or results is None:
            return record or results
        if results.score is None or results.score == record.automatic:
            return record
        score = subtract_penalty(results.score, record.points or points, record.penalty)
        return msgspec.structs.replace(
            record, automatic=results.score, score=score, feedback=results.feedback
        )

    def _read_file(
        self, assignment: str, name: str, filename: str, points: float
    ) -> GradeView | None:
        file = f"{self._folder}/{assignment}/{name}/{filename}"
        try:
            stat = os.stat(file)  # noqa: PTH116  # ten times faster; a thousand per snapshot
        except OSError:
            self._cache.pop(file, None)
            return None
        stamp = (stat.st_mtime_ns, stat.st_size)
        cached = self._cache.get(file)
        if cached is None or cached[0] != stamp:
            cached = (stamp, _read_grade(Path(file), stat.st_size, assignment, points))
            self._cache[file] = cached
        return cached[1]


def _list_names(directory: Path) -> set[str]:
    try:
        return set(os.listdir(directory))  # noqa: PTH208  # names are enough
    except OSError:
        return set()


def read_decisions(
    ledger: LedgerView, assignments: Mapping[str, AssignmentConfig]
) -> GradeDecisions:
    """Return what the ledger says about the grades of these assignments."""
    excuses = read_excuses(ledger.of_kinds(EXCUSE_KIND))
    return GradeDecisions(
        released=ledger.released,
        frozen=find_frozen_seats(ledger.of_kinds("closed"), assignments),
        marks=ledger.marks,
        excuses={pair: excuse.text for pair, excuse in excuses.items()},
    )


def _add_release(grade: GradeView, student: str, decisions: GradeDecisions) -> GradeView:
    """Return the grade with whether it was released, and with which score."""
    released, name = decisions.released, grade.assignment
    return msgspec.structs.replace(
        grade,
        released=(name, student) in released or (name, "") in released,
        released_score=released.get((name, student)),
    )


def _identify_submission(grade: GradeView, hand_ins: Sequence[SubmissionView]) -> MarkedSubmission:
    """Return what marks should be for: what was graded automatically, or else what counts."""
    if grade.number:
        return MarkedSubmission(number=grade.number, received=grade.received)
    counting = find_counting(hand_ins, grade.assignment)
    if counting is None:
        return MarkedSubmission()
    return MarkedSubmission(number=counting.number, received=counting.received)


def _add_marks(
    found: GradeView,
    rules: AssignmentConfig,
    marks: StudentMarks,
    is_empty: bool,
    submission: MarkedSubmission,
) -> GradeView:
    """Return the grade with the marks of the rubric. `is_empty` is one of marks alone."""
    items = list_items(rules.rubric, marks)
    grade = add_marks(
        Grade(
            student="",
            score=found.automatic,
            points=rules.points,
            stamp=Stamp(number=found.number, penalty=found.penalty),
            owner="" if is_empty else found.assignment,
        ),
        rules.graded_points,
        items,
    )
    text = "\n".join(filter(None, [grade.problem, describe_items(items), found.feedback]))
    return msgspec.structs.replace(
        found,
        score=grade.final,
        points=rules.points,
        feedback=text[:MAX_FEEDBACK],
        outdated=tuple(
            item.name for item in items if item.mark and item.mark.is_outdated(submission)
        ),
    )


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


def _read_grade(file: Path, size: int, assignment: str, points: float) -> GradeView:
    empty = GradeView(assignment=assignment, points=points)
    if file.name == RESULTS:
        results = read_results(file)
        feedback = results.output[:MAX_FEEDBACK] or results.problem
        return msgspec.structs.replace(
            empty, score=results.score, automatic=results.score, feedback=feedback
        )
    if size > MAX_BYTES:
        return msgspec.structs.replace(empty, feedback=f"{file.name} is too large to show")
    try:
        record = decode(file.read_bytes())
    except OSError:
        return msgspec.structs.replace(empty, feedback=f"{file.name} cannot be read")
    if record is None:
        return msgspec.structs.replace(
            empty, feedback="the record is from another version of labctl"
        )
    return _convert_record(record)


def _convert_record(record: GradeRecord) -> GradeView:
    feedback = record.message or (record.raw.output if record.raw else "")
    return GradeView(
        assignment=record.assignment,
        number=record.number,
        received=record.received,
        score=record.score,
        automatic=record.raw.score if record.raw else None,
        penalty=record.penalty,
        free_days=record.free_days.text,
        points=record.points,
        feedback=feedback[:MAX_FEEDBACK],
        claim=record.comparison.describe(),
        agrees=record.comparison.agrees,
        flags=tuple(" - ".join(filter(None, [flag.what, flag.evidence])) for flag in record.flags),
    )
