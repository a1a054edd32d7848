"""The commands course due and course grades: due times of students, and their grades."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.course import open_course
from labctl.cli.course_options import WHY, find_acting_person, print_grace, shorten_name
from labctl.cli.course_tests import print_student_tests
from labctl.cli.exit_codes import clean
from labctl.cli.options import SCREEN, json_option, yes_option
from labctl.cli.screen import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.courses.grades import export_grades, list_grades, list_student_tests
from labctl.courses.records.gradebook import Grade, points_text
from labctl.courses.records.marks import RubricItem
from labctl.courses.records.released_grades import change_text
from labctl.courses.records.timetable import find_zone, local_time_text
from labctl.courses.release import release_grades
from labctl.errors import UsageError
from labctl.lazy import lazy_imports
from labctl.model import Value
from labctl.text import count_text, duration_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from labctl.course import Course
    from labctl.courses.allowances import GrantedExtension
    from labctl.courses.records.folder import CourseFolder
    from labctl.courses.records.writeback import GradeExport

with lazy_imports(__name__):
    from labctl.cli import course_canvas
    from labctl.courses import allowances

FORMATS = ("own", "canvas", "moodle", "classroom", "nbgrader", "csv")


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


@click.command("due", short_help="Move a due time for one student, or list extensions.")
@click.argument("assignment", default="")
@click.argument("student", default="")
@click.argument("time", metavar="[TIME]", default="")
@WHY
@json_option
@click.pass_context
def due_command(
    ctx: click.Context, assignment: str, student: str, time: str, why: str, json_: bool
) -> None:
    """Move the due time of ASSIGNMENT for STUDENT (and their team) by TIME; 0 resets it.

    TIME counts from the due time in course.yaml, so repeating the command changes nothing. Without
    STUDENT, the command lists the extensions in force.

    \b
    labctl course due
    labctl course due hw3 alice +3d --why "ill, with a note"
    """
    if student and not time:
        raise UsageError(
            "TIME is missing", hint=f"labctl course due {assignment} {student} +3d   # 0 resets it"
        )
    folder = open_course(ctx, quiet=json_).folder
    if not student:
        _print_extensions(allowances.list_extensions(folder, assignment), json_)
        return
    moved = allowances.extend_due_time(
        folder, assignment, student, time, by=find_acting_person(), why=why
    )
    if json_:
        print_json({"due": moved})
        return
    zone = find_zone(folder.config)
    due = local_time_text(moved.due.at, zone)
    closes = local_time_text(moved.closes_at, zone) if moved.closes_at else ""
    text = f"{assignment} is due for {student} on {due}"
    click.echo(f"{text}; it closes {closes}" if closes else text)


def _print_extensions(extensions: Sequence[GrantedExtension], json_: bool) -> None:
    if json_:
        print_json({"extensions": extensions})
        return
    rows = [
        (one.assignment, one.student, f"+{duration_text(one.seconds)}", one.by, one.why)
        for one in extensions
    ]
    if rows:
        print_table(rows, ("ASSIGNMENT", "STUDENT", "TIME", "BY", "WHY"))
    else:
        click.echo("No student has an extension.")


@click.command("grades", short_help="Show grades, or export them in the roster's format.")
@click.argument("assignment")
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    help="Export in this format; own means the format of the imported roster.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write to this file (default: standard output).",
)
@click.option(
    "--rubric",
    is_flag=True,
    help="Add a column for each item of the rubric, with who marked it.",
)
@click.option("--no-penalty", is_flag=True, help="Export scores without late penalties.")
@click.option(
    "--to",
    type=click.Choice(["canvas"]),
    help="Compare the released grades with those in Canvas; nothing is sent.",
)
@click.option("--send", is_flag=True, help="With --to: also send the grades that differ.")
@click.option(
    "--release",
    is_flag=True,
    help="Let students read their feedback. labctl asks before it changes a released grade.",
)
@click.option("--tests", is_flag=True, help="Show the tests that each student failed.")
@yes_option
@json_option
@click.pass_context
def grades_command(
    ctx: click.Context,
    assignment: str,
    format_: str | None,
    out: Path | None,
    rubric: bool,
    no_penalty: bool,
    to: str | None,
    send: bool,
    release: bool,
    tests: bool,
    yes: bool,
    json_: bool,
) -> None:
    """Show the grades of ASSIGNMENT; with --format, print a file for your learning platform.

    The file has only this assignment's column, so importing it changes no other grade. A released
    grade stays the same until the next --release, which shows the difference and asks.

    \b
    labctl course grades hw3
    labctl course grades hw3 --tests
    labctl course grades hw3 --format canvas -o hw3.csv --release
    labctl course grades hw3 --to canvas
    """
    if to or send:
        course_canvas.check_options(assignment, to, bool(format_ or out))
    if tests:
        _require_tests_alone(assignment, bool(format_ or out or release))
        _print_tests(open_course(ctx, quiet=json_).folder, assignment, json_)
        return
    course = open_course(ctx, yes=yes, quiet=json_)
    if release:
        _release(ctx, course, assignment)
    if to:
        course_canvas.transfer_grades(
            ctx, course, assignment, penalty=not no_penalty, send=send, json_=json_
        )
        return
    is_export = bool(format_ or out)
    if is_export:
        form = "" if format_ == "own" else format_ or ""
        export = export_grades(
            course.folder, assignment, to=form, penalty=not no_penalty, rubric=rubric
        )
        _write_export(export, out, json_)
    if json_:
        rows = [_make_report(grade) for grade in list_grades(course.folder, assignment)]
        print_json({"assignment": assignment, "grades": rows, "written": str(out or "")})
        return
    _print_table(course.folder, assignment, rubric=rubric, is_export=is_export)


def _require_tests_alone(assignment: str, has_others: bool) -> None:
    if has_others:
        raise UsageError(
            "--tests cannot be combined with --format, --out or --release",
            why="it shows staff what each test gave",
            hint=f"labctl course grades {assignment} --tests",
        )


def _print_table(folder: CourseFolder, assignment: str, *, rubric: bool, is_export: bool) -> None:
    """Print the grades unless they were exported, and what the next release would change."""
    grades = list_grades(folder, assignment)
    if not is_export:
        _print_grades(grades, folder, rubric)
        print_grace(folder, assignment)
    print_unreleased_changes(assignment, grades)


def _write_export(export: GradeExport, out: Path | None, json_: bool) -> None:
    """Write the file, or print it unless only JSON may be printed."""
    if out:
        out.write_bytes(export.data)
    elif not json_:
        click.echo(export.data, nl=False)
    for note in export.notes:
        print_message(note)
    if out and not json_:
        print_message(f"{out}: {export.format}")


def _print_tests(folder: CourseFolder, assignment: str, json_: bool) -> None:
    students = list_student_tests(folder, assignment)
    if json_:
        print_json({"assignment": assignment, "students": students})
        return
    names = {student.id: student.name for student in folder.list_students(active_only=False)}
    print_student_tests(students, names)


def print_unreleased_changes(assignment: str, grades: list[Grade]) -> None:
    """List the released grades that a new release would change."""
    changed = [grade for grade in grades if grade.unreleased is not None]
    if not changed:
        return
    print_message("Released grades that differ from the current grading:")
    for grade in changed:
        print_message(f"  {clean(change_text(grade))}")
    print_message(f"  next: labctl course grades {assignment} --release   # asks first")


def _release(ctx: click.Context, course: Course, assignment: str) -> None:
    result = release_grades(
        course.folder, assignment, by=find_acting_person(), reporter=ctx.meta[SCREEN]
    )
    for change in result.changes:
        print_message(f"changed: {clean(change)}")
    waiting = f"; without a grade: {', '.join(result.waiting)}" if result.waiting else ""
    for line in result.unmarked:
        print_message(f"not complete: {clean(line)}")
    print_message(f"released to {count_text(len(result.students), 'student')}{waiting}")


def _make_report(grade: Grade) -> GradeReport:
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
    )


def _print_grades(grades: list[Grade], folder: CourseFolder, rubric: bool) -> None:
    names = {student.id: student.name for student in folder.list_students(active_only=False)}
    has_teams = any(grade.team for grade in grades)
    headings, cells_of = _choose_columns(grades, rubric)
    rows = [
        (
            grade.student,
            shorten_name(names.get(grade.student) or "-"),
            *([grade.team or "-"] if has_teams else []),
            *cells_of(grade),
            "; ".join(filter(None, [grade.problem, grade.stamp.free_days.text])),
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
