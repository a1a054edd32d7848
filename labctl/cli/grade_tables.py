"""The tables of grades: of one assignment, and the totals of a course."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from labctl.cli.course_options import shorten_name
from labctl.cli.tables import print_table
from labctl.cli.wrapping import print_message
from labctl.courses.records.gradebook import Grade, points_text
from labctl.courses.records.marks import RubricItem
from labctl.model import Value
from labctl.text import duration_text

if TYPE_CHECKING:
    from labctl.courses.records.course_total import DroppedGrade
    from labctl.courses.records.folder import CourseFolder
    from labctl.courses.totals import StudentTotal


class GradeReport(Value, frozen=True):
    """One student's grade, as --json prints it."""

    student: str
    team: str
    score: float | None
    points: float
    penalty_percent: int
    late_s: int
    final: float | None
    submission: int
    released: bool
    corrected: bool
    unreleased_final: float | None
    change: str
    problem: str
    excused: bool
    free_days_used: int
    free_days: int
    automatic: float | None
    items: tuple[RubricItem, ...]
    dropped: str


def make_report(grade: Grade, dropped: DroppedGrade | None) -> GradeReport:
    return GradeReport(
        student=grade.student,
        team=grade.team,
        score=grade.score,
        points=grade.points,
        penalty_percent=grade.stamp.penalty,
        late_s=grade.stamp.late_s,
        final=grade.final,
        submission=grade.stamp.number,
        released=grade.released,
        corrected=grade.corrected,
        unreleased_final=grade.unreleased.final if grade.unreleased else None,
        change=grade.change,
        problem=grade.problem,
        excused=grade.excused,
        free_days_used=grade.stamp.free_days.used,
        free_days=grade.stamp.free_days.total,
        automatic=grade.automatic,
        items=grade.items,
        dropped=dropped.reason if dropped else "",
    )


def print_grades(
    grades: list[Grade], folder: CourseFolder, dropped: Mapping[str, DroppedGrade], rubric: bool
) -> None:
    names = {student.id: student.name for student in folder.list_students(active_only=False)}
    has_teams = any(grade.team for grade in grades)
    headings, cells_of = _choose_columns(grades, rubric)
    rows = [
        (
            grade.student,
            shorten_name(names.get(grade.student) or "-"),
            *([grade.team or "-"] if has_teams else []),
            *cells_of(grade),
            _describe_grade(grade, dropped.get(grade.student)),
        )
        for grade in grades
    ]
    headings = ("STUDENT", "NAME", *(["TEAM"] if has_teams else []), *headings, "")
    # The last column says why a grade is missing: on a narrow screen it is wrapped, not cut.
    print_table(rows, headings, cut=False)
    scores = [grade.final for grade in grades if grade.final is not None]
    mean = (
        f"; mean {sum(scores) / len(scores):.1f} of {points_text(grades[0].points)}"
        if scores
        else ""
    )
    print_message(f"graded: {len(scores)} of {len(grades)}{mean}")


def _describe_grade(grade: Grade, dropped: DroppedGrade | None) -> str:
    """Return why a grade is missing, and what decided about it."""
    reason = dropped.reason if dropped else ""
    outdated = (grade.unreleased or grade).outdated_marks_text
    parts = [grade.problem, outdated, grade.stamp.free_days.text, reason]
    return "; ".join(filter(None, parts))


def _choose_columns(
    grades: Sequence[Grade], rubric: bool
) -> tuple[tuple[str, ...], Callable[[Grade], tuple[str, ...]]]:
    """Return headings and cells: what the grade comes from, or with `rubric` each item's mark."""
    items = [item.name for item in grades[0].items] if rubric and grades else []
    if not items:
        return ("SCORE", "LATE", "OFF", "FINAL", "RELEASED"), _grade_cells
    if all(grade.automatic is None for grade in grades):
        headings = tuple(item.upper() for item in items)
        return (*headings, "FINAL"), _mark_cells
    headings = ("AUTO", *(item.upper() for item in items))
    return (*headings, "FINAL"), lambda grade: (
        points_text(grade.automatic) or "-",
        *_mark_cells(grade),
    )


def _grade_cells(grade: Grade) -> tuple[str, ...]:
    return (
        points_text(grade.score) or "-",
        duration_text(grade.stamp.late_s) if grade.stamp.late_s else "-",
        f"-{points_text(grade.penalty_points)}" if grade.penalty_points else "-",
        points_text(grade.final) or "-",
        "yes" if grade.released else "-",
    )


def _mark_cells(grade: Grade) -> tuple[str, ...]:
    """Return each mark with who gave it, and the final score."""
    cells = []
    for item in grade.items:
        by = f" ({item.mark.by})" if item.mark and item.mark.by else ""
        cells.append(f"{points_text(item.mark.points)}{by}" if item.mark else "-")
    return (*cells, points_text(grade.final) or "-")


def print_totals(totals: Sequence[StudentTotal], folder: CourseFolder) -> None:
    """Print each student's grades and total. A dropped grade is in parentheses."""
    names = {student.id: student.name for student in folder.list_students(active_only=False)}
    has_teams = any(total.team for total in totals)
    rows = [
        (
            one.student,
            shorten_name(names.get(one.student) or "-"),
            *([one.team or "-"] if has_teams else []),
            *_list_total_cells(one, folder.config.assignments),
            points_text(one.total.final),
            points_text(one.total.points),
            "; ".join(dropped.text for dropped in one.total.dropped),
        )
        for one in totals
    ]
    headings = ("STUDENT", "NAME", *(["TEAM"] if has_teams else []))
    assignments = (name.upper() for name in folder.config.assignments)
    print_table(rows, (*headings, *assignments, "TOTAL", "OF", ""), cut=False)
    weights = {name: one.weight for name, one in folder.config.assignment_groups.items()}
    if any(weights.values()):
        texts = ", ".join(f"{name} {weight:g}%" for name, weight in weights.items())
        print_message(f"TOTAL is a percentage: {texts}. A group without grades does not count yet.")


def _list_total_cells(one: StudentTotal, assignments: Iterable[str]) -> list[str]:
    cells = []
    for name, grade in zip(assignments, one.grades, strict=True):
        text = "excused" if grade.excused else points_text(grade.final) or "-"
        cells.append(f"({text})" if one.total.find_dropped(name) else text)
    return cells
