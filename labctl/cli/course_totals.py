"""The totals of a course, which `labctl course grades` shows without an assignment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.course_options import MOST_NAMES
from labctl.cli.grade_tables import print_totals
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message
from labctl.config.document import escape
from labctl.courses.records.gradebook import points_text
from labctl.courses.records.tables import TableShape
from labctl.courses.totals import StudentTotal, list_totals
from labctl.errors import UsageError
from labctl.model import Value
from labctl.text import names_text

if TYPE_CHECKING:
    from labctl.courses.records.course_total import DroppedGrade, GroupTotal
    from labctl.courses.records.folder import CourseFolder


class DroppedReport(Value, frozen=True):
    """A grade that does not count in a total, and why."""

    assignment: str
    reason: str


class TotalReport(Value, frozen=True):
    """One student's total, as --json prints it; `grades` has None where there is no grade.

    If groups have weights, `total` is the percentage that `groups` gives, and `points` is 100.
    """

    student: str
    team: str
    grades: dict[str, float | None]
    excused: tuple[str, ...]
    total: float
    points: float
    dropped: tuple[DroppedReport, ...]
    groups: tuple[GroupTotal, ...] = ()


def check_options(format_: str | None, is_written: bool, needs_assignment: bool) -> None:
    """Raise UsageError for options that concern one assignment."""
    if needs_assignment:
        raise UsageError(
            "these options need an assignment",
            hint="labctl course grades hw3   # without one: the totals",
        )
    if format_ not in (None, "csv") or (is_written and format_ is None):
        raise UsageError(
            "totals are written as csv only",
            why="a learning platform computes totals itself, by the rules that you set there",
            hint="labctl course grades --format csv -o totals.csv",
        )


def show_totals(folder: CourseFolder, format_: str | None, out: Path | None, json_: bool) -> None:
    """Print or write the totals of all students."""
    totals = list_totals(folder)
    if format_:
        data = _write_csv(totals, list(folder.config.assignments))
        if out:
            out.write_bytes(data)
        elif not json_:
            click.echo(data, nl=False)
    if json_:
        reports = [_make_report(one, list(folder.config.assignments)) for one in totals]
        print_json({"totals": reports, "written": str(out or "")})
    elif out:
        print_message(f"wrote {out} (format: csv)")
    elif not format_:
        print_totals(totals, folder)
    _note_outdated_marks(totals, list(folder.config.assignments))


def _note_outdated_marks(totals: list[StudentTotal], names: list[str]) -> None:
    """Name the grades that count here, and that a release would hold back."""
    outdated = [
        f"{one.student} ({name})"
        for one in totals
        for name, grade in zip(names, one.grades, strict=True)
        if grade.is_held_back
    ]
    if outdated:
        text = "counted, though marked for an older submission"
        print_message(f"{text}: {names_text(outdated, MOST_NAMES)}")


def _make_report(one: StudentTotal, names: list[str]) -> TotalReport:
    pairs = list(zip(names, one.grades, strict=True))
    return TotalReport(
        student=one.student,
        team=one.team,
        grades={name: grade.final for name, grade in pairs},
        excused=tuple(name for name, grade in pairs if grade.excused),
        total=one.total.final,
        points=one.total.points,
        dropped=tuple(_report_dropped(dropped) for dropped in one.total.dropped),
        groups=one.total.groups,
    )


def _report_dropped(dropped: DroppedGrade) -> DroppedReport:
    return DroppedReport(assignment=dropped.assignment, reason=dropped.reason)


def _write_csv(totals: list[StudentTotal], names: list[str]) -> bytes:
    rows = [["student", "team", *names, "total", "points", "dropped"]]
    for one in totals:
        finals = [points_text(grade.final) for grade in one.grades]
        numbers = [points_text(one.total.final), points_text(one.total.points)]
        reasons = "; ".join(dropped.text for dropped in one.total.dropped)
        rows.append([one.student, one.team, *finals, *numbers, escape(reasons)])
    return TableShape().write(rows)
