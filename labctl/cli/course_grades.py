"""course due, grades: when it is due for whom, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.course import open_course
from labctl.cli.options import SCREEN, json_option, yes_option

if TYPE_CHECKING:
    from labctl.course import Course
    from labctl.courses.records.gradebook import Grade

FORMATS = ("own", "canvas", "moodle", "classroom", "nbgrader", "csv")


@click.command("due", short_help="Move a due time for one student.")
@click.argument("assignment")
@click.argument("student")
@click.argument("time", metavar="TIME")
@click.option("--why", default="", help="Kept in the ledger beside it.")
@json_option
@click.pass_context
def due_command(
    ctx: click.Context, assignment: str, student: str, time: str, why: str, json_: bool
) -> None:
    """Move the due time of ASSIGNMENT for STUDENT (with their team) by TIME; 0 takes it back.

    It counts from the due time in course.yaml: the same again changes nothing.

    \b
    labctl course due hw3 alice +3d --why "ill, with a note"
    """
    from labctl.cli.screen import as_json
    from labctl.cli.submit_output import moment
    from labctl.courses.allowances import due
    from labctl.courses.creation import acting

    folder = open_course(ctx, quiet=json_).folder
    found = due(folder, assignment, student, time, by=acting(), why=why)
    if json_:
        as_json({"due": found})
        return
    closes = f"; it closes {moment(found.closes_at, str(found.due))}" if found.closes_at else ""
    click.echo(
        f"{assignment} is due for {student} on {moment(found.due.at, str(found.due))}{closes}"
    )


@click.command("grades", short_help="Grades, written back in the roster's own format.")
@click.argument("assignment")
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    help="Write the file; own: as the roster came.",
)
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: stdout."
)
@click.option(
    "--no-penalty", is_flag=True, help="Write scores as graded; lateness is not taken off."
)
@click.option(
    "--release",
    is_flag=True,
    help="Let the students read their feedback. Asks before it changes a released grade.",
)
@yes_option
@json_option
@click.pass_context
def grades_command(
    ctx: click.Context,
    assignment: str,
    format_: str | None,
    out: Path | None,
    no_penalty: bool,
    release: bool,
    yes: bool,
    json_: bool,
) -> None:
    """Who has which grade for ASSIGNMENT; with --format, the file that the course system imports.

    Only this assignment's column is written, so no other grade is touched. A released grade stays
    as it was released until the next --release, which shows the difference and asks.

    \b
    labctl course grades hw3
    labctl course grades hw3 --format canvas -o hw3.csv --release
    """
    from labctl.cli.screen import as_json
    from labctl.courses.grades import grades, written

    course = open_course(ctx, yes=yes, quiet=json_)
    if release:
        _release(ctx, course, assignment)
    wanted = format_ or ("own" if out else "")
    made = None
    if wanted:
        to = "" if wanted == "own" else wanted
        made = written(course.folder, assignment, to=to, penalty=not no_penalty)
        if out:
            out.write_bytes(made.data)
        elif not json_:
            click.echo(made.data, nl=False)
        for note in made.notes:
            click.echo(note, err=True)
    found = grades(course.folder, assignment)
    if json_:
        rows = [_row_json(one) for one in found]
        written_to = str(out) if out else ""
        as_json({"assignment": assignment, "grades": rows, "written": written_to})
    elif out:
        click.echo(f"{out}: {made.format if made else ''}", err=True)
    elif not wanted:
        _draw(found)
    if not json_:
        draw_unreleased(assignment, found)


def draw_unreleased(assignment: str, found: list[Grade]) -> None:
    """Show which released grades a new release would change."""
    from labctl.cli.exit_codes import clean
    from labctl.courses.records.released_grades import change_text

    changed = [one for one in found if one.unreleased is not None]
    if not changed:
        return
    click.echo("Released grades that differ from what is graded now:", err=True)
    for one in changed:
        click.echo(f"  {clean(change_text(one))}", err=True)
    click.echo(f"  next: labctl course grades {assignment} --release   # asks first", err=True)


def _release(ctx: click.Context, course: Course, assignment: str) -> None:
    from labctl.cli.exit_codes import clean
    from labctl.courses.creation import acting
    from labctl.courses.release import release

    found = release(course.folder, assignment, by=acting(), reporter=ctx.meta[SCREEN])
    for change in found.changes:
        click.echo(f"changed: {clean(change)}", err=True)
    waiting = f"; without a grade: {', '.join(found.waiting)}" if found.waiting else ""
    click.echo(f"released to {len(found.students)} students{waiting}", err=True)


def _row_json(one: Grade) -> dict[str, object]:
    return {
        "student": one.student,
        "team": one.team,
        "score": one.score,
        "points": one.points,
        "penalty_percent": one.stamp.penalty,
        "late_s": one.stamp.late_s,
        "final": one.final,
        "submission": one.stamp.number,
        "released": one.released,
        "corrected": one.corrected,
        "unreleased_final": one.unreleased.final if one.unreleased else None,
        "change": one.change,
        "problem": one.problem,
    }


def _draw(found: list[Grade]) -> None:
    from labctl.cli.screen import span, table
    from labctl.courses.records.gradebook import points_text

    rows: list[tuple[str, ...]] = [
        (
            one.student,
            one.team or "-",
            points_text(one.score) or "-",
            span(one.stamp.late_s) if one.stamp.late_s else "-",
            f"-{points_text(one.off)}" if one.off else "-",
            points_text(one.final) or "-",
            "yes" if one.released else "-",
            one.problem,
        )
        for one in found
    ]
    headings: tuple[str, ...] = ("STUDENT", "TEAM", "SCORE", "LATE", "OFF", "FINAL", "RELEASED", "")
    if all(not one.team for one in found):
        rows = [(row[0], *row[2:]) for row in rows]
        headings = (headings[0], *headings[2:])
    table(rows, headings)
    scores = [one.final for one in found if one.final is not None]
    mean = (
        f"; mean {sum(scores) / len(scores):.1f} of {points_text(found[0].points)}"
        if scores
        else ""
    )
    click.echo(f"graded: {len(scores)} of {len(found)}{mean}", err=True)
