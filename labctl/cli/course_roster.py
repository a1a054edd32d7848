"""course init, roster: who is in a course. Costs and grades are in modules beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.course import open_course
from labctl.cli.options import SCREEN, json_option, yes_option

if TYPE_CHECKING:
    from labctl.courses.records.roster_import import RosterDiff
    from labctl.courses.records.student import Student

FORMATS = ("canvas", "moodle", "classroom", "nbgrader", "csv")
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FORMAT = click.option("--format", "format_", type=click.Choice(FORMATS), help="Default: by header.")
MOST_NAMED = 20


@click.command("init", short_help="Make a course's folder from a roster.")
@click.argument("name")
@click.option(
    "--roster", type=FILE, required=True, help="Canvas, Moodle, Classroom, nbgrader, CSV."
)
@FORMAT
@yes_option
@json_option
@click.pass_context
def init_command(
    ctx: click.Context, name: str, roster: Path, format_: str | None, yes: bool, json_: bool
) -> None:
    """Make the folder NAME with course.yaml and the students of a roster.

    The format is told by the header. Every bad row is named by its line; then nothing is made.

    \b
    labctl course init ml-2026 --roster canvas.csv
    """
    from labctl.cli.screen import Screen, as_json
    from labctl.config import data_dir
    from labctl.courses.creation import init
    from labctl.courses.records.roster import read_roster

    screen = Screen(yes=yes, quiet=json_)
    ctx.meta[SCREEN] = screen
    target = Path(ctx.find_root().obj or ".") / name
    begun = init(data_dir() / "templates", target, roster, screen, format=format_ or "")
    if json_:
        students = read_roster(target / "roster.csv")
        as_json(
            {"course": name, "made": begun.made, "format": begun.diff.format}
            | {"students": students, "diff": _diff_json(begun.diff)}
        )
        return
    if begun.made:
        click.echo(f"{target}: {len(begun.diff.added)} students from {begun.diff.format}")
    else:
        _draw_diff(begun.diff)
    click.echo(f"next: edit {target}/course.yaml, then labctl -C {target} course plan", err=True)


@click.command("roster", short_help="Who is in the course; a new roster, shown as a diff.")
@click.argument("file", type=FILE, required=False)
@FORMAT
@click.option("--dry-run", is_flag=True, help="Show what FILE would change, and change nothing.")
@click.option("--keep", is_flag=True, help="FILE is a part of the course: nobody has left.")
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
    """Who is in the course; with FILE, take in a newer roster and show what changed.

    Whoever is not in FILE any more is shown and asked for; they become inactive, and their costs
    and grades stay.

    \b
    labctl course roster
    labctl course roster canvas-week-3.csv --dry-run
    """
    from labctl.cli.screen import as_json
    from labctl.courses import creation

    course = open_course(ctx, yes=yes, quiet=json_)
    folder = course.folder
    if file is None:
        students = folder.students(active_only=False)
        if json_:
            as_json({"students": students, "seats": folder.seats()})
        else:
            _draw_students(students)
        return
    if dry_run:
        _, diff = creation.look(folder, file, format=format_ or "", keep=keep)
    else:
        diff = creation.import_roster(
            folder, file, course.reporter, format=format_ or "", keep=keep
        )
    if json_:
        as_json({"changed": not dry_run and not diff.nothing, "diff": _diff_json(diff)})
        return
    _draw_diff(diff)
    if dry_run and not diff.nothing:
        click.echo(f"next: labctl course roster {file}", err=True)


def _diff_json(diff: RosterDiff) -> dict[str, object]:
    return {
        "format": diff.format,
        "added": [one.id for one in diff.added],
        "changed": [{"id": one.after.id, "fields": one.fields} for one in diff.changed],
        "returned": [one.id for one in diff.returned],
        "left": [one.id for one in diff.left],
        "same": diff.same,
    }


def _draw_students(students: tuple[Student, ...]) -> None:
    from labctl.cli.screen import table

    rows = [
        (
            one.id,
            one.team or "-",
            one.section or "-",
            "yes" if one.active else "left",
            f"{one.name} <{one.email}>" if one.email else one.name,
        )
        for one in students
    ]
    table(rows, ("ID", "TEAM", "SECTION", "ACTIVE", "NAME"))
    left = sum(not one.active for one in students)
    said = f"; {left} have left" if left else ""
    click.echo(f"students: {len(students) - left}{said}", err=True)


def _draw_diff(diff: RosterDiff) -> None:
    from labctl.cli.exit_codes import clean

    def draw(sign: str, colour: str, lines: list[str]) -> None:
        for line in lines[:MOST_NAMED]:
            click.echo(click.style(f"{sign} {clean(line)}", fg=colour))
        if len(lines) > MOST_NAMED:
            click.echo(f"  and {len(lines) - MOST_NAMED} more; --json lists them all")

    draw("+", "green", [f"{one.id}  {one.name}" for one in diff.added])
    draw("+", "green", [f"{one.id}  {one.name}  (is back)" for one in diff.returned])
    changes = [
        f"{one.after.id}  "
        + ", ".join(
            f"{name}: {getattr(one.before, name) or '-'} -> {getattr(one.after, name) or '-'}"
            for name in one.fields
        )
        for one in diff.changed
    ]
    draw("~", "yellow", changes)
    draw(
        "-",
        "red",
        [f"{one.id}  {one.name}  (left: inactive, nothing is deleted)" for one in diff.left],
    )
    count = len(diff.added) + len(diff.returned)
    click.echo(
        f"{diff.format}: {count} new, {len(diff.changed)} changed, {len(diff.left)} left, "
        f"{diff.same} the same"
    )
