"""The commands course init and course roster: the students of a course."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.course import open_course
from labctl.cli.course_options import find_acting_person
from labctl.cli.exit_codes import clean, print_next
from labctl.cli.options import SCREEN, json_option, yes_option
from labctl.cli.screen import Screen
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.config import find_data_dir
from labctl.courses import creation
from labctl.courses.records.roster import read_roster
from labctl.courses.sample_assignments import SAMPLES, SampleAssignment, add_assignment
from labctl.model import Value
from labctl.text import count_text

if TYPE_CHECKING:
    from labctl.courses.records.roster_import import RosterDiff
    from labctl.courses.records.student import Student

FORMATS = ("canvas", "moodle", "classroom", "nbgrader", "csv")
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FORMAT = click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    help="Format of the file (default: detected from the column names).",
)
MAX_NAMES = 20


class ChangedStudent(Value, frozen=True):
    id: str
    fields: tuple[str, ...]


class RosterDiffReport(Value, frozen=True):
    """What an import changed or would change, as --json prints it: the ids of the students."""

    format: str
    added: list[str]
    changed: list[ChangedStudent]
    returned: list[str]
    left: list[str]
    same: int


@click.command("init", short_help="Create a course's folder from a roster.")
@click.argument("name")
@click.option(
    "--roster",
    type=FILE,
    required=True,
    help="Roster from Canvas, Moodle, Classroom or nbgrader, or a CSV file.",
)
@FORMAT
@click.option(
    "--assignment",
    type=click.Choice(SAMPLES),
    help="Add this assignment: files to start with, public tests, hidden data and a rubric.",
)
@yes_option
@json_option
@click.pass_context
def init_command(
    ctx: click.Context,
    name: str,
    roster: Path,
    format_: str | None,
    assignment: str | None,
    yes: bool,
    json_: bool,
) -> None:
    """Create the folder NAME with course.yaml and the students of a roster.

    labctl detects the format from the column names. If rows are invalid, labctl lists their lines
    and creates nothing.

    \b
    labctl course init ml-2026 --roster canvas.csv
    labctl course init ml-2026 --roster canvas.csv --assignment hands-on
    """
    screen = Screen(yes=yes, quiet=json_)
    ctx.meta[SCREEN] = screen
    target = Path(ctx.find_root().obj or ".") / name
    created = creation.init_course(
        find_data_dir() / "templates", target, roster, screen, format=format_ or ""
    )
    sample = None
    if assignment:
        templates = find_data_dir() / "templates"
        sample = add_assignment(templates, target, assignment, screen, is_new=created.made)
    if json_:
        students = read_roster(target / "roster.csv")
        print_json(
            {
                "course": name,
                "made": created.made,
                "format": created.diff.format,
                "students": students,
                "diff": _make_report(created.diff),
                "assignment": sample,
            }
        )
        return
    _print_created(created, sample)


def _print_created(created: creation.CourseCreation, sample: SampleAssignment | None) -> None:
    target = created.path
    if created.made:
        click.echo(
            f"{target}: {count_text(len(created.diff.added), 'student')} from {created.diff.format}"
        )
    else:
        _print_diff(created.diff)
    if sample is not None:
        click.echo(f"{sample.name}: {clean(sample.directory)}")
        if sample.section:
            click.echo(f"{target}/course.yaml was not changed. Add these lines to it:\n")
            click.echo(sample.section)
    print_next(f"edit {target}/course.yaml, then:\nlabctl -C {target} course plan")


@click.command("roster", short_help="List the students, or import a new roster.")
@click.argument("file", type=FILE, required=False)
@FORMAT
@click.option("--dry-run", is_flag=True, help="Show what FILE would change, and change nothing.")
@click.option(
    "--keep", is_flag=True, help="Do not mark students as inactive if they are not in FILE."
)
@yes_option
@json_option
@click.pass_context
def roster_command(
    ctx: click.Context,
    file: Path | None,
    format_: str | None,
    dry_run: bool,
    keep: bool,
    yes: bool,
    json_: bool,
) -> None:
    """List the students; with FILE, import a newer roster and show what changed.

    labctl lists students who are not in FILE and asks before it marks them as inactive. Their costs
    and grades are kept.

    \b
    labctl course roster
    labctl course roster canvas-week-3.csv --dry-run
    """
    course = open_course(ctx, yes=yes, quiet=json_)
    folder = course.folder
    if file is None:
        students = folder.list_students(active_only=False)
        if json_:
            print_json({"students": students, "seats": folder.list_seats()})
        else:
            _print_students(students)
        return
    if dry_run:
        _, diff = creation.preview_import(folder, file, format=format_ or "", keep=keep)
    else:
        diff = creation.import_roster(
            folder,
            file,
            course.reporter,
            format=format_ or "",
            keep=keep,
            by=find_acting_person(),
        )
    if json_:
        print_json({"changed": not dry_run and not diff.is_empty, "diff": _make_report(diff)})
        return
    _print_diff(diff)
    if dry_run and not diff.is_empty:
        print_message(f"next: labctl course roster {file}")


def _make_report(diff: RosterDiff) -> RosterDiffReport:
    return RosterDiffReport(
        format=diff.format,
        added=[student.id for student in diff.added],
        changed=[
            ChangedStudent(id=change.after.id, fields=change.fields) for change in diff.changed
        ],
        returned=[student.id for student in diff.returned],
        left=[student.id for student in diff.left],
        same=diff.same,
    )


def _print_students(students: tuple[Student, ...]) -> None:
    rows = [
        (
            student.id,
            student.team or "-",
            student.section or "-",
            "yes" if student.active else "left",
            f"{student.name} <{student.email}>" if student.email else student.name,
        )
        for student in students
    ]
    print_table(rows, ("ID", "TEAM", "SECTION", "ACTIVE", "NAME"), cut=False)
    inactive = sum(not student.active for student in students)
    note = f"; {inactive} inactive" if inactive else ""
    print_message(f"students: {len(students) - inactive}{note}")


def _print_diff(diff: RosterDiff) -> None:
    def print_changes(sign: str, color: str, lines: list[str]) -> None:
        for line in lines[:MAX_NAMES]:
            click.echo(click.style(f"{sign} {clean(line)}", fg=color))
        if len(lines) > MAX_NAMES:
            click.echo(f"  and {len(lines) - MAX_NAMES} more; --json lists them all")

    print_changes("+", "green", [f"{student.id}  {student.name}" for student in diff.added])
    print_changes(
        "+", "green", [f"{student.id}  {student.name}  (is back)" for student in diff.returned]
    )
    changes = [
        f"{change.after.id}  "
        + ", ".join(
            f"{name}: {getattr(change.before, name) or '-'} -> {getattr(change.after, name) or '-'}"
            for name in change.fields
        )
        for change in diff.changed
    ]
    print_changes("~", "yellow", changes)
    print_changes(
        "-",
        "red",
        [
            f"{student.id}  {student.name}  (left: inactive, nothing is deleted)"
            for student in diff.left
        ],
    )
    count = len(diff.added) + len(diff.returned)
    click.echo(
        f"{diff.format}: {count} new, {len(diff.changed)} changed, {len(diff.left)} left, "
        f"{diff.same} the same"
    )
