"""The commands course due and course grades: due times of students, and their grades."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.course import open_course
from labctl.cli.course_options import MOST_NAMES, WHY, find_acting_person, print_grace
from labctl.cli.course_tests import print_student_tests
from labctl.cli.exit_codes import clean, print_next
from labctl.cli.options import SCREEN, json_option, yes_option
from labctl.cli.tables import print_json, print_table
from labctl.cli.unreleased import print_unreleased_changes
from labctl.cli.wrapping import print_message
from labctl.config.times import local_time_text
from labctl.courses.grades import export_grades, list_grades, list_student_tests
from labctl.courses.records.timetable import find_zone
from labctl.courses.release import release_grades
from labctl.errors import UsageError
from labctl.lazy import lazy_imports
from labctl.text import count_text, extension_text, names_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from labctl.course import Course
    from labctl.courses.allowances import GrantedExtension
    from labctl.courses.records.folder import CourseFolder
    from labctl.courses.records.writeback import GradeExport

with lazy_imports(__name__):
    from labctl.cli import course_canvas, course_totals, grade_tables
    from labctl.courses import allowances, totals

FORMATS = ("own", "canvas", "moodle", "classroom", "nbgrader", "csv")


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
    print_unreleased_changes(assignment, list_grades(folder, assignment))


def _print_extensions(extensions: Sequence[GrantedExtension], json_: bool) -> None:
    if json_:
        print_json({"extensions": extensions})
        return
    rows = [
        (one.assignment, one.student, f"+{extension_text(one.seconds)}", one.by, one.why)
        for one in extensions
    ]
    if rows:
        print_table(rows, ("ASSIGNMENT", "STUDENT", "TIME", "BY", "WHY"), cut=False)
    else:
        click.echo("No student has an extension.")


@click.command("grades", short_help="Show grades, or export them in the roster's format.")
@click.argument("assignment", default="")
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

    Without ASSIGNMENT, the command shows all grades and each student's total, by the rules of
    `assignment_groups` in course.yaml. --format csv prints them as a table.

    The file has only this assignment's column, so importing it changes no other grade. A released
    grade stays the same until the next --release, which shows the difference and asks.

    \b
    labctl course grades
    labctl course grades hw3
    labctl course grades hw3 --tests
    labctl course grades hw3 --format canvas -o hw3.csv --release
    labctl course grades hw3 --to canvas
    """
    if not assignment:
        needs_one = rubric or no_penalty or to or send or release or tests
        course_totals.check_options(format_, bool(out), bool(needs_one))
        course_totals.show_totals(open_course(ctx, quiet=json_).folder, format_, out, json_)
        return
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
        export = export_grades(
            course.folder,
            assignment,
            to="" if format_ == "own" else format_ or "",
            penalty=not no_penalty,
            rubric=rubric,
            dropped=totals.list_drop_reasons(course.folder, assignment),
        )
        _write_export(export, out, json_)
        _print_held_back(assignment, export.held_back)
    if json_:
        _print_reports(course.folder, assignment, out)
        return
    _print_table(course.folder, assignment, rubric=rubric, is_export=is_export)


def _require_tests_alone(assignment: str, has_others: bool) -> None:
    if has_others:
        raise UsageError(
            "--tests cannot be combined with --format, --out or --release",
            why="it only lists the tests that failed",
            hint=f"labctl course grades {assignment} --tests",
        )


def _print_reports(folder: CourseFolder, assignment: str, out: Path | None) -> None:
    dropped = totals.find_dropped(folder, assignment)
    rows = [
        grade_tables.make_report(grade, dropped.get(grade.student))
        for grade in list_grades(folder, assignment)
    ]
    print_json({"assignment": assignment, "grades": rows, "written": str(out or "")})


def _print_table(folder: CourseFolder, assignment: str, *, rubric: bool, is_export: bool) -> None:
    """Print the grades unless they were exported, and what the next release would change."""
    grades = list_grades(folder, assignment)
    if not is_export:
        grade_tables.print_grades(grades, folder, totals.find_dropped(folder, assignment), rubric)
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
        print_message(f"wrote {out} (format: {export.format})")


def _print_held_back(assignment: str, students: tuple[str, ...]) -> None:
    if students:
        names = names_text(students, MOST_NAMES)
        print_message(f"held back, since the marks are for an older submission: {names}")
        print_next(f"labctl course mark {assignment} --next")


def _print_tests(folder: CourseFolder, assignment: str, json_: bool) -> None:
    students = list_student_tests(folder, assignment)
    if json_:
        print_json({"assignment": assignment, "students": students})
        return
    names = {student.id: student.name for student in folder.list_students(active_only=False)}
    print_student_tests(students, names)


def _release(ctx: click.Context, course: Course, assignment: str) -> None:
    result = release_grades(
        course.folder, assignment, by=find_acting_person(), reporter=ctx.meta[SCREEN]
    )
    for change in result.changes:
        print_message(f"changed: {clean(change)}")
    names = names_text(result.waiting, MOST_NAMES)
    waiting = f"; not released: {names}" if result.waiting else ""
    for line in result.unmarked:
        print_message(f"not complete: {clean(line)}")
    print_message(f"released to {count_text(len(result.students), 'student')}{waiting}")
    if result.unmarked:
        print_next(f"labctl course mark {assignment} --next")
