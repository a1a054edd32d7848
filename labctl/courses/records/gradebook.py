"""Reading grades: from Gradescope's results.json, with the receiver's stamp on the submission."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from labctl.courses.grading.record import RESULTS
from labctl.courses.grading.results import decode_results, parse_number
from labctl.courses.records.free_days import FreeDays
from labctl.courses.records.marks import (
    ItemMark,
    MarkedSubmission,
    RubricItem,
    list_unmarked,
    sum_marks,
)
from labctl.courses.records.student import Student
from labctl.decoding import decode_json
from labctl.model import Value

MOST_BYTES = 4 * 1024**2


class Stamp(Value, frozen=True):
    """The receiver's stamp on the graded submission. `penalty` is in percent."""

    number: int = msgspec.field(default=0, name="submission")
    received: str = ""
    late_s: int = 0
    penalty: int = 0
    free_days: FreeDays = FreeDays()


class _Extra(Value, frozen=True):
    labctl: Stamp | None = None


class StoredResults(Value, frozen=True):
    """What a results.json says; if `score` is None, `problem` says why.

    `stamp` is the one that labctl's grading wrote, None in the file of another grader.
    """

    score: float | None = None
    stamp: Stamp | None = None
    output: str = ""
    problem: str = ""


_UNREADABLE = StoredResults(problem="its results.json cannot be read")


class Grade(Value, frozen=True):
    """One student's grade. `score` is as graded; if it is None, `problem` says why.

    With a rubric, `score` is `automatic` (what the automatic grading gave) plus the marks of
    `items`, once all of them are there. `excused` students have no score.

    `final` is the score less the penalty in percent of the assignment's points, at least 0. `owner`
    is the student or team whose file was read. A released grade shows what was released:
    `unreleased` is the present grade if it differs, and `change` says why.
    """

    student: str
    score: float | None
    points: float
    stamp: Stamp = Stamp()
    team: str = ""
    released: bool = False
    problem: str = ""
    owner: str = ""
    corrected: bool = False
    unreleased: Grade | None = None
    change: str = ""
    automatic: float | None = None
    items: tuple[RubricItem, ...] = ()
    excused: bool = False

    @property
    def penalty_points(self) -> float:
        return self.points * self.stamp.penalty / 100

    @property
    def final(self) -> float | None:
        return None if self.score is None else max(0.0, self.score - self.penalty_points)

    @property
    def outdated_marks(self) -> dict[str, ItemMark]:
        """The marks that are for an older submission than the one that counts, by item."""
        if self.excused:
            return {}
        counting = MarkedSubmission(number=self.stamp.number, received=self.stamp.received)
        marks = {item.name: item.mark for item in self.items if item.mark}
        return {name: mark for name, mark in marks.items() if mark.is_outdated(counting)}

    @property
    def outdated_marks_text(self) -> str:
        """Name the items of `outdated_marks` and their submissions; "" without any."""
        outdated = {name: (mark,) for name, mark in self.outdated_marks.items()}
        return outdated_text(self.stamp.number, outdated)

    @property
    def is_held_back(self) -> bool:
        """Whether the score waits for marks of the submission that counts; not once released."""
        return self.score is not None and not self.released and bool(self.outdated_marks)

    @property
    def items_to_mark(self) -> tuple[str, ...]:
        """The items without a mark, and those of `outdated_marks`."""
        todo = {*list_unmarked(self.items), *self.outdated_marks}
        return tuple(item.name for item in self.items if item.name in todo)


def outdated_text(number: int, outdated: Mapping[str, Iterable[ItemMark]]) -> str:
    """Say which submission each item was marked for instead of this one; "" without items."""
    items: dict[str, list[str]] = {}
    for name, marks in outdated.items():
        for text in dict.fromkeys(_marked_text(number, mark) for mark in marks):
            items.setdefault(text, []).append(name)
    return "; ".join(f"{text}: {', '.join(names)}" for text, names in items.items())


def _marked_text(number: int, mark: ItemMark) -> str:
    marked = mark.submission.number if mark.submission else 0
    # In a team, another student's submission can have the same number.
    if marked in (0, number):
        return f"marked before submission {number} arrived"
    return f"marked for submission {marked} instead of {number}"


def add_marks(grade: Grade, graded_points: float, items: tuple[RubricItem, ...]) -> Grade:
    """Return the grade with the marks of a rubric; without a score while one is missing.

    `graded_points` is what the automatic grading is worth; with 0 it is not waited for.
    """
    if not items:
        return msgspec.structs.replace(grade, automatic=grade.score)
    marked = msgspec.structs.replace(grade, automatic=grade.score, items=items)
    unmarked = list_unmarked(items)
    if grade.score is None and (graded_points or grade.owner):
        return marked
    if len(unmarked) == len(items) and not grade.stamp.number and not grade.owner:
        return marked
    if unmarked:
        problem = f"not marked yet: {', '.join(unmarked)}"
        return msgspec.structs.replace(marked, score=None, problem=problem)
    score = round((grade.score or 0.0) + sum_marks(items), 3)
    return msgspec.structs.replace(marked, score=score, problem="")


def excuse(grade: Grade, text: str) -> Grade:
    """Return the grade of an excused student: no score, and the reason."""
    return msgspec.structs.replace(grade, score=None, problem=text, excused=True)


def hold_back(grade: Grade) -> Grade:
    """Return the grade; without its score if it `is_held_back`."""
    if not grade.is_held_back:
        return grade
    return msgspec.structs.replace(grade, score=None, problem=grade.outdated_marks_text)


def count_missing(grade: Grade) -> Grade:
    """Return the grade of a closed assignment in which a missing submission counts as 0."""
    if grade.score is not None or grade.excused or grade.owner or grade.stamp.number:
        return grade
    problem = "nothing was submitted, which counts as 0"
    return msgspec.structs.replace(grade, score=sum_marks(grade.items), problem=problem)


def read_grades(
    grades: Path,
    assignment: str,
    points: float,
    students: Iterable[Student],
    stamps: Mapping[str, Stamp],
    released: frozenset[str] = frozenset(),
    seats: Mapping[str, str] | None = None,
) -> list[Grade]:
    """Return the grade of each student: their own, else their team's.

    `stamps` of submissions, by student or team, apply if the grading wrote none. `seats` gives the
    seats' names by student; by default those of the roster.
    """
    grades_read = []
    for student in students:
        seat = student.seat if seats is None else seats.get(student.id, student.id)
        owner = next(
            (
                name
                for name in (student.id, seat)
                if _results_path(grades, assignment, name).is_file()
            ),
            "",
        )
        results = (
            read_results(_results_path(grades, assignment, owner)) if owner else StoredResults()
        )
        stamp = results.stamp or stamps.get(student.id) or stamps.get(seat) or Stamp()
        problem = results.problem
        if not owner:
            problem = "not graded yet" if stamp.number else "nothing was submitted"
        grades_read.append(
            Grade(
                student=student.id,
                score=results.score,
                points=points,
                stamp=stamp,
                team="" if seat == student.id else seat,
                released=student.id in released,
                problem=problem,
                owner=owner,
            )
        )
    return grades_read


def _results_path(grades: Path, assignment: str, name: str) -> Path:
    return grades / assignment / name / RESULTS


def read_results(file: Path) -> StoredResults:
    """Read a results.json, written by labctl's grading, another grader or by hand. Never raises."""
    try:
        if file.stat().st_size > MOST_BYTES:
            return StoredResults(problem="its results.json is too large")
        results = decode_results(file.read_bytes())
        stamp = decode_json(results.extra_data, _Extra).labctl
    except (OSError, ValueError, RecursionError):
        return _UNREADABLE
    score = results.total
    if any(test.score is not None and parse_number(test.score) is None for test in results.tests):
        # A person meant it to count: a sum without it would be a wrong grade.
        return _UNREADABLE
    stored = StoredResults(stamp=stamp, output=results.output_text)
    if score is None:
        return msgspec.structs.replace(stored, problem="its results.json has no score")
    if not math.isfinite(score):
        return msgspec.structs.replace(stored, problem="its score is not a number")
    return msgspec.structs.replace(stored, score=score)


def points_text(value: float | None) -> str:
    """Return a grade as text, like 87.5 or 90; "" for None. At most three decimal places."""
    if value is None:
        return ""
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return text or "0"
